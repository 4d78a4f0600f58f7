"""Counters of one process at the /metrics endpoint of another."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphcap.hosts.vllm import counter_file
from graphcap.hosts.vllm.counter_directory import DIRECTORY_VARIABLE, share_directory
from graphcap.hosts.vllm.counters import SharedCounters
from graphcap.hosts.vllm.worker_counts import read_workers
from graphcap.settings import misspelt

BUMPS = 5000


def bump(engine: int, rank: int, times: int) -> None:
    """Run in another process, which finds the directory in its environment."""
    counters = SharedCounters(engine=engine, rank=rank)
    counters.captured(seconds=1.5, graph_bytes=1000 + rank, pool_bytes=2000)
    for number in range(times):
        counters.replay(8, 5 + number % 3)
    counters.fallback("above_max_batch", 70)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    return tmp_path


def run_all(processes: list[Any]) -> None:
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(processes)


# -- writers and readers -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_other_processes_counted_is_read(directory: Path, method: str):
    context = multiprocessing.get_context(method)
    run_all([context.Process(target=bump, args=(0, rank, BUMPS)) for rank in (0, 1)])
    workers = read_workers(directory)
    assert set(workers) == {(0, 0), (0, 1)}
    for (_, rank), worker in workers.items():
        assert worker.replays.total() == worker.bucket_replays[8] == BUMPS
        assert worker.replays[8, 5] == worker.batches[5] == (BUMPS + 2) // 3
        assert worker.padding_rows == sum(8 - (5 + number % 3) for number in range(BUMPS))
        assert worker.fallbacks == {"above_max_batch": 1}
        assert worker.batches[70] == 1
        assert worker.gauges == {
            "capture_ns": 1_500_000_000,
            "graph_bytes": 1000 + rank,
            "pool_bytes": 2000,
        }


def test_dead_worker_keeps_counting_for_its_successor(directory: Path):
    first = SharedCounters()
    first.replay(4, 4)
    first.captured(seconds=1, graph_bytes=1, pool_bytes=1)
    del first
    time.sleep(0.002)
    second = SharedCounters()
    second.replay(4, 4)
    second.captured(seconds=2, graph_bytes=2, pool_bytes=1)
    worker = read_workers(directory)[0, 0]
    assert worker.replays[4, 4] == 2
    assert worker.gauges["graph_bytes"] == 2


def test_names_come_while_a_reader_reads_and_nothing_goes_backwards(directory: Path):
    stop = multiprocessing.get_context("fork").Event()
    process = multiprocessing.get_context("fork").Process(target=write_until, args=(stop,))
    process.start()
    seen: dict[tuple[int, int], int] = {}
    fallbacks = scrapes = 0
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and (scrapes < 60 or len(seen) < 1500):
            worker = read_workers(directory).get((0, 0))
            if worker is None:
                continue
            scrapes += 1
            assert set(worker.fallbacks) <= {f"reason {number}" for number in range(40)}
            assert worker.fallbacks.total() >= fallbacks
            fallbacks = worker.fallbacks.total()
            for pair, count in worker.replays.items():
                assert pair[1] <= pair[0] <= 100
                assert seen.get(pair, 0) <= count < 1 << 40
            assert set(seen) <= set(worker.replays)
            seen = dict(worker.replays)
    finally:
        stop.set()
        process.join(60)
    assert process.exitcode == 0
    assert len(seen) >= 1500  # the file has grown under the reader


def write_until(stop: Any) -> None:
    counters = SharedCounters()
    pairs = [(bucket, rows) for bucket in range(1, 101) for rows in range(1, bucket + 1)]
    number = 0
    while not stop.is_set():
        counters.replay(*pairs[number % len(pairs)])
        counters.fallback(f"reason {number % 40}")
        for _ in range(50):
            counters.replay(1, 1)
        number += 1


def test_fork_after_opening_gets_its_own_file(directory: Path):
    counters = SharedCounters()
    for _ in range(3):
        counters.replay(2, 1)
    mine = counters.path
    process = multiprocessing.get_context("fork").Process(target=bump_on, args=(counters, 5))
    run_all([process])
    counters.replay(2, 1)
    assert counters.path == mine
    assert len(list(directory.glob("*.counters"))) == 2
    assert read_workers(directory)[0, 0].replays == {(2, 1): 3 + 5 + 1}
    [theirs] = set(directory.glob("*.counters")) - {mine}
    theirs.unlink()
    assert read_workers(directory)[0, 0].replays == {(2, 1): 3 + 1}


def bump_on(counters: SharedCounters, times: int) -> None:
    for _ in range(times):
        counters.replay(2, 1)


def test_long_and_strange_reasons(directory: Path):
    counters = SharedCounters()
    reasons = ["ä" * 60, "ä" * 60 + "x", "two words", "", "line\nbreak", "\udc80"]
    for reason in reasons:
        counters.fallback(reason)
    assert read_workers(directory)[0, 0].fallbacks == {
        "ä" * 23: 2,
        "two words": 1,
        "": 1,
        "line\nbreak": 1,
        "?": 1,
    }


# -- what cannot be shared -----------------------------------------------------------------------


def test_without_a_directory_nothing_is_shared_and_nothing_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    counters = SharedCounters()
    bump_everything(counters)
    assert counters.path is None
    assert not caplog.records


def test_missing_directory_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    counters = SharedCounters(directory=tmp_path / "gone")
    bump_everything(counters)
    assert counters.path is None
    assert ["are incomplete" in record.getMessage() for record in caplog.records] == [True]
    assert read_workers(tmp_path / "gone") == {}


def test_full_disk_costs_one_warning_and_keeps_what_was_counted(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    counters = SharedCounters()
    counters.replay(2000, 1)
    monkeypatch.setattr(os, "posix_fallocate", full)
    for rows in range(1, 2000):
        counters.replay(2000, rows)
    counters.replay(2000, 1)
    worker = read_workers(directory)[0, 0]
    assert worker.replays[2000, 1] == 3
    assert set(worker.replays.values()) == {1, 3}
    assert 1000 < len(worker.replays) < 1100
    assert ["No space left" in record.getMessage() for record in caplog.records] == [True]


def bump_everything(counters: SharedCounters) -> None:
    for _ in range(2):
        counters.replay(8, 7)
        counters.fallback("not_recorded", 3)
        counters.captured(seconds=0.5, graph_bytes=1, pool_bytes=2)


# -- files that are no counters ------------------------------------------------------------------


@pytest.fixture
def written(directory: Path) -> bytes:
    """The content of a good file that is no longer there."""
    counters = SharedCounters(engine=1, rank=2)
    counters.replay(8, 5)
    counters.replay(8, 6)
    counters.fallback("not_recorded")
    assert counters.path is not None
    content = counters.path.read_bytes()
    counters.path.unlink()
    return content


def test_truncated_anywhere(directory: Path, written: bytes):
    path = directory / "1-x.counters"
    for length in range(0, 400, 3):
        path.write_bytes(written[:length])
        workers = read_workers(directory)
        assert set(workers) <= {(1, 2)}
        for worker in workers.values():
            assert set(worker.replays.items()) <= {((8, 5), 1), ((8, 6), 1)}
            assert set(worker.fallbacks.items()) <= {("not_recorded", 1)}


def test_half_written_is_not_read(directory: Path, written: bytes):
    (directory / "1-x.counters").write_bytes(bytes(8) + written[8:])  # no signature yet
    (directory / "2-x.counters").write_bytes(bytes(1 << 16))
    assert read_workers(directory) == {}


def test_record_that_is_not_announced_is_not_read(directory: Path, written: bytes):
    used = counter_file.USED * 8
    content = bytearray(written)
    content[used] -= 1
    (directory / "1-x.counters").write_bytes(content)
    assert read_workers(directory)[1, 2].fallbacks == {}


def test_garbage_beside_good_files(directory: Path, written: bytes):
    (directory / "good.counters").write_bytes(written)
    generator = random.Random(7)
    (directory / "folder.counters").mkdir()
    os.mkfifo(directory / "pipe.counters")
    (directory / "loop.counters").symlink_to(directory / "loop.counters")
    (directory / "text.counters").write_text("graphcap counters of a kind\n" * 100)
    (directory / "other.db").write_bytes(written)
    for number in range(200):
        garbage = generator.randbytes(generator.randrange(600))
        (directory / f"garbage{number}.counters").write_bytes(garbage)
    workers = read_workers(directory)
    assert set(workers) == {(1, 2)}
    assert workers[1, 2].replays == {(8, 5): 1, (8, 6): 1}


def test_signed_garbage_is_read_without_an_error(directory: Path, written: bytes):
    generator = random.Random(8)
    path = directory / "x.counters"
    for _ in range(500):
        content = bytearray(written[:400])
        for _ in range(30):
            content[generator.randrange(8, 400)] = generator.randrange(256)
        path.write_bytes(content)
        for worker in read_workers(directory).values():
            assert all(0 <= count < 1 << 63 for count in worker.replays.values())


# -- the directory -------------------------------------------------------------------------------

SHARE = f"""
import os, sys
from pathlib import Path
from graphcap.hosts.vllm.counter_directory import share_directory
from graphcap.hosts.vllm.counters import SharedCounters
made = share_directory()
assert share_directory() == made == Path(os.environ[{DIRECTORY_VARIABLE!r}])
assert made.stat().st_mode & 0o077 == 0
if os.fork() == 0:
    SharedCounters().replay(1, 1)
    sys.exit()  # runs the exit functions inherited from the parent
