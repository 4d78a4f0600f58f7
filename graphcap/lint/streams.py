"""Stand-ins for CUDA streams and events: which streams belong to the capture, as the driver would say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphcap.lint.finding import CUDA, Notes
from graphcap.lint.places import Site, site_here

_WAITS = "the host waits for the device there, which breaks a capture"
_NO_WAIT = "take it out of the step: what follows on the stream is in order without it"
_FORK = "let the side stream wait for the current one first: side.wait_stream(torch.cuda.current_stream())"


@dataclass
class _Fork:
    stream: Stream
    site: Site
    joined: bool = False


@dataclass
class Capture:
    """The streams of one run of a step.

    Attributes:
        notes: where findings go; None: no run is watched.
        capturing: what the step is told when it asks whether it is captured.
        asked: it has asked.
        current: the streams entered, the innermost last; the first is the capturing one.
        forked: side streams of the capture, where they joined in, and whether they were waited for.
    """

    current: list[Stream] = field(default_factory=list)
    notes: Notes | None = None
    capturing: bool = False
    asked: bool = False
    forked: dict[int, _Fork] = field(default_factory=dict)

    def begin(self, notes: Notes, capturing: bool) -> None:
        self.notes, self.capturing, self.forked = notes, capturing, {}
        self.current = [Stream(self, "the capturing stream")]

    def end(self) -> None:
        for fork in self.forked.values():
            if self.notes is not None and not fork.joined:
                self.notes.note(
                    "stream",
                    f"{fork.stream.name} is not joined",
                    "a capture ends only when every stream that it forked has been waited for",
                    "end with torch.cuda.current_stream().wait_stream(side)",
                    breaks=(CUDA,),
                    site=fork.site,
                )
        self.notes, self.forked = None, {}

    def is_capturing(self) -> bool:
        self.asked = True
        return self.notes is not None and self.capturing

    def holds(self, stream: Stream) -> bool:
        return self.notes is not None and (stream is self.current[0] or id(stream) in self.forked)

    def launch(self) -> None:
        """An operation starts on the current stream."""
        stream = self.current[-1]
        if self.notes is None:
            return
        if self.holds(stream):
            if id(stream) in self.forked:
                self.forked[id(stream)].joined = False
            return
        legacy = "the legacy default stream" if stream.is_legacy else stream.name
        self.notes.note(
            "stream",
            f"work on {legacy}",
            "it is not forked from the capturing stream, so that the work is not in the graph"
            + (" or breaks the capture" if stream.is_legacy else ""),
            "stay on torch.cuda.current_stream()" if stream.is_legacy else _FORK,
            breaks=(CUDA,),
        )

    def waits(self, waiting: Stream, other: Stream | None, captured: bool, what: str) -> None:
        """`waiting` waits for work of `other` that is, or is not, part of the capture."""
        if self.notes is None:
            return
        if captured and not self.holds(waiting):
            self.forked[id(waiting)] = _Fork(waiting, site_here())
        elif captured and id(other) in self.forked:
            self.forked[id(other)].joined = True
        elif not captured and self.holds(waiting):
            self.notes.note(
                "stream",
                f"waiting for {what}",
                "a capture cannot depend on work outside it",
                _FORK,
                breaks=(CUDA,),
            )

    def synchronises(self, what: str) -> None:
        if self.notes is not None:
            self.notes.note("synchronisation", what, _WAITS, _NO_WAIT, breaks=(CUDA,))


class Stream:
    """In place of `torch.cuda.Stream`."""

    def __init__(self, capture: Capture, name: str = "a side stream", legacy: bool = False) -> None:
        self._capture, self.name, self.is_legacy = capture, name, legacy
        self.cuda_stream = self.stream_id = self.device_index = self.priority = 0

    def wait_stream(self, other: Stream) -> None:
        self._capture.waits(self, other, self._capture.holds(other), other.name)

    def wait_event(self, event: Event) -> None:
        outside = "an event that was recorded outside the capture"
        self._capture.waits(self, event.stream, event.captured, outside)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._capture)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._capture.synchronises("Stream.synchronize()")

    def query(self) -> bool:
        self._capture.synchronises("Stream.query()")
        return True

    def __enter__(self) -> Stream:
        self._capture.current.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        self._capture.current.pop()


class Event:
    """In place of `torch.cuda.Event`.

    Attributes:
        captured: it was recorded on a stream of the capture.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.captured = False
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self._capture.current[-1]
        self.captured = self._capture.holds(self.stream)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._capture.current[-1]).wait_event(self)

    def synchronize(self) -> None:
        self._capture.synchronises("Event.synchronize()")

    def query(self) -> bool:
        self._capture.synchronises("Event.query()")
        return True

    def elapsed_time(self, other: Event) -> float:
        self._capture.synchronises("Event.elapsed_time()")
        return 0.0
