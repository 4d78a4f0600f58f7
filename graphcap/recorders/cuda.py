"""The cuda recorder: one CUDA graph per bucket, one graph memory pool, one stream."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from graphcap.census import Census
from graphcap.errors import BackendError, CaptureError, StateError
from graphcap.explain import warn
from graphcap.graph_addresses import PointerReport
from graphcap.recorders.base import (
    BoundStep,
    Loop,
    Recorder,
    Recording,
    autocast_casts_not_kept,
    garbage_collection_held,
)
from graphcap.recorders.broken_capture import explained, says_invalidated
from graphcap.recorders.capture_trace import CaptureTrace
from graphcap.recorders.graph_nodes import GraphReader
from graphcap.recorders.loop import GraphLoop, LoopDriver
from graphcap.recorders.loop_probe import keeps_graphs, kept_graph, probe_loops, raw_stream
from graphcap.recorders.pointer_watch import PointerWatch, RecordedPointers
from graphcap.recorders.probe import run_probe
from graphcap.recorders.source import raising_line
from graphcap.recorders.streams import StreamLease
from graphcap.recorders.torch_capture import TorchCapture, give_up
from graphcap.undo import let_go

logger = logging.getLogger(__name__)

_TRIES = 5


class CudaRecording(Recording):
    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        outputs: Mapping[str, torch.Tensor],
        pinned: tuple[torch.UntypedStorage, ...],
        census: Census,
        nbytes: int,
        device: torch.device,
        lease: StreamLease,
        kept: bool = False,
        addresses: RecordedPointers | None = None,
    ) -> None:
        self._device = device
        self.addresses = addresses
        self._lease: StreamLease | None = lease
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

    @property
    def pointers(self) -> PointerReport | None:  # type: ignore[override]
        return None if self.addresses is None else self.addresses.report

    def repeated(
        self,
        left: torch.Tensor,
        live: torch.Tensor,
        begin: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Loop:
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
            stream = raw_stream(self._device)
            loop = GraphLoop(LoopDriver.loaded(), graph.raw_cuda_graph(), left, live, stream, begin)
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
            if self.addresses is not None:
                self.addresses.forget()
            self._lease = None
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
        self._lent: StreamLease | None = StreamLease(device)
        self._settled = False
        self._split = False  # there are recordings in another pool than the present one
        self._pool: Any = None
        self._made: weakref.WeakSet[CudaRecording] = weakref.WeakSet()
        self._new_pool()
        try:
            self._reader: GraphReader | None = GraphReader()
        except BackendError as error:
            warn(logger, "graph-nodes", "graph nodes are not counted: %s", error)
            self._reader = None
        self._watch = PointerWatch(None if self._reader is None else self._reader.driver)

    def warm_up(self, step: BoundStep) -> Mapping[str, torch.Tensor]:
        current = torch.cuda.current_stream(self.device)
        self._lease.take_workspace()
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
                if self.checks_pointers:
                    self._watch.look()  # what is given back now was memory, later checks know
                torch.cuda.empty_cache()
                self._settled = True
            free_before, _ = torch.cuda.mem_get_info(self.device)
            reserved = torch.cuda.memory_reserved(self.device)
            if not self._shared and not self._split:
                self.stranded = 0  # nothing is left that could keep it
            if self._pool is None or not self._shared:
                self._new_pool()  # torch does not take a pool again whose graphs are all gone
            kept = self.repeatable and keeps_graphs()
            addresses = self._watch.began() if self.checks_pointers else None
            graph = kept_graph() if kept else torch.cuda.CUDAGraph()
            handled = sys.exc_info()[1]
            try:
                for generator in self.generators:
                    if generator.device.type == "cuda":
                        graph.register_generator_state(generator)
                outputs, pinned, census = self._capture(graph, step, kept, addresses)
            except BaseException as error:
                invalidated = self._invalidated()  # before the capture is ended
                line = raising_line(error.__traceback__)
                let_go(error, handled)  # and with it what the step had allocated
                if self._shared:  # no segment is given back in the middle of a capture
                    grown = torch.cuda.memory_reserved(self.device) - reserved
                    self.stranded += max(0, grown)
                ended = self._recover(graph)
                if isinstance(error, CaptureError) or not isinstance(error, Exception):
                    raise
                if invalidated is None and ended is not None:
                    invalidated = says_invalidated(ended)
                raise explained(error, bucket, line, invalidated) from error
            torch.cuda.synchronize(self.device)
            free_after, _ = torch.cuda.mem_get_info(self.device)
        nbytes = max(0, free_before - free_after)
        grown = max(0, torch.cuda.memory_reserved(self.device) - reserved)
        made = CudaRecording(
            graph, outputs, pinned, census, nbytes, self.device, self._lease, kept, addresses
        )
        self._made.add(made)
        if addresses is not None:
            try:
                addresses.made(self._pool, pinned, self._lease.pool)
                addresses.check(bucket, self.named)
            except BaseException:
                del outputs, pinned  # the graph's memory, which is to be given back
                made.close()
                if self._shared:
                    self.stranded += grown
                else:
                    torch.cuda.empty_cache()
                raise
        if self._split:  # it could not use what the recordings in the other pool have
            self.stranded += grown
        return made

    def dangling(self, recordings: Mapping[int, Recording]) -> Mapping[int, CaptureError]:
        found: dict[int, CaptureError] = {}
        kept = {s: r.addresses for s, r in recordings.items() if isinstance(r, CudaRecording)}
        now = self._watch.look() if any(kept.values()) else None
        for size, addresses in kept.items():
            if addresses is not None:
                try:
                    addresses.check(size, self.named, now)
                except CaptureError as error:
                    found[size] = error
                addresses.forget()
        return found

    @contextmanager
    def apart(self) -> Iterator[None]:
        outside = self._pool, self._made, self._split, self.stranded
        try:
            self._split = False
            self._new_pool()
            yield
        finally:
            self._pool, self._made, self._split, self.stranded = outside
            torch.cuda.empty_cache()

    @property
    def _lease(self) -> StreamLease:
        """Of the stream; another one after `close`."""
        if self._lent is None:
            self._lent = StreamLease(self.device)
        return self._lent

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self._lease.stream

    def _new_pool(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._made = weakref.WeakSet()  # in this pool

    @property
    def _shared(self) -> bool:
        """Whether the pool has a graph, and so what is taken there stays."""
        return any(recording.is_open for recording in self._made)

    def _capture(
        self,
        graph: torch.cuda.CUDAGraph,
        step: BoundStep,
        kept: bool,
        addresses: RecordedPointers | None,
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
            trace.read_pointers(addresses)
            graph.capture_end()
            if kept:
                graph.instantiate()  # torch puts it off to the first replay
        return outputs, tuple(trace.pinned.values()), census

    def _invalidated(self) -> bool | None:
        """Whether the driver has given up the capture in progress; None: there is none, or it cannot be
        asked."""
        if self._reader is None:
            return None
        try:
            return self._reader.is_invalidated(self._stream.cuda_stream)
        except (BackendError, AttributeError, RuntimeError) as error:  # older bindings or driver
            logger.debug("the status of the capture is not known: %s", error)
            return None

    def _recover(self, graph: torch.cuda.CUDAGraph) -> RuntimeError | None:
        """End a broken capture and bring allocator and random generators back to normal.

        Returns:
            What the driver said to the end of the capture, where it had given it up.
        """
        refused: RuntimeError | None = None
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_end()
            except RuntimeError as error:
                # The driver had given the capture up. torch then leaves the allocator recording to
                # the graph's pool, for good: later recordings get another pool.
                logger.debug("ending the broken capture: %s", error)
                refused = error.with_traceback(None)
                give_up(graph, self._pool, self.device)
                self._split |= self._shared
                self._new_pool()
        try:
            graph.reset()
        except RuntimeError as error:
            logger.debug("resetting the broken graph: %s", error)
        torch.cuda.synchronize(self.device)
        # The random generators still expect a capture; one that succeeds frees them of that.
        own = [g for g in self.generators if g.device.type == "cuda"]
        for _ in range(_TRIES):  # another thread that broke the capture may break this one
            probe = run_probe(TorchCapture(self.device, generators=own))
            if probe.works:
                break
        if not probe.works:
            raise RuntimeError(
                f"{self.device} captures no more after a broken capture: {probe.detail}"
            )
        torch.cuda.empty_cache()
        return refused

    def reclaim(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        self._split = False
        super().reclaim()

    def close(self) -> None:
        self._pool = self._lent = None
