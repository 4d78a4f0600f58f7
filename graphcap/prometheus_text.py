"""The series of a scrape that a ladder is planned from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from graphcap.scrape import Sample

BATCHES = "graphcap_batches_total"
SECONDS = "graphcap_bucket_replay_seconds"
BYTES = "graphcap_bucket_bytes"


@dataclass
class TrafficSeries:
    """Attributes:
    batches: rows -> steps, summed over engines, of the lowest rank of each.
    bucket_seconds, bucket_bytes: by bucket, of the lowest rank of the first engine that tells.
    """

    batches: Counter[int] = field(default_factory=Counter)
    bucket_seconds: dict[int, float] = field(default_factory=dict)
    bucket_bytes: dict[int, float] = field(default_factory=dict)


def looks_like_metrics(text: str) -> bool:
    """Whether `text` is the page of a Prometheus endpoint rather than CSV."""
    return any(line.startswith(("# HELP ", "# TYPE ", "graphcap_")) for line in text.splitlines())


def traffic_series(samples: Iterable[Sample]) -> TrafficSeries:
    """Pick our series out of a scrape. All ranks of an engine run the same steps: one of each counts."""
    found: dict[str, dict[tuple[int, int], dict[int, float]]] = {
        BATCHES: {},
        SECONDS: {},
        BYTES: {},
    }
    for name, labels, value in samples:
        if name not in found or not 0 <= value < 2**62:
            continue
        try:
            worker = (int(labels["engine"]), int(labels["rank"]))
            size = int(labels["rows" if name == BATCHES else "bucket"])
        except (KeyError, ValueError):
            continue
        found[name].setdefault(worker, {})[size] = value
    series = TrafficSeries()
    for batches in _leading(found[BATCHES]):
        series.batches.update({rows: round(steps) for rows, steps in batches.items()})
    for name, kept in ((SECONDS, series.bucket_seconds), (BYTES, series.bucket_bytes)):
        for values in _leading(found[name])[:1]:
            kept.update(values)
    return series


def _leading(workers: dict[tuple[int, int], dict[int, float]]) -> list[dict[int, float]]:
    """What the lowest rank of each engine tells, by engine. `workers` are by (engine, rank)."""
    lowest: dict[int, dict[int, float]] = {}
    for worker in sorted(workers):
        lowest.setdefault(worker[0], workers[worker])
    return list(lowest.values())
