"""The dashboard and the alerts of docs/, asked of a real Prometheus that has watched a real run."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, NamedTuple

import pytest
from prometheus_server import EVERY, MISSING, ROOT, WHY_MISSING, Prometheus

if MISSING:
    pytest.skip(WHY_MISSING, allow_module_level=True)
pytest.importorskip("prometheus_client", reason="needs the extra `metrics`")

from toy_client import ToyServer, totals

DASHBOARD = json.loads((ROOT / "docs" / "grafana" / "graphcap.json").read_text())
WINDOW = 20  # seconds, in place of the 5 minutes of the alerts
SPAN = 8  # seconds that the queries of the dashboard look back over

WARM = [
    (0, "decode", 3, 200),  # bucket 4
    (0, "decode", 6, 150),
    (0, "decode", 9, 100),  # above_max_batch
    (0, "mixed", 12, 120),  # bucket 16
    (0, "mixed", 20, 90),  # mixed_above_max_tokens
    (1, "decode", 1, 300),
    (1, "mixed", 5, 80),
]
RUN = [
    (0, "decode", 3, 70),
    (0, "decode", 6, 20),
    (0, "decode", 9, 10),
    (0, "mixed", 12, 25),
    (0, "mixed", 20, 8),
    (1, "decode", 1, 200),
    (1, "mixed", 5, 30),
]


class Seen(NamedTuple):
    """What has run and who watched.

    Attributes:
        workers: "engine,rank" -> what its managers counted in all.
        run: of both engines, what was counted in the last SPAN seconds before `at`.
        alerts: that fired then.
        later: alerts that fired after the recordings of engine 1 became stale.
    """

    prometheus: Prometheus
    server: ToyServer
    other: str
    workers: dict[str, Any]
    run: Counter[str]
    at: float
    alerts: set[tuple[str, ...]]
    later: set[tuple[str, ...]]


def of_both_engines(workers: dict[str, Any]) -> Counter[str]:
    return totals(workers["0,0"]) + totals(workers["1,0"])


@pytest.fixture(scope="module")
def other() -> Iterator[str]:
    """A server without graphcap."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(b"other_total 1\n")

        def log_message(self, *_: object) -> None: ...

    made = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, other: str) -> Iterator[Seen]:
    server = ToyServer()
    try:
        instance = f"127.0.0.1:{server.port}"
        made = tmp_path_factory.mktemp("prometheus")
        prometheus = Prometheus(made, [instance, other], WINDOW)
        try:
            yield _watched(prometheus, server, other)
        finally:
            prometheus.stop()
    finally:
        server.stop()


def _watched(prometheus: Prometheus, server: ToyServer, other: str) -> Seen:
    def wait_for_scrape() -> None:
        scraped = 'min(timestamp(graphcap_replays_total{rank="0"}))'
        now = time.time()
        prometheus.wait_until(
            lambda: prometheus.query(scraped).get((), 0) > now, "another scrape of the server"
        )

    for order in WARM:  # every series is there before the span begins, or its first value is lost
        before = server.run(*order)
    wait_for_scrape()
    begin = time.time()
    wait_for_scrape()  # the span begins with a scrape before the run
    for order in RUN:
        workers = server.run(*order)
    wait_for_scrape()
    prometheus.wait_until(lambda: len(prometheus.firing()) >= 2, "alerts fire")
    alerts = prometheus.firing()
    at = begin + SPAN
    assert time.time() < at, "the machine is too slow for this span"
    time.sleep(max(at - time.time(), 0) + 2 * EVERY)
    run = of_both_engines(workers)
    run.subtract(of_both_engines(before))
    server.assign_weight(1)
    server.run(1, "decode", 1, 1)  # one step only: its series is new
    lost = "GraphcapRecordingsLost"
    prometheus.wait_until(
        lambda: any(alert[0] == lost for alert in prometheus.firing()), f"{lost} fires"
    )
    later = prometheus.firing()
    return Seen(prometheus, server, other, workers, run, at, alerts, later)


# -- the dashboard -------------------------------------------------------------------------------

PANELS = {panel["id"]: panel for panel in DASHBOARD["panels"]}
TARGETS = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in PANELS.values()
    for target in panel["targets"]
}


def substituted(expression: str) -> str:
    """As Grafana does it, with all servers and engines chosen."""
    for variable in ("job", "instance", "engine"):
        expression = expression.replace(f"${variable}", ".*")
    for variable in ("rate_interval", "range"):
        expression = expression.replace(f"$__{variable}", f"{SPAN}s")
    assert "$" not in expression
    return expression


def labelled(run: Counter[str], kind: str) -> dict[tuple[str, ...], int]:
    return {(name.split()[1],): run[name] for name in run if name.startswith(f"{kind} ")}


def quantile(share: float, rows: Counter[int]) -> float:
    """Prometheus' histogram_quantile over edges at powers of two: linear within an edge's span."""
    rank, below = share * rows.total(), 0
    low, edge = 0, 1
    while True:
        inside = sum(count for size, count in rows.items() if low < size <= edge)
        if below + inside >= rank:
            return low + (edge - low) * (rank - below) / inside
        below, low, edge = below + inside, edge, 2 * edge


