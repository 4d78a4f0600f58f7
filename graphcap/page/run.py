"""Run: what a page shows, whichever report it came from. None: not in that report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphcap.lifetimes import PoolLayout


@dataclass(frozen=True)
class Way:
    """One way to decode, per token (one step)."""

    name: str
    launches: int | None = None
    operations: int | None = None
    allocations: int | None = None
    host_us: float | None = None
    ms: float | None = None


@dataclass(frozen=True)
class Bucket:
    size: int
    nodes: int
    mib: float
    capture_ms: float
    replays: int | None = None
    padding_rows: int | None = None
    replay_ms: float | None = None


@dataclass(frozen=True)
class Row:
    """Calls of one operation in one step."""

    operation: str
    implementation: str
    count: int
    nodes: int | None


@dataclass(frozen=True)
class Kernel:
    """Nodes of a graph that run one kernel with one launch configuration."""

    name: str
    grid: str
    block: str
    count: int


@dataclass(frozen=True)
class Census:
    rows: tuple[Row, ...]
    total: int
    kernels: tuple[Kernel, ...] = ()


@dataclass(frozen=True)
class Recordings:
    """The buckets of one manager.

    Attributes:
        kind: ``decode``, or ``mixed`` (prefill-decode batches).
        unit: what a bucket's size counts.
        failures: bucket -> why it has no recording.
    """

    kind: str
    unit: str
    buckets: tuple[Bucket, ...]
    failures: Mapping[str, str]
    census: Census | None


@dataclass(frozen=True)
class Pool:
    """Bytes of the arena, and the least that any placement needs."""

    nbytes: int
    lower_bound: int | None
    layout: PoolLayout | None


@dataclass(frozen=True)
class Span:
    name: str
    start_us: float
    us: float


@dataclass(frozen=True)
class Timeline:
    """One step; `device` is None on a CPU, where `host` holds the operations themselves."""

    clock: str
    host: tuple[Span, ...]
    device: tuple[Span, ...] | None
    us: float


@dataclass(frozen=True)
class Run:
    """See the module.

    Attributes:
        kind: what the report is of: ``decode``, ``capture`` or ``plugin``.
        title: what ran where.
        facts: (label, value) about the machine and the choices.
        before, after: the eager step and the replayed one.
        equal: whether both ways gave equal tokens.
        fallbacks: reason -> steps that ran eagerly.
        ended: a plugin report that was written again at the end of the server.
        layers: of the model.
        eager, replayed: timelines of one step.
    """

    kind: str
    source: str
    title: str
    facts: tuple[tuple[str, str], ...]
    before: Way | None
    after: Way | None
    equal: bool | None
    recordings: tuple[Recordings, ...]
    pool: Pool
    fallbacks: Mapping[str, int] | None
    layers: int | None = None
    ended: bool = False
    notes: tuple[str, ...] = ()
    eager: Timeline | None = None
    replayed: Timeline | None = None
