"""What `capture()` reports and what `stats()` returns."""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphcap import __version__
from graphcap.census import Census
from graphcap.graph_addresses import PointerReport
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
        replay_ms: least time of a few replays of a full batch, measured after verification, the
            device's where it has events; None: not measured. Sequences were as short as those of a
            batch made for verification or capture.
        pointers: what the check of the graph's addresses found; None: a tape, which holds the tensors
            themselves, or ``GRAPHCAP_VERIFY=off``.
        choice: how the step runs this bucket and why, of a step that says so.
    """

    size: int
    nodes: int
    allocations: int
    nbytes: int
    capture_ms: float
    largest_difference: float | None = None
    replay_ms: float | None = None
    pointers: PointerReport | None = None
    choice: str = ""


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

    def write(self, path: Path, served: ManagerStats | None = None) -> None:
        """Write the report as JSON; with what was served, under ``served``, where that is known."""
        known = {} if served is None else {"served": served.served()}
        write_json(path, self.to_json() | known)


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
        batches: real rows -> steps, replayed and eager.
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
    batches: Mapping[int, int] = field(default_factory=dict)

    def served(self) -> dict[str, Any]:
        """What was served, for the report: see `served_json`."""
        replays = {bucket.size: bucket.replays for bucket in self.buckets}
        padding = {bucket.size: bucket.padding_rows for bucket in self.buckets}
        return served_json(self.batches, replays, padding, self.fallbacks)

    @property
    def graph_mib(self) -> float:
        return self.graph_bytes / 2**20

    @property
    def pool_mib(self) -> float:
        return self.pool_bytes / 2**20


def served_json(
    batches: Mapping[int, int],
    replays: Mapping[int, int],
    padding_rows: Mapping[int, int],
    fallbacks: Mapping[str, int],
) -> dict[str, Any]:
    """What a report says of the steps that were served: batches by rows, replays and padding rows by
    bucket, fallbacks by reason. ``graphcap plan --from-report`` reads ``batches``."""
    return {
        "steps": sum(batches.values()),
        "batches": {str(rows): batches[rows] for rows in sorted(batches)},
        "buckets": [
            {"size": size, "replays": replays[size], "padding_rows": padding_rows[size]}
            for size in sorted(replays)
        ],
        "fallbacks": dict(fallbacks),
    }


def write_json(path: Path, plain: Mapping[str, Any]) -> None:
    """Write whole or not at all: what is there already stays until the new contents are complete."""
    text = json.dumps(plain, indent=2) + "\n"
    if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
        path.write_text(text)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        beside.write_text(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def versions() -> dict[str, str | None]:
    """Versions that decide what a recording is: for reports."""
    return {
        "graphcap": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
