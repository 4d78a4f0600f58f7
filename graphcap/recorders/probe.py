"""Whether a device captures graphs: tried once, on a graph of one kernel, before anything relies on it.

Some drivers refuse capture at its first call, some at the end, and a driver may also accept everything
and compute something else. So the probe goes the whole way, compares the result, and on any failure
puts stream, allocator and random generator back. A driver that hangs cannot be told from a slow one
inside the process: the probe then does not return, and ``GRAPHCAP_RECORDER=tape`` leaves it out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphcap.errors import StateError
from graphcap.recorders.base import garbage_collection_held
from graphcap.recorders.cuda_runtime import CudaRuntime

logger = logging.getLogger(__name__)

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


class TorchCapture:
    """The real thing: torch's graphs on a CUDA device.

    Args:
        device: a CUDA device.
        runtime: asked before torch is; None: torch finds out by itself.
        generators: besides the device's own, random generators that may still expect a capture that
            failed; one that succeeds frees them of that.
    """

    def __init__(
        self,
        device: torch.device,
        runtime: CudaRuntime | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self.device = device
        self._runtime = runtime or CudaRuntime.loaded()
        self._generators = tuple(generators)
        self._tried = False  # torch was asked for a capture
        self._open = False  # a capture may be in progress

    def is_capturing(self) -> bool:
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def prepare(self) -> None:
        self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self.value = torch.zeros(1, device=self.device)
            self.value.add_(1)
            self.value.zero_()
        self._stream.synchronize()

    def begin(self) -> None:
        with torch.cuda.stream(self._stream):
            if self._runtime is not None:
                self._runtime.try_capture(self._stream.cuda_stream)
            self._pool: Any = torch.cuda.graph_pool_handle()
            self._graph = torch.cuda.CUDAGraph()
            for generator in self._generators:
                self._graph.register_generator_state(generator)
            self._tried = self._open = True
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def launch(self) -> None:
        with torch.cuda.stream(self._stream):
            self.value.add_(1)

    def end(self) -> None:
        self._open = False
        with torch.cuda.stream(self._stream):
            try:
                self._graph.capture_end()
            except RuntimeError:
                give_up(self._graph, self._pool, self.device)
                raise

    def replay(self) -> None:
        with torch.cuda.stream(self._stream):
            self._graph.replay()

    def result(self) -> float:
        self._stream.synchronize()
        return float(self.value.item())

    def recover(self) -> None:
        self._abandon()
        torch.cuda.synchronize(self.device)
        if self._tried and not _draws(self.device):
            self._free_generator()
        self.__dict__.pop("value", None)
        torch.cuda.empty_cache()

    def close(self) -> None:
        self._graph.reset()

    def _abandon(self) -> None:
        """End the capture, whether or not the driver has given it up, and drop the graph."""
        if self._open:
            try:
                self.end()
            except RuntimeError as error:
                logger.debug("ending the broken capture: %s", error)
        if self._tried:
            try:
                self._graph.reset()
            except RuntimeError as error:
                logger.debug("resetting the broken graph: %s", error)

    def _free_generator(self) -> None:
        """torch's default generator still expects the capture that failed: free it of that."""
        try:  # a capture that succeeds does, and leaves older graphs their generator
            self.begin()
            self.launch()
            self.end()
            self._graph.reset()
        except RuntimeError as error:
            logger.debug("capturing again: %s", error)
            self._abandon()
        generator = _generator(self.device)
        if not _draws(self.device) and hasattr(generator, "graphsafe_set_state"):
            generator.graphsafe_set_state(generator.clone_state())
        if not _draws(self.device):
            raise RuntimeError(
                f"torch {torch.__version__} keeps expecting a capture, and random numbers on "
                f"{self.device} fail; start again with GRAPHCAP_RECORDER=tape"
            )


def _generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _draws(device: torch.device) -> bool:
    """Whether the device's default generator draws. It is left as it was."""
    generator = _generator(device)
    before = generator.get_state()
    try:
        torch.empty(1, device=device).uniform_()
    except RuntimeError:
        return False
    finally:
        generator.set_state(before)
    return True


_broken: list[torch.cuda.CUDAGraph] = []


def give_up(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
    """After a capture that torch could not end: reset `graph`, stop the allocator from serving `pool`, and
    count the graph no longer among the pool's users, or its memory could never be given back.

    No capture may use `pool` again, and the graph is kept: torch's allocator of host memory goes on asking
    it which streams are its own, and cannot be told to stop.
    """
    try:
        graph.reset()  # newer torch does the rest of it here
    except RuntimeError as error:
        logger.debug("resetting the broken graph: %s", error)
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is None:  # its name in torch before 2.6
        end = getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", None)
    if end is None:
        return
    index = _with_index(device).index
    try:
        end(index, pool)
    except RuntimeError as error:  # it had ended already, or never begun: nothing is counted
        logger.debug("ending allocation to the graph pool: %s", error)
        return
    _broken.append(graph)
    torch._C._cuda_releasePool(index, pool)


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
        key = (_with_index(device), make_api)
        if key not in _found:
            probe = run_probe(make_api(key[0]))
            if probe.stage == "prepare":
                return probe
            _found[key] = probe
        return _found[key]


def _with_index(device: torch.device) -> torch.device:
    """``cuda`` is the current device, and the same as its name with the index."""
    if device.index is not None:
        return device
    return torch.device(device.type, torch.cuda.current_device())
