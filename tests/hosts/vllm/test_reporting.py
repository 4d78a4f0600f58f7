"""The plugin's report: written after the capture, and again with what was served when the server ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from graphcap.hosts.vllm.choice import Choice
from graphcap.hosts.vllm.counter_directory import DIRECTORY_VARIABLE, share_directory
from graphcap.hosts.vllm.reporting import Reporter
from graphcap.hosts.vllm.served import path_of_rank, write_at_exit, write_served
from graphcap.hosts.vllm.worker_counts import read_workers
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
SERVED = {
    "steps": 5,
    "batches": {"1": 1, "2": 2, "3": 1, "9": 1},
    "buckets": [
        {"size": 2, "replays": 3, "padding_rows": 1},
        {"size": 4, "replays": 1, "padding_rows": 1},
    ],
    "fallbacks": {"above_max_batch": 1, "mixed_above_max_tokens": 1},
}


def captured(path: Path | None, rank: int = 0) -> Reporter:
    """A reporter whose engine has just been recorded, without vLLM."""
    sys.modules.setdefault("vllm", types.SimpleNamespace(__version__="0.0"))  # type: ignore[arg-type]
    config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(rank=rank))
    reporter = Reporter(CHOICE, Settings(report=path), config)
    experts: Any = types.SimpleNamespace(
        layers={"pooled": 2}, choices=lambda: (), plans={}, plans_by_title={}
    )
    engine: Any = types.SimpleNamespace(
        pool=types.SimpleNamespace(nbytes=7), failed=None, experts=experts
    )
    reporter.captured(engine, {"decode": REPORT, "mixed": REPORT}, ())
    return reporter


def worker(path: Path, rank: int) -> None:
    """A worker process, which is killed as vLLM kills its own."""
    reporter = captured(path, rank)
    for rows in (1, 2, 2, 3):
        reporter.replayed("decode", 2 if rows < 3 else 4, rows)
    reporter.replayed("mixed", 16, 9)
    reporter.fell_back("above_max_batch", 9)
    reporter.fell_back("mixed_above_max_tokens")
    assert "served" not in json.loads(path_of_rank(path, rank).read_text())
    os.kill(os.getpid(), signal.SIGKILL)


def server(path: Path) -> None:
    """The process that vLLM's user started."""
    assert share_directory() is not None
    write_at_exit(path)
    write_at_exit(path)
    for rank in (0, 1):
        process = multiprocessing.get_context("fork").Process(target=worker, args=(path, rank))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.0"))


def test_a_server_that_ends_writes_what_its_killed_workers_served(tmp_path: Path):
    path = tmp_path / "report.json"
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import test_reporting, pathlib; test_reporting.server(pathlib.Path({str(path)!r}))"
    )
    environ = {k: v for k, v in os.environ.items() if k != DIRECTORY_VARIABLE}
    subprocess.run([sys.executable, "-c", program], check=True, env=environ, timeout=120)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "report.json",
        "report.rank1.json",
    ]
    for rank in (0, 1):
        read = json.loads(path_of_rank(path, rank).read_text())
        assert read["rank"] == rank
        assert read["served"] == SERVED
    traffic = read_report(path)
    assert traffic.counts == {1: 1, 2: 2, 3: 1, 9: 1}
    assert (traffic.max_batch, traffic.ms, traffic.mib) == (4, {2: 1.5}, {2: 1.0, 4: 2.0})


def test_only_the_process_that_made_the_directory_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    registered: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *entry: registered.append(entry))
    share_directory()
    write_at_exit(tmp_path / "report.json")
    assert registered == []


def test_the_report_of_another_run_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm: None
):
    from graphcap.hosts.vllm.counters import SharedCounters

    path = tmp_path / "report.json"
    path.write_text("{}")
    folder = tmp_path / "metrics"
    folder.mkdir()
    SharedCounters(directory=folder).fallback("not_recorded", 3)  # counted, and never captured
    write_served(folder, path)
    assert path.read_text() == "{}"


@pytest.mark.parametrize("contents", [None, "no JSON", "[1]"])
def test_a_report_that_is_gone_is_only_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, vllm: None, contents: str | None
):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    captured(None)
    path = tmp_path / "report.json"
    if contents is not None:
        path.write_text(contents)
    write_served(tmp_path, path)
    assert "what was served was not written to" in caplog.text
    assert (path.read_text() if path.exists() else None) == contents


def test_costs_of_buckets_are_counters_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm: None
):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    captured(None)
    (found,) = read_workers(tmp_path).values()
    assert found.bucket_bytes == {2: 2**20, 4: 2**21}
    assert found.bucket_ns == {2: 1_500_000}
