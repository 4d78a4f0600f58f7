"""What counting one step for the /metrics endpoint costs the worker, and a scrape its reader."""

import timeit

import pytest

from graphcap.hosts.vllm.counters import SharedCounters
from graphcap.hosts.vllm.worker_counts import read_workers


@pytest.fixture
def counters(tmp_path):
    made = SharedCounters(directory=tmp_path)
    assert made.path is not None
    return made


def note_nanoseconds(benchmark, call):
    """One call is shorter than the clock's resolution: the cost per call, of many in a row."""
    number = 100_000
    best = min(timeit.repeat(call, number=number, repeat=5))
    benchmark.extra_info["nanoseconds_per_call"] = round(best / number * 1e9, 1)


def test_replay(benchmark, counters):
    note_nanoseconds(benchmark, lambda: counters.replay(8, 5))
    benchmark(counters.replay, 8, 5)


def test_replay_not_shared(benchmark, monkeypatch):
    monkeypatch.delenv("_GRAPHCAP_METRICS_DIR", raising=False)
    counters = SharedCounters()
    note_nanoseconds(benchmark, lambda: counters.replay(8, 5))
    benchmark(counters.replay, 8, 5)


def test_fallback(benchmark, counters):
    note_nanoseconds(benchmark, lambda: counters.fallback("above_max_batch", 70))
    benchmark(counters.fallback, "above_max_batch", 70)


def test_first_replay_of_a_batch_size(benchmark, counters):
    sizes = iter(range(1, 1_000_000))
    benchmark.pedantic(lambda: counters.replay(1_000_000, next(sizes)), rounds=500)


def test_scrape_of_8_ranks_with_256_batch_sizes(benchmark, tmp_path):
    pytest.importorskip("prometheus_client", reason="needs the extra `metrics`")
    from prometheus_client import CollectorRegistry, generate_latest

    from graphcap.hosts.vllm.metrics import GraphcapCollector

    for rank in range(8):
        counters = SharedCounters(rank=rank, directory=tmp_path)
        for rows in range(1, 257):
            counters.replay(256, rows)
    assert len(read_workers(tmp_path)) == 8
    registry = CollectorRegistry()
    registry.register(GraphcapCollector(tmp_path))
    benchmark(generate_latest, registry)
