"""The plugin's report: written after the capture, and again with what was served when a worker ends."""

from __future__ import annotations

import json
import multiprocessing
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphcap.hosts.vllm import reporting
from graphcap.hosts.vllm.choice import Choice
from graphcap.hosts.vllm.counters import DIRECTORY_VARIABLE, read_workers
from graphcap.hosts.vllm.reporting import Reporter
from graphcap.report import BucketReport, CaptureReport
from graphcap.settings import Settings
from graphcap.traffic import read_report

CHOICE = Choice(True, decode=(2, 4), mixed="full", mixed_tokens=(16,))
REPORT = CaptureReport(
    recorder="tape",
    device="cpu",
    buckets=(
        BucketReport(2, 3, 0, 2**20, 5.0, 0.0, 1.5),
        BucketReport(4, 3, 0, 2**21, 5.0, 0.0, None),
    ),
    failures={},
    pool_bytes=0,
    pool_lower_bound_bytes=0,
    slots_bytes=0,
    seconds=0.1,
    census=None,
)


def captured(path: Path, rank: int = 0) -> Reporter:
    """A reporter whose engine has just been recorded, without vLLM."""
    sys.modules.setdefault("vllm", types.SimpleNamespace(__version__="0.0"))  # type: ignore[arg-type]
    config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(rank=rank))
    reporter = Reporter(CHOICE, Settings(report=path), config)
    experts: Any = types.SimpleNamespace(layers={"pooled": 2})
    engine: Any = types.SimpleNamespace(
        pool=types.SimpleNamespace(nbytes=7), failed=None, experts=experts
    )
    reporter.captured(engine, {"decode": REPORT, "mixed": REPORT}, ())
    return reporter


def serve(reporter: Reporter) -> None:
    for rows in (1, 2, 2, 3):
        reporter.replayed("decode", 2 if rows < 3 else 4, rows)
    reporter.replayed("mixed", 16, 9)
    reporter.fell_back("above_max_batch", 9)
    reporter.fell_back("mixed_above_max_tokens")


def worker(path: Path, rank: int) -> None:
    serve(captured(path, rank))
    assert "served" not in json.loads(written_by(path, rank).read_text())


def written_by(path: Path, rank: int) -> Path:
    return path.with_name(f"report.rank{rank}.json") if rank else path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(reporting, "_AT_END", {})
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.0"))
    yield tmp_path / "report.json"
    for _, finalizer in reporting._AT_END.values():
        finalizer.cancel()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_ends_writes_what_it_served(path: Path, method: str):
    context = multiprocessing.get_context(method)
    for rank in (0, 1):
        process = context.Process(target=worker, args=(path, rank))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        read = json.loads(written_by(path, rank).read_text())
        assert read["rank"] == rank
        assert read["served"] == {
            "steps": 5,
            "batches": {"1": 1, "2": 2, "3": 1, "9": 1},
            "buckets": [
                {"size": 2, "replays": 3, "padding_rows": 1},
                {"size": 4, "replays": 1, "padding_rows": 1},
            ],
            "fallbacks": {"above_max_batch": 1, "mixed_above_max_tokens": 1},
        }
    traffic = read_report(path)
    assert traffic.counts == {1: 1, 2: 2, 3: 1, 9: 1}
    assert (traffic.max_batch, traffic.ms, traffic.mib) == (4, {2: 1.5}, {2: 1.0, 4: 2.0})


def test_after_a_second_capture_the_counts_go_on(path: Path):
    first = captured(path)
    serve(first)
    second = captured(path)
    second.replayed("decode", 4, 4)
    ((of_end, finalizer),) = reporting._AT_END.values()
    assert of_end is second
    finalizer()
    served = json.loads(path.read_text())["served"]
    assert served["fallbacks"] == first.fallbacks
    assert served["batches"] == {"1": 1, "2": 2, "3": 1, "4": 1, "9": 1}


def test_without_a_report_nothing_is_written_at_the_end(path: Path):
    config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(rank=0))
    reporter = Reporter(CHOICE, Settings(), config)
    reporter.replayed("decode", 2, 1)
    reporter.write_served(path)
    assert not path.exists()
    assert reporting._AT_END == {}


def test_costs_of_buckets_are_counters_too(path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = path.parent / "metrics"
    folder.mkdir()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(folder))
    captured(path)
    (found,) = read_workers(folder).values()
    assert found.bucket_bytes == {2: 2**20, 4: 2**21}
    assert found.bucket_ns == {2: 1_500_000}