os.wait()
assert len(list(made.glob("*.counters"))) == 1
print(made)
"""


def test_creator_alone_removes_the_directory(tmp_path: Path):
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    environ.pop(DIRECTORY_VARIABLE, None)
    done = subprocess.run(
        [sys.executable, "-c", SHARE], env=environ, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == tmp_path
    assert not any(tmp_path.iterdir())


def test_inherited_directory_is_kept(directory: Path):
    directory.chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-c", SHARE], text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert directory.is_dir()
    assert share_directory() == directory


def test_variable_is_no_misspelt_setting():
    assert misspelt({DIRECTORY_VARIABLE: "/somewhere"}) == []


# -- the collector -------------------------------------------------------------------------------


@pytest.fixture
def prometheus() -> Any:
    return pytest.importorskip("prometheus_client", reason="needs the extra `metrics`")


Sample = tuple[str, frozenset[tuple[str, str]]]


def sample(name: str, engine: int = 0, rank: int = 0, **labels: str) -> Sample:
    return name, frozenset({"engine": str(engine), "rank": str(rank), **labels}.items())


def exposed(prometheus: Any, registry: Any) -> dict[Sample, float]:
    """graphcap's samples as a scraper reads them. None may come twice."""
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(prometheus.generate_latest(registry).decode())
    samples = [
        ((found.name, frozenset(found.labels.items())), found.value)
        for family in families
        for found in family.samples
        if found.name.startswith("graphcap_")
    ]
    assert len(dict(samples)) == len(samples)
    return dict(samples)


