"""Readings and what lies between two of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcap.errors import SettingsError
from graphcap.hosts.vllm.counters import SharedCounters
from graphcap.readings import Counts, Reading, read, spans
from graphcap.scrape import Sample, metrics_url, parse

BUCKETS = (2, 4, 8)


def bucket_of(rows: int) -> int | None:
    return next((size for size in BUCKETS if size >= rows), None)


def count(counters: SharedCounters, rows: list[int]) -> None:
    for number in rows:
        size = bucket_of(number)
        if size is None:
            counters.fallback("above_max_batch", number)
        else:
            counters.replay(size, number)


def reading(directory: Path, at: float = 0.0) -> Reading:
    """Through the real page: counters, collector, text, parser."""
    prometheus = pytest.importorskip("prometheus_client", reason="needs the extra `metrics`")
    from graphcap.hosts.vllm.metrics import GraphcapCollector

    registry = prometheus.CollectorRegistry()
    registry.register(GraphcapCollector(directory))
    return read(parse(prometheus.generate_latest(registry).decode(), "page"), at)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    def made() -> Iterator[Path]:
        while True:
            yield tmp_path_factory.mktemp("counters")

    return made()


batches = st.lists(st.integers(1, 12), max_size=30)


@given(first=batches, second=batches)
def test_a_span_is_what_was_counted_in_it(
    first: list[int], second: list[int], directories: Iterator[Path]
):
    directory = next(directories)
    counters = SharedCounters(engine=3, rank=1, directory=directory)
    count(counters, first)
    before = reading(directory, 10.0)
    count(counters, second)
    span = spans(before, reading(directory, 14.0))["3"]
    assert not span.restarted
    assert span.seconds == 4
    counts = span.counts
    replayed = [number for number in second if bucket_of(number)]
    assert counts.steps == len(second)
    assert counts.rows == sum(second)
    assert counts.replays == len(replayed)
    assert counts.fallbacks.get("above_max_batch", 0) == len(second) - len(replayed)
    assert counts.hit_rate == (len(replayed) / len(second) if second else None)
    assert counts.mean_rows == (sum(second) / len(second) if second else None)
    computed = sum(bucket_of(number) or 0 for number in replayed)
    padding = computed - sum(replayed)
    assert counts.padding_share == (padding / computed if computed else None)
    assert counts.mixed_hit_rate is None
    for bucket, rate in counts.bucket_hit_rates.items():
        served = sum(bucket_of(number) == int(bucket) for number in second)
        assert rate == (served / len(second) if second else 0)


def test_the_lowest_rank_stands_for_its_engine(tmp_path: Path):
    for engine, rank, times in ((0, 2, 5), (0, 1, 4), (10, 0, 2), (2, 0, 1)):
        count(SharedCounters(engine=engine, rank=rank, directory=tmp_path), [3] * times)
    found = reading(tmp_path).engines
    assert {name: (e.rank, e.ranks, e.counts.replays) for name, e in found.items()} == {
        "0": (1, 2, 4),
        "2": (0, 1, 1),
        "10": (0, 1, 2),
    }
    assert list(found) == ["0", "2", "10"]
    assert all(engine.capture_seconds is None for engine in found.values())


def at(counts: Counts, seconds: float, started: float | None = None, rank: int = 0) -> Reading:
    made = read([Sample("graphcap_replays_total", {"engine": "0", "rank": str(rank)}, 0)], seconds)
    return replace(made, engines={"0": replace(made.engines["0"], counts=counts)}, started=started)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (Counts(replays=9), Counts(replays=8)),
        (Counts(steps=9, fallbacks={"a": 1}), Counts(steps=9, fallbacks={"a": 0})),
        (Counts(steps=9, fallbacks={"a": 1}), Counts(steps=99, fallbacks={"b": 1})),
        (Counts(buckets={"4": 2}), Counts(buckets={"8": 5})),
        (Counts(mixed={"4": 2}), Counts()),
    ],
)
def test_what_shrank_has_begun_anew(earlier: Counts, later: Counts):
    span = spans(at(earlier, 1), at(later, 3))["0"]
    assert span.restarted
    assert span.counts == later
    assert span.seconds == 2


def test_a_new_process_has_begun_anew_though_its_counts_are_larger():
    span = spans(at(Counts(steps=2), 1, started=100), at(Counts(steps=50), 3, started=102))["0"]
    assert span.restarted
    assert span.counts.steps == 50


def test_what_cannot_be_compared_is_left_out():
    later = at(Counts(steps=5), 3)
    assert spans(None, later) == {}
    assert spans(replace(later, engines={}), later) == {}
    assert spans(at(Counts(steps=5), 1, rank=1), later) == {}


def test_servers_on_one_page_are_told_apart():
    samples = [
        Sample("graphcap_replays_total", {"engine": "0", "rank": "0", "instance": host}, value)
        for host, value in (("a:8000", 3), ("b:8000", 4))
    ]
    found = read([*samples, Sample("process_start_time_seconds", {}, 7)], 0)
    assert {name: engine.counts.replays for name, engine in found.engines.items()} == {
        "0 instance=a:8000": 3,
        "0 instance=b:8000": 4,
    }
    assert found.started == 7


def test_samples_of_others_are_left_out():
    labels = {"engine": "0", "rank": "0"}
    samples = [
        Sample("vllm:num_requests_running", labels, 1),
        Sample("graphcap_replays_total", {"engine": "0"}, 1),
        Sample("graphcap_replays_total", {"engine": "0", "rank": "first"}, 1),
    ]
    assert read(samples, 0).engines == {}
    odd = Sample("graphcap_bucket_replays_total", {**labels, "bucket": "large"}, 1)
    assert read([odd], 0).engines["0"].counts == Counts()


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("http://host", "http://host/metrics"),
        ("http://host/", "http://host/metrics"),
        ("https://host/metrics", "https://host/metrics"),
        ("http://host/metrics/", "http://host/metrics"),
        ("http://host/base?key=1#x", "http://host/base/metrics?key=1"),
        ("http://[::1]:80", "http://[::1]:80/metrics"),
    ],
)
def test_addresses(text: str, url: str):
    assert metrics_url(text) == url


@pytest.mark.parametrize("text", ["", "ftp://h", "http://h:x", "http://h h", "http://h:99999"])
def test_no_addresses(text: str):
    with pytest.raises(SettingsError, match="expected the address of a server"):
        metrics_url(text)
