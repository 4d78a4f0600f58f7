"""CudaStandIns: what a step calls of torch.cuda, and Triton's launches, on a machine without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch

from graphcap.lint.finding import CUDA, TAPE, WEAKENS, Notes
from graphcap.lint.streams import Capture, Event, Stream
from graphcap.recorders.triton_launches import triton_is_recorded

_SKIPPED = frozenset({"torch", "triton"})
"""Packages whose own references to what is replaced stay as they are."""


class CudaStandIns:
    """Replaces parts of `torch.cuda` while lint works, also where a module imported them by name.

    Attributes:
        generators: random generators of the step's own that its maker lists as state.
        seeded: what the step called in this run to seed torch's generators; None: nothing.
    """

    def __init__(self) -> None:
        self.generators: tuple[torch.Generator, ...] = ()
        self.seeded: str | None = None
        self._capture = Capture()
        self._capture.current = [Stream(self._capture, "the current stream")]
        self._default = Stream(self._capture, "the legacy default stream", legacy=True)

    def knows(self, generator: torch.Generator | None) -> bool:
        return any(generator is known for known in self.generators)

    def launch(self) -> None:
        self._capture.launch()

    @property
    def were_asked(self) -> bool:
        """Whether the step has asked if it is captured: then each recorder sees a step of its own."""
        return self._capture.asked

    @contextmanager
    def noting(self, notes: Notes, *, capturing: bool) -> Iterator[None]:
        """Findings of what runs inside go to `notes`; `capturing` is what it is told if it asks."""
        self._capture.begin(notes, capturing)
        self.seeded = None
        try:
            yield
            self._capture.end()
        finally:
            self._capture.notes = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as self._stack:
            self._replace(self._replacements())
            yield

    def see_triton(self) -> None:
        """Stand in for Triton's launches, once the step's modules have imported it."""
        self._replace(self._launchers())

    def _replace(self, replaced: list[tuple[Any, str, Any]]) -> None:
        pairs = []
        for owner, name, value in replaced:
            original = getattr(owner, name)
            setattr(owner, name, value)
            self._stack.callback(setattr, owner, name, original)
            pairs.append((original, value))
        _exchange(pairs)
        self._stack.callback(_exchange, [(new, old) for old, new in pairs])

    # -- what is replaced ------------------------------------------------------------------------

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        cuda, capture = torch.cuda, self._capture

        class SideStream(Stream):
            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__(capture)

        class AnyEvent(Event):
            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__(capture)

        def current(*_: Any, **__: Any) -> Stream:
            return capture.current[-1]

        def set_stream(stream: Stream) -> None:
            capture.current[-1] = stream

        table: dict[str, Any] = {
            "synchronize": self._waiting("torch.cuda.synchronize()"),
            "Stream": SideStream,
            "ExternalStream": SideStream,
            "Event": AnyEvent,
            "current_stream": current,
            "default_stream": lambda *_, **__: self._default,
            "stream": lambda stream: nullcontext() if stream is None else stream,
            "set_stream": set_stream,
            "is_current_stream_capturing": capture.is_capturing,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "device": lambda device: nullcontext(),
            "graph": self._nested("torch.cuda.graph"),
            "manual_seed": self._seeding("torch.cuda.manual_seed()", lambda seed: None),
            "manual_seed_all": self._seeding("torch.cuda.manual_seed_all()", lambda seed: None),
        }
        replaced: list[tuple[Any, str, Any]] = [
            (cuda, name, value) for name, value in table.items()
        ]
        replaced += [
            (cuda.nvtx, name, lambda *_, **__: 0) for name in ("range_push", "range_pop", "mark")
        ]
        replaced += [
            (torch, name, self._seeding(f"torch.{name}()", getattr(torch, name)))
            for name in ("manual_seed", "seed")
        ]
        accelerator = getattr(torch, "accelerator", None)
        if accelerator is not None:
            waiting = self._waiting("torch.accelerator.synchronize()")
            replaced.append((accelerator, "synchronize", waiting))
        return replaced

    def _launchers(self) -> list[tuple[Any, str, Any]]:
        replaced: list[tuple[Any, str, Any]] = []
        for module, name, runs_here in (
            ("triton.runtime.jit", "JITFunction", False),
            ("triton.runtime.interpreter", "InterpretedFunction", True),
        ):
            kind: Any = getattr(sys.modules.get(module), name, None)
            original = getattr(kind, "run", None)  # Triton 2 gives each kernel its own
            if original is not None:
                replaced.append((kind, "run", self._launching(original if runs_here else None)))
        return replaced

    def _waiting(self, what: str) -> Callable[..., None]:
        def wait(*_: Any, **__: Any) -> None:
            self._capture.synchronises(what)

        return wait

    def _nested(self, what: str) -> Callable[..., Any]:
        def capture(*_: Any, **__: Any) -> Any:
            if self._capture.notes is not None:
                self._capture.notes.note(
                    "synchronisation",
                    what,
                    "a capture inside a capture is refused by the driver",
                    "call what it captures directly: it becomes part of the recording",
                    breaks=(CUDA,),
                )
            return nullcontext()

        return capture

    def _seeding(self, what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            notes, self._capture.notes = self._capture.notes, None  # torch's own seeds cuda's
            if notes is not None:
                self.seeded = what
                notes.note(
                    "random draw",
                    what,
                    "replays do not seed",
                    "seed before run(), outside the step",
                    severity=WEAKENS,
                )
            try:
                return original(*args, **kwargs)
            finally:
                self._capture.notes = notes

        return seed

    def _launching(self, original: Callable[..., Any] | None) -> Callable[..., Any]:
        def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            from graphcap.operations import current_observer

            notes, trace = self._capture.notes, cast(Any, current_observer())
            if notes is not None and not getattr(trace, "is_inside", False):
                self._capture.launch()
                skipped = "; lint did not run it" if original is None else ""
                recorded = triton_is_recorded()
                tape = "the tape records it" if recorded else "a tape cannot see its arguments"
                notes.note(
                    "custom operator",
                    f"the Triton kernel {getattr(kernel, '__name__', '?')!r}",
                    f"{tape}, a CUDA graph captures it{skipped}",
                    "nothing to do for capture"
                    if recorded
                    else "take Triton 3.5, wrap the launch with graphcap.operations.operation, or "
                    "register it with torch.library",
                    breaks=() if recorded else (TAPE,),
                )
            if original is None:
                return None
            with trace.inside() if hasattr(trace, "inside") else nullcontext():
                return original(kernel, *args, **kwargs)

        return launch


def _exchange(pairs: list[tuple[Any, Any]]) -> None:
    """Names of modules that are bound to the first of a pair get the second."""
    by_id = {id(old): new for old, new in pairs}
    for name, module in list(sys.modules.items()):
        own = name.startswith("graphcap.lint")
        if module is None or own or name.partition(".")[0] in _SKIPPED:
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in by_id:
                setattr(module, key, by_id[id(value)])
