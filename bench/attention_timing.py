"""Replays of graphs, timed one by one on a cold L2 cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from graphcap.errors import BackendError
from graphcap.recorders.graph_nodes import GraphReader

Call = Callable[[], object]


class ColdClock:
    """Records graphs of `layers` layers and times single replays. On a CPU there is no graph, and nothing is
    evicted.

    Attributes:
        l2, evicted_by: bytes of the L2 cache, and of what is read before each replay: four times as many.
            Nothing is written, so that nothing is left to be written back while a replay is timed.
        notes: what is not measured here, and why.
    """

    def __init__(self, device: torch.device, layers: int) -> None:
        self.device, self.layers = device, layers
        self.cuda = device.type == "cuda"
        self.l2 = torch.cuda.get_device_properties(device).L2_cache_size if self.cuda else 0
        self.notes: list[str] = []
        self._reader: GraphReader | None = None
        if self.cuda:
            try:
                self._reader = GraphReader()
            except BackendError as error:
                self.notes.append(f"device operations are not counted: {error}")
        self._numbers = torch.ones(self.l2, device=device)  # of four bytes each
        self._sum = torch.empty((), device=device)

    @property
    def evicted_by(self) -> int:
        return self._numbers.nbytes

    def recorded(self, *runs: Callable[[int], object]) -> tuple[Call, float | None]:
        """(a call that enqueues `runs` of all layers, device operations of one layer)"""

        def step() -> None:
            for layer in range(self.layers):
                for run in runs:
                    run(layer)

        step()  # compiles
        if not self.cuda:
            return step, None
        torch.cuda.synchronize(self.device)
        graph, operations = torch.cuda.CUDAGraph(), None
        with torch.cuda.graph(graph):
            step()
            if self._reader is not None:
                captured = self._reader.graph_under_capture(torch.cuda.current_stream().cuda_stream)
                operations = self._reader.count(captured) / self.layers
        return graph.replay, operations

    def times(
        self, replays: Mapping[str, Call], rounds: int, each: int
    ) -> dict[str, list[list[float]]]:
        """µs a layer of single replays, by name and round. In each round every one has its turn of `each`
        replays, and another one is the first; a round before them warms up."""
        found: dict[str, list[list[float]]] = {name: [] for name in replays}
        names = list(replays)
        for index in range(-1, rounds):
            first = index % len(names) if names else 0
            for name in names[first:] + names[:first]:
                turn = [self._once(replays[name]) for _ in range(each)]
                micros = [finish() * 1e3 / self.layers for finish in turn]
                if index >= 0:
                    found[name].append(micros)
        return found

    def _once(self, replay: Call) -> Callable[[], float]:
        """Enqueue one replay; gives a call that waits for it and returns its ms."""
        if not self.cuda:
            began = time.perf_counter()
            replay()
            took = (time.perf_counter() - began) * 1e3
            return lambda: took
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.sum(self._numbers, 0, out=self._sum)
        first.record()
        replay()
        last.record()

        def finish() -> float:
            last.synchronize()
            return first.elapsed_time(last)

        return finish
