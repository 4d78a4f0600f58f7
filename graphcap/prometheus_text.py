"""The series of a Prometheus text page that a ladder is planned from; no client library needed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

BATCHES = "graphcap_batches_total"
SECONDS = "graphcap_bucket_replay_seconds"
BYTES = "graphcap_bucket_bytes"

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)\{(.*)\}\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


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
    return any(
        line.startswith(("# HELP ", "# TYPE ")) or _SAMPLE.match(line) for line in text.splitlines()
    )


def traffic_series(text: str) -> TrafficSeries:
    """Pick our series out of a page. All ranks of an engine run the same steps: one of each counts."""
    found: dict[str, dict[tuple[int, int], dict[int, float]]] = {
        BATCHES: {},
        SECONDS: {},
        BYTES: {},
    }
    for name, labels, value in _samples(text):
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


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and match[1] in (BATCHES, SECONDS, BYTES):
            try:
                value = float(match[3])
            except ValueError:
                continue
            if 0 <= value < 2**62:
                yield match[1], dict(_LABEL.findall(match[2])), value
