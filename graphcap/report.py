"""What `capture()` reports and what `stats()` returns."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphcap import __version__
from graphcap.census import Census
from graphcap.lifetimes import PoolLayout
from graphcap.operations import KernelChoice


@dataclass(frozen=True)
class BucketReport:
    """One recorded bucket.

    Attributes:
        size: rows.
        nodes: operations in the recording: graph nodes, or tape entries.
        allocations: of one replay.
        nbytes: memory that recording it took, measured: driver memory, or on the tape new storage.
        capture_ms: time to record it, warm-up not included.
        largest_difference: between replay and eager when verified, relative; None: not verified.
    """

    size: int
    nodes: int
    allocations: int
    nbytes: int
    capture_ms: float
    largest_difference: float | None = None


@dataclass(frozen=True)
class CaptureReport:
    """What capture() did. Figures were measured; what this device cannot give is None.

    Attributes:
        kernels: which kernel each operation runs on and why, of a step that says so.
        pool_layout: where each buffer of the pool lies and when it is alive.
    """

    recorder: str
    device: str
    buckets: tuple[BucketReport, ...]
    failures: Mapping[int, str]
    pool_bytes: int
    pool_lower_bound_bytes: int
    slots_bytes: int
    seconds: float
    census: Census | None
    notes: tuple[str, ...] = ()
    kernels: tuple[KernelChoice, ...] = ()
    pool_layout: PoolLayout | None = None
    versions: Mapping[str, str | None] = field(default_factory=lambda: versions())

    @property
    def graph_bytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        fields["failures"] = {str(size): text for size, text in self.failures.items()}
        fields["census"] = None if self.census is None else self.census.to_json()
        fields["graph_bytes"] = self.graph_bytes
        return fields

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n")


@dataclass(frozen=True)
class BucketStats:
    """What one bucket has served so far."""

    size: int
    replays: int
    padding_rows: int


@dataclass(frozen=True)
class ManagerStats:
    """Counts since the manager was made.

    Attributes:
        state: new, warmed, frozen, recorded or closed.
        steps: calls of run() that returned.
        replays: of them, those served by a recording.
        fallbacks: reason -> steps run eagerly.
        rows: real rows of all steps.
        padding_rows: rows that replays computed and nobody asked for.
        input_launches: host calls that copied batches or row counts into slots.
        verified: replays that were checked against the eager step while serving.
        buckets: by size.
        failures: bucket -> why it has no recording.
    """

    state: str
    recorder: str
    steps: int
    replays: int
    fallbacks: Mapping[str, int]
    rows: int
    padding_rows: int
    input_launches: int
    verified: int
    pool_bytes: int
    graph_bytes: int
    capture_seconds: float | None
    buckets: tuple[BucketStats, ...]
    failures: Mapping[int, str]

    @property
    def graph_mib(self) -> float:
        return self.graph_bytes / 2**20

    @property
    def pool_mib(self) -> float:
        return self.pool_bytes / 2**20


def versions() -> dict[str, str | None]:
    """Versions that decide what a recording is: for reports."""
    return {
        "graphcap": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
