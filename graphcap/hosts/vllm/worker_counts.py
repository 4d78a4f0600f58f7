"""What the workers of a server have counted, read from their files."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from graphcap.hosts.vllm.counter_file import (
    CREATED_NS,
    ENGINE,
    GAUGES,
    RANK,
    read,
    records,
    words,
)

logger = logging.getLogger(__name__)


@dataclass
class WorkerCounts:
    """What the processes that were one worker of an engine have counted.

    Attributes:
        replays: (bucket, real rows) -> replays.
        fallbacks: reason -> steps run eagerly.
        eager: real rows -> steps run eagerly, of those whose rows were told.
        mixed, mixed_padding: bucket, in tokens -> mixed batches served, tokens of padding in them.
        gauges: name in `GAUGES` -> latest value.
        bucket_bytes, bucket_ns: decode bucket -> memory of its recording, time of a replay; latest.
    """

    replays: Counter[tuple[int, int]] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    eager: Counter[int] = field(default_factory=Counter)
    gauges: dict[str, int] = field(default_factory=dict)
    mixed: Counter[int] = field(default_factory=Counter)
    mixed_padding: Counter[int] = field(default_factory=Counter)
    bucket_bytes: dict[int, int] = field(default_factory=dict)
    bucket_ns: dict[int, int] = field(default_factory=dict)

    @property
    def padding_rows(self) -> int:
        return sum((bucket - rows) * count for (bucket, rows), count in self.replays.items())

    @property
    def bucket_replays(self) -> Counter[int]:
        totals: Counter[int] = Counter()
        for (bucket, _), count in self.replays.items():
            totals[bucket] += count
        return totals

    @property
    def batches(self) -> Counter[int]:
        """Real rows -> steps, replayed and eager."""
        totals = Counter(self.eager)
        for (_, rows), count in self.replays.items():
            totals[rows] += count
        return totals

    def add(self, name: str, value: int) -> None:
        """Add a record. One that is not understood is left out."""
        kind, _, rest = name.partition(" ")
        try:
            if kind == "replays":
                bucket, rows = rest.split(" ")
                self.replays[int(bucket), int(rows)] += value
            elif kind == "eager":
                self.eager[int(rest)] += value
            elif kind == "mixed":
                self.mixed[int(rest)] += value
            elif kind == "mixed_padding":
                self.mixed_padding[int(rest)] += value
            elif kind == "bucket_bytes":
                self.bucket_bytes[int(rest)] = value
            elif kind == "bucket_ns":
                self.bucket_ns[int(rest)] = value
            elif kind == "fallbacks":
                self.fallbacks[rest] += value
            elif name in GAUGES:
                self.gauges[name] = value
        except ValueError:
            logger.debug("not a counter: %r", name)


def read_workers(directory: Path) -> dict[tuple[int, int], WorkerCounts]:
    """(engine, rank) -> what was counted there, by living and by dead processes.

    Where several processes have been the same worker, counts are summed and the gauges are those of
    the process that began last. Files that are no counters, or not yet, are left out. Never raises.
    """
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix == ".counters")
    except OSError:
        return {}
    contents = sorted(
        (data for path in paths if (data := read(path)) is not None),
        key=lambda data: words(data)[CREATED_NS],
    )
    workers: dict[tuple[int, int], WorkerCounts] = {}
    for data in contents:
        header = words(data)
        worker = workers.setdefault((header[ENGINE], header[RANK]), WorkerCounts())
        for name, value in records(data):
            worker.add(name, value)
    return workers