def test_metrics_as_scraped(prometheus: Any, directory: Path):
    from graphcap.hosts.vllm.metrics import GraphcapCollector

    def of(name: str, **labels: str) -> Sample:
        return sample(name, 1, 2, **labels)

    registry = prometheus.CollectorRegistry()
    registry.register(GraphcapCollector(directory))
    assert exposed(prometheus, registry) == {}
    counters = SharedCounters(engine=1, rank=2)
    nothing = exposed(prometheus, registry)
    assert nothing[of("graphcap_replays_total")] == 0
    assert nothing[of("graphcap_padding_rows_total")] == 0
    for _ in range(3):
        counters.replay(8, 5)
    counters.replay(8, 8)
    counters.replay(2, 1)
    counters.fallback("above_max_batch", 5000)
    counters.fallback('"quoted"')
    counters.captured(seconds=1.25, graph_bytes=10, pool_bytes=20)
    samples = exposed(prometheus, registry)
    histogram = {key: samples.pop(key) for key in list(samples) if "_batch_rows" in key[0]}
    assert samples == {
        of("graphcap_replays_total"): 5,
        of("graphcap_bucket_replays_total", bucket="8"): 4,
        of("graphcap_bucket_replays_total", bucket="2"): 1,
        of("graphcap_padding_rows_total"): 10,
        of("graphcap_fallbacks_total", reason="above_max_batch"): 1,
        of("graphcap_fallbacks_total", reason='"quoted"'): 1,
        of("graphcap_batches_total", rows="5"): 3,
        of("graphcap_batches_total", rows="8"): 1,
        of("graphcap_batches_total", rows="1"): 1,
        of("graphcap_batches_total", rows="5000"): 1,
        of("graphcap_capture_seconds"): 1.25,
        of("graphcap_graph_bytes"): 10,
        of("graphcap_pool_bytes"): 20,
    }
    edges = {"1.0": 1, "2.0": 1, "4.0": 1, "8.0": 5, "1024.0": 5, "+Inf": 6}
    for edge, count in edges.items():
        assert histogram[of("graphcap_batch_rows_bucket", le=edge)] == count
    assert histogram[of("graphcap_batch_rows_count")] == 6
    assert histogram[of("graphcap_batch_rows_sum")] == 3 * 5 + 8 + 1 + 5000


