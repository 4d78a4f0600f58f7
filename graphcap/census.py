"""Census: what one step launches, by operation and by kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class CensusRow:
    """How often a step runs one operation.

    Attributes:
        operation: standard term (``rms_norm``) or dispatcher name (``aten.add.Tensor``).
        implementation: what runs, such as ``triton: rms_norm``.
        count: calls in one step.
        nodes: nodes in the captured graph that these calls made; None where there is no graph.
        allocations: how many of the calls return new storage.
    """

    operation: str
    implementation: str
    count: int
    nodes: int | None = None
    allocations: int = 0


@dataclass(frozen=True)
class KernelRow:
    """How often one kernel appears in a captured graph, with one launch configuration."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    count: int


@dataclass(frozen=True)
class GraphNode:
    """One node of a captured graph. `kernel`, `grid` and `block` are None for other kinds."""

    kind: str
    kernel: str | None = None
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Call:
    """One operation of one step, as a recorder saw it.

    Attributes:
        allocates: it returns new storage.
        nodes: graph nodes that it made; None where there is no graph.
    """

    operation: str
    implementation: str
    allocates: bool = False
    nodes: int | None = None


@dataclass(frozen=True)
class Census:
    """What one step launches.

    Attributes:
        rows: by operation, most frequent first.
        allocations: operations that return new storage, plus requests that went to the allocator.
        nodes: graph nodes by kind (``kernel``, ``memcpy``, ``memset``, …); None without a graph.
        kernels: by kernel and launch configuration, most frequent first; empty without a graph.
    """

    rows: tuple[CensusRow, ...]
    allocations: int
    nodes: Mapping[str, int] | None = None
    kernels: tuple[KernelRow, ...] = field(default=())

    @property
    def total(self) -> int:
        """Operations in one step: graph nodes where there is a graph, else calls."""
        if self.nodes is not None:
            return sum(self.nodes.values())
        return sum(row.count for row in self.rows)

    @classmethod
    def of(
        cls,
        calls: Iterable[Call],
        *,
        allocations: int = 0,
        graph: Iterable[GraphNode] | None = None,
    ) -> Census:
        """Count `calls`; `allocations` are those that no call shows (the pool's requests)."""
        counts: Counter[tuple[str, str]] = Counter()
        nodes: Counter[tuple[str, str]] = Counter()
        fresh: Counter[tuple[str, str]] = Counter()
        has_nodes = False
        for call in calls:
            key = (call.operation, call.implementation)
            counts[key] += 1
            fresh[key] += call.allocates
            if call.nodes is not None:
                has_nodes = True
                nodes[key] += call.nodes
        rows = tuple(
            CensusRow(*key, count, nodes[key] if has_nodes else None, fresh[key])
            for key, count in counts.most_common()
        )
        allocations += fresh.total()
        if graph is None:
            return cls(rows, allocations)
        listed = list(graph)
        kernels = Counter((n.kernel, n.grid, n.block) for n in listed if n.kernel is not None)
        return cls(
            rows,
            allocations,
            dict(Counter(node.kind for node in listed)),
            tuple(
                KernelRow(name or "?", grid or (0, 0, 0), block or (0, 0, 0), count)
                for (name, grid, block), count in kernels.most_common()
            ),
        )

    def to_json(self) -> dict[str, Any]:
        return {"total": self.total, **asdict(self)}
