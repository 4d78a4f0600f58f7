"""Distributions of batch sizes are read from where they are, and from nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from graphcap.errors import InputError, ScrapeError, SettingsError
from graphcap.hosts.vllm.counters import SharedCounters
from graphcap.hosts.vllm.metrics import GraphcapCollector
from graphcap.traffic import read_histogram, read_metrics, read_report


def write(path: Path, contents: Any) -> Path:
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return path


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "contents",
    [
        "batch,count\n1,90\n4,10\n",
        "# from Tuesday\n\n Batch , Count \n4,4\n1, 90\n4,6",
        "1,90\r\n4,10\r\n",
        "\ufeffbatch,count\r\n1,90\r\n4,10\r\n",  # as spreadsheets write it
        {"1": 90, "4": 10},
        {"batches": {"1": 90, "4": 10}},
        [[1, 90], [4, 10]],
        {"batches": [[4, 10], [1, 90]]},
    ],
)
def test_formats_of_a_histogram(tmp_path: Path, contents: Any):
    traffic = read_histogram(write(tmp_path / "file", contents))
    assert traffic.counts == {1: 90, 4: 10}
    assert traffic.source == str(tmp_path / "file")
    assert traffic.max_batch is None


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("", "is empty: expected lines batch,count"),
        ("batch,count\n", "is empty"),
        ("1,90\n4;10\n", "line 2: expected batch,count such as 8,1200, found '4;10'"),
        ("1,90\n4,1e3\n", "line 2"),
        ("1,-90\n", "line 1"),
        ("1,90\nbatch,count\n", "line 2"),
        ("0,90\n", "batch size: expected an integer of at least 1, found 0"),
        ('{"1": ', "is not JSON"),
        ({"1": 0.5}, "expected batch sizes and counts"),
        ({"batches": 5}, "expected batch sizes and counts"),
        ([[1, 2, 3]], r"found \[1, 2, 3\]"),
        ([[True, 2]], "expected batch sizes and counts"),
    ],
)
def test_what_is_no_histogram(tmp_path: Path, contents: Any, message: str):
    with pytest.raises(InputError, match=message):
        read_histogram(write(tmp_path / "file", contents))


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_histogram(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe1,2")
    with pytest.raises(InputError, match="is not text"):
        read_histogram(tmp_path / "bytes")


# -- metrics -------------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path: Path) -> str:
    """What the plugin's own collector shows of two engines with two ranks each."""
    folder = tmp_path / "metrics"
    folder.mkdir()
    for engine in (0, 1):
        for rank in (0, 1):
            counters = SharedCounters(engine=engine, rank=rank, directory=folder)
            counters.captured(
                seconds=1,
                graph_bytes=5,
                pool_bytes=6,
                bucket_bytes={8: 2**20, 16: 3 * 2**20},
                bucket_ms={8: 4.5 + engine, 16: 6.0},
            )
            for _ in range(3 + engine):
                counters.replay(8, 5)
            counters.fallback("above_max_batch", 20)
            counters.fallback("mixed_above_max_tokens")
            counters.mixed(64, 60)
    registry = CollectorRegistry()
    registry.register(GraphcapCollector(folder))
    return generate_latest(registry).decode()


@pytest.fixture
def served(page: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_metrics_of_several_engines_and_ranks(page: str, tmp_path: Path):
    traffic = read_histogram(write(tmp_path / "metrics.txt", page))
    assert traffic.counts == {5: 3 + 4, 20: 2}
    assert traffic.max_batch == 16
    assert traffic.ms == {8: pytest.approx(4.5), 16: pytest.approx(6.0)}
    assert traffic.mib == {8: 1.0, 16: 3.0}


@pytest.mark.parametrize("form", ["http://{}/metrics", "http://{}", "http://{}/", "{}"])
def test_metrics_of_a_running_server(served: str, form: str):
    traffic = read_metrics(form.format(served))
    assert traffic.counts == {5: 7, 20: 2}
    assert traffic.source == f"http://{served}/metrics"


def test_of_several_ranks_the_lowest_that_tells_counts(tmp_path: Path):
    lines = [
        f'graphcap_batches_total{{engine="{engine}",rank="{rank}",rows="4"}} {value}'
        for engine, rank, value in ((0, 3, "7.0"), (0, 12, "8.0"), (10, 0, "1e+02"), (2, 0, "NaN"))
    ]
    noise = 'graphcap_batches_total{engine="x",rank="0",rows="4"} 9\nother{a="b\\"}"} 1\n'
    path = write(tmp_path / "m", noise + "\n".join(lines))
    assert read_histogram(path).counts == {4: 107}


def test_addresses_where_nothing_answers(served: str):
    with pytest.raises(ScrapeError, match=r"127.0.0.1:9/metrics is not reachable \(.*refused"):
        read_metrics("127.0.0.1:9")
    with pytest.raises(ScrapeError, match=r"/elsewhere/metrics answers 404"):
        read_metrics(f"http://{served}/elsewhere")
    for url in ("ftp://host/metrics", "http://", "file:///etc/passwd"):
        with pytest.raises(SettingsError, match="expected the address of a server"):
            read_metrics(url)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '# HELP x y\nvllm:iteration_tokens_total_bucket{le="8"} 4\n',
            "run the server with GRAPHCAP=1",
        ),
        ("# HELP x y\n", "give the /metrics of a vLLM server that runs with GRAPHCAP=1"),
    ],
)
def test_metrics_without_batches(tmp_path: Path, text: str, message: str):
    with pytest.raises(InputError, match=f"has no graphcap_batches_total.*{message}"):
        read_histogram(write(tmp_path / "m", text))


# -- reports -------------------------------------------------------------------------------------

BUCKETS = [
    {"size": 2, "nbytes": 2**20, "replay_ms": 1.5},
    {"size": 4, "nbytes": 2**21, "replay_ms": None},
]
SERVED = {"batches": {"1": 5, "2": 7}}


@pytest.mark.parametrize(
    ("report", "max_batch"),
    [
        ({"buckets": BUCKETS, "failures": {"8": "why"}, "served": SERVED}, 8),
        (
            {
                "managers": {"decode": {"buckets": BUCKETS}, "mixed": {"buckets": []}},
                "choice": {"decode": [2, 4, 6]},
                "served": SERVED,
            },
            6,
        ),
    ],
)
def test_reports(tmp_path: Path, report: dict[str, Any], max_batch: int):
    traffic = read_report(write(tmp_path / "r.json", report))
    assert traffic.counts == {1: 5, 2: 7}
    assert traffic.max_batch == max_batch
    assert traffic.ms == {2: 1.5}
    assert traffic.mib == {2: 1.0, 4: 2.0}


@pytest.mark.parametrize("served", [None, {}, {"batches": {}}])
def test_a_report_of_the_start_has_costs_but_no_batches(tmp_path: Path, served: Any):
    path = write(tmp_path / "r.json", {"buckets": BUCKETS, "served": served})
    with pytest.raises(InputError, match=r"tells of no decode step.*use --from-metrics URL"):
        read_report(path)
    assert read_report(path, needs_batches=False).ms == {2: 1.5}


@pytest.mark.parametrize(
    "contents", [[], 5, {"a": 1}, {"buckets": [1, 2]}, {"managers": {}}, {"buckets": [{"size": 0}]}]
)
def test_what_is_no_report(tmp_path: Path, contents: Any):
    with pytest.raises(InputError, match="is not a report: expected the file that GRAPHCAP_REPORT"):
        read_report(write(tmp_path / "r.json", contents))