def test_exact_batches_are_shown_for_one_rank_of_each_engine(prometheus: Any, directory: Path):
    from graphcap.hosts.vllm.metrics import GraphcapCollector

    for engine, rank in ((0, 0), (0, 1), (1, 2), (1, 3)):
        SharedCounters(engine=engine, rank=rank).replay(4, 3)
    registry = prometheus.CollectorRegistry()
    registry.register(GraphcapCollector(directory))
    samples = exposed(prometheus, registry)
    assert sum(name == "graphcap_replays_total" for name, _ in samples) == 4
    assert {key for key in samples if key[0] == "graphcap_batches_total"} == {
        sample("graphcap_batches_total", 0, 0, rows="3"),
        sample("graphcap_batches_total", 1, 2, rows="3"),
    }


def test_one_metric_can_be_asked_for(prometheus: Any, directory: Path):
    from graphcap.hosts.vllm.metrics import GraphcapCollector

    registry = prometheus.CollectorRegistry()
    registry.register(GraphcapCollector(directory))
    SharedCounters().replay(1, 1)
    restricted = registry.restricted_registry(["graphcap_replays_total"])
    assert exposed(prometheus, restricted) == {sample("graphcap_replays_total"): 1}


# -- vLLM's endpoint -----------------------------------------------------------------------------

VLLM = "vllm.v1.metrics.prometheus"
IMPORTER = "vllm.entrypoints.serve.instrumentator.metrics"


@pytest.fixture
def vllm_module(prometheus: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in with the functions of vLLM's module, and one that has imported from it."""
    from prometheus_client import REGISTRY, CollectorRegistry, multiprocess

    def get_prometheus_registry() -> Any:
        if os.getenv("PROMETHEUS_MULTIPROC_DIR") is not None:
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)
            return registry
        return REGISTRY

    def unregister_vllm_metrics() -> None:
        for collector in list(REGISTRY._collector_to_names):
            if hasattr(collector, "_name") and collector._name.startswith("vllm:"):
                REGISTRY.unregister(collector)

    for name in ("vllm", "vllm.v1", "vllm.v1.metrics", VLLM, IMPORTER):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module: Any = sys.modules[VLLM]
    module.get_prometheus_registry = get_prometheus_registry
    module.unregister_vllm_metrics = unregister_vllm_metrics
    importer: Any = sys.modules[IMPORTER]
    importer.get_prometheus_registry = get_prometheus_registry
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    before = set(REGISTRY._collector_to_names)
    yield module
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


