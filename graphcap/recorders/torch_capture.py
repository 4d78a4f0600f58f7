"""A capture on a CUDA device by torch's graphs, which leaves the device usable when it fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from graphcap.recorders.cuda_runtime import CudaRuntime

logger = logging.getLogger(__name__)


class TorchCapture:
    """The calls of `probe.CaptureApi` by torch's graphs on a CUDA device.

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
    index = with_index(device).index
    try:
        end(index, pool)
    except RuntimeError as error:  # it had ended already, or never begun: nothing is counted
        logger.debug("ending allocation to the graph pool: %s", error)
        return
    _broken.append(graph)
    torch._C._cuda_releasePool(index, pool)


def with_index(device: torch.device) -> torch.device:
    """``cuda`` is the current device, and the same as its name with the index."""
    if device.index is not None:
        return device
    return torch.device(device.type, torch.cuda.current_device())
