"""The cuda recorder: one CUDA graph per bucket, one graph memory pool, one stream."""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from graphcap.census import Call, Census
from graphcap.errors import BackendError, CaptureError, StateError
from graphcap.explain import warn
from graphcap.operations import Operation
from graphcap.recorders.base import (
    BoundStep,
    Loop,
    Recorder,
    Recording,
    autocast_casts_not_kept,
    garbage_collection_held,
)
from graphcap.recorders.graph_nodes import GraphReader
from graphcap.recorders.guard import StepGuard
from graphcap.recorders.loop import GraphLoop, LoopDriver
from graphcap.recorders.loop_probe import keeps_graphs, kept_graph, probe_loops, raw_stream
from graphcap.recorders.probe import TorchCapture, end_allocation_to, run_probe
from graphcap.recorders.source import raising_line
from graphcap.recorders.tape import dispatch_row, storage_key, tensors_in

logger = logging.getLogger(__name__)


class CaptureTrace(StepGuard):
    """Watches a step under capture and counts the graph nodes that each operation makes."""

    def __init__(self, device: torch.device, stream: int, reader: GraphReader | None) -> None:
        super().__init__(device, replays_live=False)
        self.calls: list[Call] = []
        self._stream = stream
        self._reader = reader
        self._graph: Any = None
        self.pinned: dict[int, Any] = {}
        self._made: set[int] = set()

    def called(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before = self._count()
        self._pin((args, kwargs))
        operation.function(*args, **kwargs)
        self._append(operation.name, operation.implementation, before)

    def dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self._count()
        inputs = self._pin((args, kwargs))
        result = func(*args, **kwargs)
        self._made |= {storage_key(t) for t in tensors_in(result)} - inputs
        self._append(dispatch_row(func), "torch", before)
        return result

    def _pin(self, values: Any) -> set[int]:
        """Keep what the graph reads and the capture did not make: nothing else would keep it."""
        keys = set()
        for tensor in tensors_in(values):
            key = storage_key(tensor)
            keys.add(key)
            if key not in self._made:
                self.pinned.setdefault(key, tensor.untyped_storage())
        return keys

    def census(self) -> Census:
        """Of the capture so far; asked for at its end."""
        try:
            nodes = None if self._reader is None else self._reader.nodes(self._handle())
        except BackendError as error:  # an older driver: no reason to lose the recording
            warn(logger, "graph-nodes", "graph nodes are not counted: %s", error)
            nodes = None
        return Census.of(self.calls, graph=nodes)

    def count_only(self) -> Census:
        """The number of nodes captured so far, of whatever kind."""
        count = self._count()
        return Census((), 0, None if count is None else {"node": count})

    def _append(self, name: str, implementation: str, before: int | None) -> None:
        after = self._count()
        made = None if after is None or before is None else after - before
        if made != 0:  # views and allocations make no node and are no operation
            self.calls.append(Call(name, implementation, nodes=made))

    def _count(self) -> int | None:
        try:
            return None if self._reader is None else self._reader.count(self._handle())
        except BackendError as error:
            warn(logger, "graph-nodes", "graph nodes are not counted: %s", error)
            self._reader = None
            return None

    def _handle(self) -> Any:
        if self._graph is None:
            assert self._reader is not None
            self._graph = self._reader.graph_under_capture(self._stream)
        return self._graph


class CudaRecording(Recording):
    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        outputs: Mapping[str, torch.Tensor],
        pinned: tuple[torch.UntypedStorage, ...],
        census: Census,
        nbytes: int,
        device: torch.device,
        kept: bool = False,
    ) -> None:
        self._device = device
        self._kept = kept
        self.outputs = outputs
        self.nbytes = nbytes
        self.pinned = pinned
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._census = census
        self.replay = graph.replay  # type: ignore[method-assign]  # one Python frame less a token

    def replay(self) -> None:
        raise StateError("this recording is closed and cannot be replayed; capture again")

    def census(self) -> Census:
        return self._census

    def repeated(self, left: torch.Tensor, live: torch.Tensor) -> Loop:
        probe = probe_loops(self._device)
        if not probe.works:
            raise BackendError(probe.detail)
        if self._graph is None or not self._kept:
            raise BackendError(
                "the graph was not kept; set the recorder's `repeatable` before it records"
            )
        graph: Any = self._graph
        with torch.cuda.device(self._device):
            before, _ = torch.cuda.mem_get_info(self._device)
            loop = GraphLoop(
                LoopDriver.loaded(), graph.raw_cuda_graph(), left, live, raw_stream(self._device)
            )
            torch.cuda.synchronize(self._device)
            loop.nbytes = max(0, before - torch.cuda.mem_get_info(self._device)[0])
            return loop

    @property
    def is_open(self) -> bool:
        return self._graph is not None

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
            self._graph = None
            self.outputs = {}
            self.pinned = ()
            del self.replay  # the method above answers from here on