def expected(seen: Seen) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(shares, counts within the span, totals) by "title refId", each by label value where it has one."""
    run = seen.run
    rows = Counter(
        {
            size: sum(t for _, kind, n, t in RUN if (kind, n) == ("decode", size))
            for size in range(10)
        }
    )
    assert run["steps"] == rows.total()  # the script and the managers agree
    real = sum(size * count for size, count in rows.items())
    shares = {
        "Hit rate A": run["replays"] / run["steps"],
        "Padding A": run["padding_rows"] / (run["padding_rows"] + real),
        "Hit rate by bucket A": {
            key: count / run["steps"] for key, count in labelled(run, "bucket").items()
        },
        "Rows of a decode step A": real / run["steps"],
        "Rows of a decode step B": quantile(0.5, rows),
        "Rows of a decode step C": quantile(0.95, rows),
    }
    rates = {
        "Replays A": run["replays"],
        "Fallbacks A": run["fallbacks"],
        "Decode steps A": run["replays"],
        "Decode steps B": run["eager"],
        "Fallbacks by reason A": labelled(run, "fallback"),
        "Mixed batches replayed A": labelled(run, "mixed"),
        "Padding a second A": run["padding_rows"],
        "Padding a second B": run["mixed_padding"],
    }
    counts = {name: scaled(value, 1 / SPAN) for name, value in rates.items()}
    counts["Most frequent batch sizes A"] = {
        (str(size),): count for size, count in rows.items() if count
    }
    server = f"127.0.0.1:{seen.server.port}"
    captured = {tuple(key.split(",")): worker for key, worker in seen.workers.items()}
    slowest: dict[tuple[str, ...], float] = {}
    for (engine, _), worker in captured.items():
        seconds = sum(worker[kind]["capture_seconds"] for kind in ("decode", "mixed"))
        slowest[engine, server] = max(slowest.get((engine, server), 0), seconds)
    now = {
        "Fallbacks since start A": labelled(of_both_engines(seen.workers), "fallback"),
        "Time to record A": slowest,
        "Memory A": {
            (engine, server, rank): sum(worker[k]["graph_bytes"] for k in ("decode", "mixed"))
            for (engine, rank), worker in captured.items()
        },
        "Memory B": {
            (engine, server, rank): worker["pool_bytes"]
            for (engine, rank), worker in captured.items()
        },
    }
    return shares, counts, now


def scaled(value: Any, factor: float) -> Any:
    if isinstance(value, dict):
        return {key: one * factor for key, one in value.items()}
    return value * factor


def test_every_query_of_the_dashboard_returns_what_the_run_did(seen: Seen):
    shares, counts, now = expected(seen)
    assert {*shares, *counts, *now} == set(TARGETS)
    # rate() stretches the time between the first and the last scrape to the whole span: by at most
    # what may lie outside at both ends.
    stretch = SPAN / (SPAN - 2.2 * EVERY)
    stretches = set()
    for name, expression in TARGETS.items():
        found = seen.prometheus.query(substituted(expression), at=seen.at)
        want = shares.get(name, counts.get(name, now.get(name)))
        want = want if isinstance(want, dict) else {(): want}
        assert found.keys() == want.keys(), name
        for key, value in want.items():
            assert value > 0, name
            if name in counts:
                stretches.add(round(found[key] / value, 6))
                assert 1 - 1e-9 <= found[key] / value <= stretch, (name, key)
            else:
                assert found[key] == pytest.approx(value, rel=1e-9), (name, key)
    assert len(stretches) == 1  # else it is not the stretching that makes the difference


def test_a_choice_of_engine_narrows_the_queries(seen: Seen):
    expression = TARGETS["Fallbacks since start A"].replace("$engine", "1")
    assert seen.prometheus.query(substituted(expression), at=seen.at) == {}
    assert not math.isnan(
        seen.prometheus.query(
            substituted(TARGETS["Replays A"].replace("$engine", "1")), at=seen.at
        )[()]
    )


def test_variables_list_what_the_server_shows(seen: Seen):
    server = f"127.0.0.1:{seen.server.port}"
    want = {"job": ["vllm"], "instance": [server], "engine": ["0", "1"]}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            inside = variable["query"]["query"].removeprefix("label_values(").removesuffix(")")
            series, label = inside.rsplit(", ", 1)
            series = series.replace("$job", ".*").replace("$instance", ".*")
            found = seen.prometheus.get(f"label/{label}/values", **{"match[]": series})
            assert found == want.pop(variable["name"])
    assert want == {}


# -- the alerts ----------------------------------------------------------------------------------


def test_alerts_fire_for_what_happened_and_for_nothing_else(seen: Seen):
    server = f"127.0.0.1:{seen.server.port}"
    assert seen.alerts == {
        ("GraphcapDecodeStepsFallBack", server, "0", ""),
        ("GraphcapCountersMissing", seen.other, "", ""),
    }
    lost = ("GraphcapRecordingsLost", server, "1", "stale_recording")
    assert lost in seen.later
    assert {alert for alert in seen.later if alert[0] == lost[0]} == {lost}


def test_alert_texts_name_the_engine(seen: Seen):
    rules = seen.prometheus.get("rules")["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} == {"ok"}
    (alert,) = [
        alert
        for rule in rules
        if rule["name"] == "GraphcapRecordingsLost"
        for alert in rule["alerts"]
    ]
    summary = alert["annotations"]["summary"]
    assert summary.startswith(f"engine 1 on 127.0.0.1:{seen.server.port} has recordings")
    assert "stale_recording" in summary
