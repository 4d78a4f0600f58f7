"""Whether a device captures graphs: tried once, on a graph of one kernel, before anything relies on it.

Some drivers refuse capture at its first call, some at the end, and a driver may also accept everything
and compute something else. So the probe goes the whole way, compares the result, and on any failure
puts stream, allocator and random generator back. A driver that hangs cannot be told from a slow one
inside the process: the probe then does not return, and ``GRAPHCAP_RECORDER=tape`` leaves it out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphcap.errors import StateError
from graphcap.recorders.base import garbage_collection_held
from graphcap.recorders.torch_capture import TorchCapture, with_index

STAGES = {
    "prepare": "the device cannot be used, before any capture",
    "begin": "no capture can be begun",
    "launch": "no kernel can be launched under capture",
    "end": "what was captured cannot be made into a graph",
    "replay": "the graph cannot be launched",
    "result": "the graph computes something else",
}
"""The calls of a `CaptureApi` in order, and what it means that one fails."""

KNOWN_ERRORS = {
    "ixErrorNotSupported": "CoreX says so where card or SDK have no graph capture, as reported from "
    "BI-V150; other cards, with newer SDKs, do capture",
    "out of memory": "no device memory was free, which says nothing about capture: free some",
}
"""Pieces of error texts -> what they mean to a user."""


class CaptureApi(Protocol):
    """What the probe does on a device. Each call raises what torch or the driver raises."""

    def is_capturing(self) -> bool:
        """Whether a capture is in progress on this thread's current stream."""

    def prepare(self) -> None:
        """All that a capture must not do: make the stream and the value, 0, and load the kernel."""

    def begin(self) -> None: ...

    def launch(self) -> None:
        """One kernel, which adds 1 to the value."""

    def end(self) -> None:
        """End the capture and instantiate the graph."""

    def replay(self) -> None: ...

    def result(self) -> float:
        """The value, once the device has done all of it."""

    def recover(self) -> None:
        """After a failure anywhere: no capture in progress, device, allocator and random generators as
        before. Raises RuntimeError where that cannot be had."""

    def close(self) -> None:
        """Give everything back after a success."""


@dataclass(frozen=True)
class CaptureProbe:
    """Whether a graph of one kernel can be captured and replayed.

    Attributes:
        works: it can.
        detail: the time it took, or what failed, the text of the error, and what is known of it.
        stage: of `STAGES`, the one that failed; None: all passed, or none was tried.
    """

    works: bool
    detail: str
    stage: str | None = None


def run_probe(api: CaptureApi) -> CaptureProbe:
    """Capture, instantiate, replay twice, compare. Leaves the device usable whatever happens.

    Raises:
        StateError: this thread is capturing; a probe would break that capture.
    """
    if api.is_capturing():
        raise StateError(
            "graph capture cannot be probed inside another capture; end that one first, or make the "
            "recorder before it"
        )
    started = time.perf_counter()
    stage = "prepare"
    try:
        with garbage_collection_held():
            for stage in ("prepare", "begin", "launch", "end", "replay", "replay"):
                getattr(api, stage)()
            stage = "result"
            value = api.result()
            if value != 2:
                raise RuntimeError(f"two replays of a graph that adds 1 to 0 gave {value:g}")
        api.close()
    except Exception as error:
        detail = f"{STAGES[stage]}: {_explained(error)}"
        try:
            api.recover()
        except Exception as lasting:
            detail += f"; and the attempt left a trace: {_first_line(lasting)}"
        return CaptureProbe(False, detail, stage)
    except BaseException:  # interrupted: the capture must not stay open
        api.recover()
        raise
    return CaptureProbe(
        True, f"captured and replayed in {(time.perf_counter() - started) * 1e3:.1f} ms"
    )


def _explained(error: Exception) -> str:
    text = _first_line(error)
    meanings = [meaning for piece, meaning in KNOWN_ERRORS.items() if piece in str(error)]
    return f"{text} ({meanings[0]})" if meanings else text


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


_found: dict[tuple[torch.device, Callable[..., Any]], CaptureProbe] = {}
_lock = threading.Lock()


def probe_capture(
    device: torch.device, make_api: Callable[[torch.device], CaptureApi] = TorchCapture
) -> CaptureProbe:
    """What the probe finds on `device`; tried once per process and device.

    A device that could not even be prepared (no free memory) is tried again the next time.

    Raises:
        StateError: not tried yet, and this thread is capturing.
    """
    if device.type != "cuda":
        return CaptureProbe(False, f"{device.type} devices have no graph capture")
    with _lock:
        key = (with_index(device), make_api)
        if key not in _found:
            probe = run_probe(make_api(key[0]))
            if probe.stage == "prepare":
                return probe
            _found[key] = probe
        return _found[key]
