"""The dashboard is one that Grafana takes, and shows every counter that there is."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "grafana" / "graphcap.json").read_text()
DASHBOARD = json.loads(TEXT)
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
ALERTS = (ROOT / "docs" / "prometheus" / "alerts.yml").read_text()
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()

BUILT_IN = {"__rate_interval", "__range"}
UNITS = {"percentunit", "ops", "bytes", "s", "short"}  # of Grafana's, what fits these metrics
WIDTH = 24  # columns of Grafana's grid


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bgraphcap_\w+", text))


def test_dashboard_fields():
    assert 36 <= DASHBOARD["schemaVersion"] <= 41  # Grafana 9 to 12 migrate from these
    assert DASHBOARD["id"] is None  # else importing it would replace somebody's dashboard
    assert DASHBOARD["uid"] == "graphcap"
    assert DASHBOARD["title"]
    assert DASHBOARD["time"] == {"from": "now-1h", "to": "now"}
    assert json.dumps(DASHBOARD, indent=2, ensure_ascii=False) + "\n" == TEXT


def test_every_panel_is_complete():
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert len({panel["title"] for panel in PANELS}) > 10
    for panel in PANELS:
        assert panel["type"] in {"stat", "timeseries", "bargauge"}
        assert panel["title"][0].isupper()
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["fieldConfig"]["overrides"] == []
        references = [target["refId"] for target in panel["targets"]]
        assert references == list("ABCDEF"[: len(references)])
        for target in panel["targets"]:
            assert target["legendFormat"]
            assert target.get("instant", False) != target.get("range", False)
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                by = re.match(r"(?:topk\(20, )?(?:sum|max) by \((.*?)\)", target["expr"])
                assert by is not None
                assert label in by[1].split(", ")  # a label that is not there shows as nothing
        steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
        assert not steps or steps[0]["value"] is None


def test_panels_do_not_overlap():
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] >= 0 < place["w"]
        assert place["x"] + place["w"] <= WIDTH
    for one, other in combinations([panel["gridPos"] for panel in PANELS], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below


def test_data_come_from_the_chosen_source():
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    variables = DASHBOARD["templating"]["list"]
    assert [variable["name"] for variable in variables] == [
        "datasource",
        "job",
        "instance",
        "engine",
    ]
    assert variables[0]["type"] == "datasource"
    assert variables[0]["query"] == "prometheus"
    for holder in (*variables[1:], *PANELS, *(t for panel in PANELS for t in panel["targets"])):
        assert holder["datasource"] == chosen
    used = set(re.findall(r"\$\{?(\w+)", " ".join(EXPRESSIONS)))
    assert used == {"job", "instance", "engine"} | BUILT_IN


def test_metrics_are_those_of_the_collector():
    """By name, as docs/metrics.md lists them; and none is missing from the dashboard."""
    pytest.importorskip("prometheus_client", reason="needs the extra `metrics`")
    from graphcap.hosts.vllm.metrics import GraphcapCollector

    ends = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    shown = {
        metric.name + end for metric in GraphcapCollector().describe() for end in ends[metric.type]
    }
    planned_from = {"graphcap_bucket_bytes", "graphcap_bucket_replay_seconds"}  # by graphcap plan
    assert names_in(" ".join(EXPRESSIONS)) == shown - planned_from
    assert names_in(ALERTS) <= shown
    variables = " ".join(v["definition"] for v in DASHBOARD["templating"]["list"][1:])
    assert names_in(variables) <= shown


def test_every_query_takes_one_rank_of_an_engine():
    for expression in EXPRESSIONS:
        for name in names_in(expression):
            before = expression[: expression.index(name)]
            by = re.findall(r"(?:max|sum) by \(([^)]*)\)", before)[-1].split(", ")
            assert "engine" in by
        assert expression.count("(") == expression.count(")")


def test_alerts_name_reasons_that_there_are():
    table = TROUBLES.split("\n### fallback\n")[1].split("\n#")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    named = {name for group in re.findall(r'reason=~"(.*?)"', ALERTS) for name in group.split("|")}
    assert named <= listed
    # What a server may do in its course; the rest are recordings that are lost.
    assert listed - named == {
        "above_max_batch",
        "mixed_above_max_tokens",
        "cascade_attention",
        "long_sequence",
    }