@pytest.mark.parametrize("servers", [1, 2])
def test_endpoint_shows_the_engine(
    prometheus: Any,
    vllm_module: Any,
    directory: Path,
    servers: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
):
    from graphcap.hosts.vllm.metrics import join_vllm_endpoint

    if servers > 1:
        made = tmp_path_factory.mktemp("multiproc")
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(made))
    ours = prometheus.Counter("vllm:test_metric", "Of vLLM.")
    ours.inc()
    for _ in range(3):
        assert join_vllm_endpoint() == "graphcap metrics are shown at vLLM's /metrics endpoint"
        vllm_module.unregister_vllm_metrics()
    bump_in_a_child = multiprocessing.get_context("spawn").Process(target=bump, args=(0, 1, 100))
    run_all([bump_in_a_child])
    for module in (vllm_module, sys.modules[IMPORTER]):
        for _ in range(2):
            registry = module.get_prometheus_registry()
            assert (registry is prometheus.REGISTRY) == (servers == 1)
            samples = exposed(prometheus, registry)
            assert samples[sample("graphcap_replays_total", 0, 1)] == 100


def test_joined_after_the_registry_was_handed_out(
    prometheus: Any, vllm_module: Any, directory: Path
):
    from graphcap.hosts.vllm.metrics import join_vllm_endpoint

    registry = vllm_module.get_prometheus_registry()
    join_vllm_endpoint()
    SharedCounters().replay(1, 1)
    assert exposed(prometheus, registry)[sample("graphcap_replays_total")] == 1


def test_no_directory_is_said(vllm_module: Any, monkeypatch: pytest.MonkeyPatch):
    from graphcap.hosts.vllm.metrics import join_vllm_endpoint

    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    assert "nothing to show: no directory" in join_vllm_endpoint()


def test_vllm_without_the_function(vllm_module: Any, directory: Path):
    from graphcap.hosts.vllm.metrics import join_vllm_endpoint

    del vllm_module.get_prometheus_registry
    assert "not with several API servers" in join_vllm_endpoint()


def test_vllm_without_the_module(directory: Path, monkeypatch: pytest.MonkeyPatch):
    from graphcap.hosts.vllm.metrics import join_vllm_endpoint

    for name in [name for name in sys.modules if name.split(".")[0] == "prometheus_client"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, VLLM, None)  # import raises
    assert "not shown: this vLLM has no vllm.v1.metrics.prometheus" in join_vllm_endpoint()
    assert "prometheus_client" not in sys.modules


def test_trouble_in_vllm_is_text(
    vllm_module: Any, directory: Path, caplog: pytest.LogCaptureFixture
):
    from graphcap.hosts.vllm import metrics

    class Closed(types.ModuleType):
        get_prometheus_registry = staticmethod(lambda: None)

        def __setattr__(self, name: str, value: object) -> None:
            raise TypeError("read-only")

    sys.modules[VLLM] = Closed(VLLM)
    assert metrics.join_vllm_endpoint() == "graphcap metrics are not shown: TypeError: read-only"
    vllm_module.get_prometheus_registry = lambda: None  # no registry at all
    metrics._patch_get_prometheus_registry(vllm_module)
    with caplog.at_level(logging.WARNING, "graphcap"):
        assert vllm_module.get_prometheus_registry() is None
    assert "not shown" in caplog.text


def test_modules_import_without_prometheus_and_vllm():
    code = (
        "import sys; sys.modules['prometheus_client'] = sys.modules['vllm'] = None\n"
        "from graphcap.hosts.vllm import metrics, counters\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "print(metrics.join_vllm_endpoint())"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert "not shown" in done.stdout
