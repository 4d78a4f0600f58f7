"""CaptureTrace: what a step does while a CUDA stream captures it, operation by operation."""

from __future__ import annotations

import logging
from typing import Any

import torch

from graphcap.census import Call, Census
from graphcap.errors import BackendError
from graphcap.explain import warn
from graphcap.operations import Operation
from graphcap.recorders.dispatched import dispatch_row, storage_key, tensors_in
from graphcap.recorders.graph_nodes import GraphReader
from graphcap.recorders.guard import StepGuard
from graphcap.recorders.pointer_watch import RecordedPointers

logger = logging.getLogger(__name__)


class CaptureTrace(StepGuard):
    """Watches a step under capture and counts the graph nodes that each operation makes."""

    def __init__(self, device: torch.device, stream: int, reader: GraphReader | None) -> None:
        super().__init__(device, replays_live=False)
        self.calls: list[Call] = []
        self.spans: list[tuple[int, int, str]] = []
        """First node, end and name of each operation that made nodes."""
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

    def read_pointers(self, pointers: RecordedPointers | None) -> None:
        """Of the capture so far; asked for at its end."""
        if pointers is not None:
            try:
                graph = None if self._reader is None else self._handle()
            except BackendError as error:
                pointers.not_read(str(error.args[0]))
            else:
                pointers.read(graph, self.spans)

    def _append(self, name: str, implementation: str, before: int | None) -> None:
        after = self._count()
        made = None if after is None or before is None else after - before
        if before is not None and after is not None:
            self.spans.append((before, after, name))
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
