"""What a server's graphcap counters say: since it started, and between two scrapes.

The metrics are those of `graphcap.hosts.vllm.metrics`. The ranks of an engine count the same steps, so
the lowest one stands for its engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from graphcap.scrape import Sample

_PREFIX = "graphcap_"
_LABELS = frozenset({"rank", "bucket", "reason", "rows", "le"})
"""Labels that do not tell engines apart. ``instance`` does, where servers were gathered in one page."""

Series = Mapping[str, float]


@dataclass(frozen=True)
class Counts:
    """Steps of one engine, in all or of a span of time.

    Attributes:
        steps, rows: decode steps, replayed and eager, and their real rows.
        buckets: bucket -> decode steps that its recording served.
        padding_rows: rows that these computed and nobody asked for.
        mixed: bucket in tokens -> mixed batches that a recording served.
        mixed_padding: tokens of padding in them.
        fallbacks: reason -> steps run eagerly, decode or not.
    """

    steps: float = 0
    rows: float = 0
    replays: float = 0
    padding_rows: float = 0
    mixed_padding: float = 0
    buckets: Series = field(default_factory=dict)
    mixed: Series = field(default_factory=dict)
    fallbacks: Series = field(default_factory=dict)

    @property
    def hit_rate(self) -> float | None:
        """Share of decode steps that a recording served; None: there were none."""
        return _share(self.replays, self.steps)

    @property
    def bucket_hit_rates(self) -> dict[str, float]:
        """Bucket -> share of decode steps that its recording served."""
        return {
            bucket: self.buckets[bucket] / self.steps if self.steps else 0.0
            for bucket in sorted(self.buckets, key=int)
        }

    @property
    def mean_rows(self) -> float | None:
        return _share(self.rows, self.steps)

    @property
    def padding_share(self) -> float | None:
        """Padding among the rows that replays of decode steps computed."""
        return _share(self.padding_rows, _computed(self.buckets))

    @property
    def mixed_hit_rate(self) -> float | None:
        """Share of the other batches, those with prefill, that a recording served."""
        served = sum(self.mixed.values())
        eager_decode = self.steps - self.replays
        eager = sum(self.fallbacks.values()) - eager_decode
        return _share(served, served + max(eager, 0))  # the two are not counted at one instant

    @property
    def mixed_padding_share(self) -> float | None:
        return _share(self.mixed_padding, _computed(self.mixed))

    def since(self, earlier: Counts) -> Counts | None:
        """What was counted after `earlier`; None if that was before a restart: something shrank."""
        changes: dict[str, Any] = {}
        for each in fields(self):
            now, then = getattr(self, each.name), getattr(earlier, each.name)
            if isinstance(now, Mapping):
                change = {k: now.get(k, 0) - then.get(k, 0) for k in now.keys() | then.keys()}
                shrank = any(value < 0 for value in change.values())
            else:
                change = now - then
                shrank = change < 0
            if shrank:
                return None
            changes[each.name] = change
        return Counts(**changes)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _computed(buckets: Series) -> float:
    return sum(int(bucket) * count for bucket, count in buckets.items())


@dataclass(frozen=True)
class Engine:
    """One engine in one scrape.

    Attributes:
        rank: the rank that was read, the lowest.
        ranks: how many ranks show themselves.
        capture_seconds, graph_bytes, pool_bytes: None: capture() has not ended.
    """

    rank: int
    ranks: int
    counts: Counts
    capture_seconds: float | None = None
    graph_bytes: float | None = None
    pool_bytes: float | None = None


@dataclass(frozen=True)
class Reading:
    """One scrape.

    Attributes:
        engines: by name: the label ``engine``, with further labels behind it where there are any.
        at: when, in seconds of a clock that does not go backwards.
        started: when the server's process started, if it says so.
    """

    engines: Mapping[str, Engine]
    at: float
    started: float | None = None


@dataclass(frozen=True)
class Span:
    """What an engine did between two scrapes.

    Attributes:
        seconds: between them. Counts after a restart are divided by the whole of it.
        restarted: the counts began anew in between, and `counts` are those since then.
    """

    counts: Counts
    seconds: float
    restarted: bool = False


def read(samples: Iterable[Sample], at: float) -> Reading:
    """Take graphcap's samples out of a scrape. Without any there are no engines."""
    series: dict[str, dict[int, list[Sample]]] = {}
    starts = []
    for sample in samples:
        if sample.name == "process_start_time_seconds":
            starts.append(sample.value)
        rank = sample.labels.get("rank", "")
        if sample.name.startswith(_PREFIX) and "engine" in sample.labels and rank.isdigit():
            ranks = series.setdefault(_name(sample.labels), {})
            ranks.setdefault(int(rank), []).append(sample)
    engines = {
        name: _engine(series[name])
        for name in sorted(series, key=lambda name: (len(name), name))  # 2 before 10
    }
    return Reading(engines, at, starts[0] if len(starts) == 1 else None)


def spans(earlier: Reading | None, later: Reading) -> dict[str, Span]:
    """Engine -> what it did between two scrapes; engines that the earlier one lacks are left out."""
    found = {}
    for name, engine in later.engines.items():
        before = None if earlier is None else earlier.engines.get(name)
        if earlier is None or before is None or before.rank != engine.rank:
            continue
        is_same_process = earlier.started == later.started
        change = engine.counts.since(before.counts) if is_same_process else None
        counts = engine.counts if change is None else change
        found[name] = Span(counts, later.at - earlier.at, restarted=change is None)
    return found


def _name(labels: Mapping[str, str]) -> str:
    others = sorted(set(labels) - _LABELS - {"engine"})
    return " ".join([labels["engine"], *(f"{label}={labels[label]}" for label in others)])


def _engine(ranks: Mapping[int, list[Sample]]) -> Engine:
    rank = min(ranks)
    single: dict[str, float] = {}
    labelled: dict[str, dict[str, float]] = {}
    for sample in ranks[rank]:
        name = sample.name[len(_PREFIX) :]
        bucket, reason = sample.labels.get("bucket"), sample.labels.get("reason")
        if reason is not None:
            labelled.setdefault(name, {})[reason] = sample.value
        elif bucket is None:
            single[name] = sample.value
        elif bucket.isdigit():
            labelled.setdefault(name, {})[bucket] = sample.value
    counts = Counts(
        steps=single.get("batch_rows_count", 0),
        rows=single.get("batch_rows_sum", 0),
        replays=single.get("replays_total", 0),
        padding_rows=single.get("padding_rows_total", 0),
        mixed_padding=single.get("mixed_padding_tokens_total", 0),
        buckets=labelled.get("bucket_replays_total", {}),
        mixed=labelled.get("mixed_replays_total", {}),
        fallbacks=labelled.get("fallbacks_total", {}),
    )
    gauges = (single.get(name) for name in ("capture_seconds", "graph_bytes", "pool_bytes"))
    return Engine(rank, len(ranks), counts, *gauges)
