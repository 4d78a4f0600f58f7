"""Whether a device repeats a graph by itself: tried once, on a graph of one kernel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from graphcap.errors import BackendError
from graphcap.recorders.base import garbage_collection_held
from graphcap.recorders.loop import GraphLoop, LoopDriver
from graphcap.recorders.probe import CaptureProbe, probe_capture


def keeps_graphs() -> bool:
    """Whether this torch can keep the graph that it captured, to be put into another one (2.8)."""
    return hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph")


def kept_graph() -> torch.cuda.CUDAGraph:
    """A graph to capture into whose raw handle lasts. Only where `keeps_graphs`."""
    make: Any = torch.cuda.CUDAGraph
    return make(keep_graph=True)


def raw_stream(device: torch.device) -> Callable[[], int]:
    """What gives the raw handle of the current stream of `device`."""
    index = torch.cuda.current_device() if device.index is None else device.index
    fast = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if fast is None:
        return lambda: torch.cuda.current_stream(device).cuda_stream
    return lambda: fast(index)


class LoopTrial:
    """A graph that adds 1 to a value, repeated on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self) -> tuple[float, float, int]:
        """The value after a loop of 3, after another one of 5 with no live row, and what that left.

        Raises:
            BackendError, RuntimeError: of driver and torch.
        """
        driver = LoopDriver.loaded()
        device, stream = self.device, torch.cuda.Stream(self.device)
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
            value = torch.zeros(1, device=device)
            source = torch.tensor([7, 3], device=device)
            place = torch.zeros_like(source)
            left = place[-1:].view(torch.int32)[:1]  # set by the loop itself, to 3
            live = torch.tensor([False, True], device=device)
            value.add_(1).zero_()
            stream.synchronize()
            graph = kept_graph()
            graph.capture_begin(
                pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local"
            )
            value.add_(1)
            graph.capture_end()
            raw = graph.raw_cuda_graph()
            loop = GraphLoop(driver, raw, left, live, lambda: stream.cuda_stream, (place, source))
            try:
                loop.launch()
                first = float(value)
                source[-1:].fill_(5)
                live.zero_()
                loop.launch()
                return first, float(value), int(left)
            finally:
                loop.close()
                graph.reset()


_found: dict[torch.device, CaptureProbe] = {}
_lock = threading.Lock()


def probe_loops(device: torch.device) -> CaptureProbe:
    """What the trial finds on `device`; made once per process and device.

    A driver that never ends the loop cannot be told from a slow one inside the process.
    """
    if device.type != "cuda":
        return CaptureProbe(False, f"{device.type} devices have no graphs")
    captures = probe_capture(device)
    if not captures.works:
        return CaptureProbe(False, f"no graph can be captured ({captures.detail})")
    with _lock:
        if device not in _found:
            _found[device] = run_trial(LoopTrial(device))
        return _found[device]


def run_trial(trial: Any) -> CaptureProbe:
    """Run a `LoopTrial`, or what is like one, and judge what it gives."""
    if not keeps_graphs():
        return CaptureProbe(
            False,
            f"torch {torch.__version__} does not keep the graphs that it captures; 2.8 or later does",
        )
    started = time.perf_counter()
    try:
        with garbage_collection_held():
            found = trial.run()
    except (BackendError, RuntimeError) as error:
        text = str(error).strip() or type(error).__name__
        return CaptureProbe(False, text.splitlines()[0])
    if found != (3.0, 4.0, 4):
        return CaptureProbe(
            False,
            f"loops of 3 runs, then of 1 of 5, gave {found[0]:g} and {found[1]:g} with {found[2]} left, "
            f"expected 3, 4 and 4 left",
        )
    return CaptureProbe(True, f"made and run in {(time.perf_counter() - started) * 1e3:.1f} ms")