class CudaRecorder(Recorder):
    """Captures steps on a CUDA device.

    All recordings share one graph memory pool: record the largest bucket first, and the smaller
    ones find their memory there (after a capture that the driver gave up, later ones share another).
    Capture and warm-up run on one stream of the recorder's, so that
    per-stream workspaces (cuBLAS) exist before the capture.
    """

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise BackendError(
                f"the cuda recorder needs a CUDA device, found {device}; use GRAPHCAP_RECORDER=tape"
            )
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._settled = False
        self._made: weakref.WeakSet[CudaRecording] = weakref.WeakSet()
        try:
            self._reader: GraphReader | None = GraphReader()
        except BackendError as error:
            warn(logger, "graph-nodes", "graph nodes are not counted: %s", error)
            self._reader = None

    def warm_up(self, step: BoundStep) -> Mapping[str, torch.Tensor]:
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), torch.no_grad(), autocast_casts_not_kept():
            outputs = step()
        current.wait_stream(self._stream)
        return outputs

    def record(self, step: BoundStep, bucket: int) -> CudaRecording:
        if torch.cuda.is_current_stream_capturing():
            raise StateError(
                "a recording was started inside another capture on this stream; "
                "end that capture first"
            )
        with garbage_collection_held():
            torch.cuda.synchronize(self.device)
            if not self._settled:  # warm-up left blocks that no capture can use
                torch.cuda.empty_cache()
                self._settled = True
            free_before, _ = torch.cuda.mem_get_info(self.device)
            if not any(recording.is_open for recording in self._made):
                # torch does not take a pool again whose graphs are all gone.
                self._pool = torch.cuda.graph_pool_handle()
            kept = self.repeatable and keeps_graphs()
            graph = kept_graph() if kept else torch.cuda.CUDAGraph()
            try:
                for generator in self.generators:
                    if generator.device.type == "cuda":
                        graph.register_generator_state(generator)
                outputs, pinned, census = self._capture(graph, step, kept)
            except BaseException as error:
                line = raising_line(error.__traceback__)
                # What the step had allocated is held by its frames until they are cleared.
                traceback.clear_frames(error.__traceback__)
                self._recover(graph)
                if isinstance(error, CaptureError) or not isinstance(error, Exception):
                    raise
                raise _explained(error, bucket, line) from error
            torch.cuda.synchronize(self.device)
            free_after, _ = torch.cuda.mem_get_info(self.device)
        nbytes = max(0, free_before - free_after)
        made = CudaRecording(graph, outputs, pinned, census, nbytes, self.device, kept)
        self._made.add(made)
        return made

    def _capture(
        self, graph: torch.cuda.CUDAGraph, step: BoundStep, kept: bool
    ) -> tuple[Mapping[str, torch.Tensor], tuple[torch.UntypedStorage, ...], Census]:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream), torch.no_grad(), autocast_casts_not_kept():
            # thread_local: what other threads do on the device does not break this capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            trace = CaptureTrace(self.device, self._stream.cuda_stream, self._reader)
            if self.watched:
                with trace.watching():
                    outputs = dict(step())
                census = trace.census()
            else:
                outputs = dict(step())
                census = trace.count_only()
            graph.capture_end()
            if kept:
                graph.instantiate()  # torch puts it off to the first replay
        return outputs, tuple(trace.pinned.values()), census

    def _recover(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a broken capture and bring allocator and random generators back to normal."""
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_end()
            except RuntimeError as error:
                # The driver had given the capture up. torch then leaves the allocator recording to
                # the graph's pool, for good: later recordings get another pool.
                logger.debug("ending the broken capture: %s", error)
                end_allocation_to(self._pool, self.device)
                self._pool = torch.cuda.graph_pool_handle()
        try:
            graph.reset()
        except RuntimeError as error:
            logger.debug("resetting the broken graph: %s", error)
        torch.cuda.synchronize(self.device)
        # The random generators still expect a capture; one that succeeds frees them of that.
        probe = run_probe(TorchCapture(self.device))
        if not probe.works:
            raise RuntimeError(
                f"{self.device} captures no more after a broken capture: {probe.detail}"
            )
        torch.cuda.empty_cache()

    def close(self) -> None:
        self._pool = None


def _explained(error: Exception, bucket: int, line: str) -> CaptureError:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return CaptureError(
            f"bucket {bucket}: out of device memory at {line} while recording: {error}; record "
            f"fewer or smaller buckets (GRAPHCAP_BUCKETS) or leave the device more free memory"
        )
    return CaptureError(
        f"bucket {bucket}: {type(error).__name__} at {line} while recording: {error}; remove what "
        f"synchronises or allocates outside torch there, or use GRAPHCAP_RECORDER=tape"
    )
