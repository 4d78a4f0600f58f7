"""What is on the page: the figures of the report, and nothing that fetches or runs."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from html_reading import Page

pytest.importorskip("matplotlib", reason="the page's charts need matplotlib: the extra `plot`")

from graphcap.analysis import ANALYSIS
from graphcap.page.document import page
from graphcap.page.reading import read_run

Report = dict[str, Any]


def drawn(report: Report) -> str:
    return page(read_run(json.dumps(report).encode(), "run.json"))


def read(report: Report) -> Page:
    return Page(drawn(report))


@pytest.fixture(params=["decoded", "captured", "plugged"])
def report(request: pytest.FixtureRequest) -> Report:
    return request.getfixturevalue(request.param)


def test_it_is_one_file_that_fetches_and_runs_nothing(report: Report):
    html = drawn(report)
    found = Page(html)
    assert found.unclosed == []
    assert not {"script", "iframe", "object", "embed", "img", "form", "base"} & {
        tag for tag, _ in found.elements
    }
    for _, attributes in found.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        for name in ("href", "xlink:href"):
            assert attributes.get(name, "#").startswith(("#", "data:,"))
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\"' )]*", html)) <= namespaces
    policy = next(a for t, a in found.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"].startswith("default-src 'none'")
    assert len(html) < 1_000_000


def test_ids_are_unique_and_references_meet_one(report: Report):
    html = drawn(report)
    ids = Page(html).ids
    assert len(ids) == len(set(ids)) > 10
    assert set(re.findall(r"url\(#([^)]*)\)|href=\"#([^\"]*)\"", html)) <= {
        pair for one in ids for pair in ((one, ""), ("", one))
    }


def test_the_same_report_gives_the_same_page(report: Report):
    assert drawn(report) == drawn(report)


def test_no_placeholder_colour_is_left(report: Report):
    assert not re.search(r"#0[0-8]0[0-8]0\w", drawn(report))


# -- figures -------------------------------------------------------------------------------------


def test_per_token(decoded: Report):
    found = read(decoded)
    rows = {row[0]: row[1:] for row in found.tables["Per token"][0]}
    assert rows["per token"] == ["eager", "replay (tape)"]
    assert rows["launches"] == [str(decoded["eager"]["launches_per_token"]), "1"]
    assert rows["allocations"] == [str(decoded["eager"]["allocations_per_token"]), "0"]
    assert rows["ms"] == [f"{decoded[way]['ms_per_token']:.2f}" for way in ("eager", "replay")]
    header = found.text[""]
    assert f"launches per token{decoded['eager']['launches_per_token']} → 1" in header
    assert "tokens of both waysequal" in header
    assert "641" in found.text["Per token"]


def test_the_launch_table_beside_the_analysis(decoded: Report):
    (table,) = read(decoded).tables["Launches by operation"]
    assert table[0] == ["operation", "this run", "original analysis", "per layer here", "there"]
    rows = {row[0].split(" torch")[0]: row[1:] for row in table[1:]}
    counted = {row["operation"]: row["count"] for row in decoded["census"]["rows"]}
    for name, count in counted.items():
        theirs = str(ANALYSIS[name]) if name in ANALYSIS else "-"
        assert rows[name][:2] == [str(count), theirs]
        assert rows[name][2] == f"{count / 4:.2f}"
    assert rows["rms_norm"] == ["9", "128", "2.25", "2.00"]
    assert rows["total"][:2] == [str(decoded["census"]["total"]), "641"]
    assert rows["allocations, eager"][:2] == [str(decoded["eager"]["allocations_per_token"]), "192"]


def test_operators_of_a_host_stand_beside_the_analysis(plugged: Report):
    changed = copy.deepcopy(plugged)
    census = changed["managers"]["decode"]["census"]
    census["rows"] = [
        {"operation": name, "implementation": "torch", "count": count, "nodes": count}
        for name, count in (
            ("_C.rms_norm.default", 129),
            ("_C.fused_add_rms_norm.default", 64),
            ("vllm.unified_attention_with_output.default", 64),
            ("_moe_C.topk_softmax.default", 64),
            ("aten.mm.default", 7),
        )
    ]
    census["total"] = 328
    table = read(changed).tables["Launches by operation"][0]
    assert table[0] == ["operation", "this run", "graph nodes", "original analysis"]
    rows = {row[0].split(" ")[0]: row[1:] for row in table[1:]}
    assert rows["rms_norm"] == ["129", "129", "128"]
    assert rows["attention"] == ["64", "64", "1"]
    assert rows["topk_softmax"] == ["64", "64", "64"]
    assert rows["merge"] == ["0", "-", "64"]
    assert rows["aten.mm.default"] == ["7", "7", "-"]
    assert rows["total"] == ["328", "328", "641"]


def test_buckets(decoded: Report):
    (table,) = read(decoded).tables["Buckets"]
    assert table[0] == [
        *("bucket", "nodes", "MiB", "capture ms"),
        *("replay ms", "replays", "padding rows"),
    ]
    for row, bucket in zip(table[1:], decoded["buckets"], strict=False):
        assert row[0] == str(bucket["size"])
        assert row[1] == str(bucket["nodes"])
        assert row[3] == f"{bucket['capture_ms']:.1f}"
        assert float(row[4]) == pytest.approx(bucket["replay_ms"], abs=0.006)
        assert row[5] == str(bucket["replays"])
        assert row[6].split()[0] == str(bucket["padding_rows"])
    four = next(row for row in table if row[0] == "4")
    assert four[6].endswith("25%")  # three sequences in a bucket of four
    assert table[-1][5] == str(sum(bucket["replays"] for bucket in decoded["buckets"]))


def test_the_pool_and_its_buffers(captured: Report):
    found = read(captured)
    table = found.tables["Pool"][0]
    assert [row[0] for row in table[1:]] == [
        buffer["name"] for buffer in captured["pool_layout"]["buffers"]
    ]
    by_name = {row[0]: row[1:] for row in table}
    out = next(b for b in captured["pool_layout"]["buffers"] if b["name"] == "out")
    assert by_name["out"][2:] == [f"{out['spans'][0][0]} to {out['spans'][0][1]}", "1"]
    titles = [
        attributes["id"]
        for _, attributes in found.elements
        if "buffer-" in attributes.get("id", "")
    ]
    assert len(titles) == 2 * len(captured["pool_layout"]["buffers"])  # wide and narrow


def test_the_timeline_sums_what_ran(decoded: Report):
    (table,) = read(decoded).tables["Timeline of one step"]
    assert table[0] == ["operation", "calls", "eager µs", "replay µs"]
    rows = {row[0]: row[1:] for row in table}
    assert rows["attention"][0] == "4"
    assert rows["padding"][0] == "0 / 1"
    for column, way in ((1, "eager"), (2, "replay")):
        timeline = decoded["timeline"][way]
        lane = timeline["host"]
        index = lane["names"].index("attention")
        sum_ = sum(us for name, _, us in lane["operations"] if name == index)
        assert rows["attention"][column] == f"{sum_:,.1f}"
        assert rows["step"][column] == f"{timeline['us']:,.1f}"
        between = timeline["us"] - sum(us for _, _, us in lane["operations"])
        assert rows["between operations"][column] == f"{between:,.1f}"


def test_fallbacks_and_failures(decoded: Report, plugged: Report):
    assert "No step ran eagerly" in read(decoded).text["Fallbacks"]
    changed = copy.deepcopy(decoded)
    changed["fallbacks"] = {"above_max_batch": 3, "unheard_of": 1200}
    changed["failures"] = {"8": "bucket 8: aten.nonzero reads the device"}
    fallbacks, failures = read(changed).tables["Fallbacks"]
    assert fallbacks[1] == ["unheard_of", "see the log", "1,200"]
    assert fallbacks[2][0::2] == ["above_max_batch", "3"]
    assert "raise the maximum batch" in fallbacks[2][1]
    assert failures[1] == ["8", "bucket 8: aten.nonzero reads the device"]
    (table,) = read(plugged).tables["Fallbacks"]
    assert table[1][0::2] == ["cascade_attention", "2"]


def test_a_plugin_report(plugged: Report):
    found = read(plugged)
    assert "vLLM 0.99.0 on cpu" in found.text[""]
    decode, mixed = found.tables["Buckets"]
    assert [row[0] for row in decode] == ["bucket", "1", "2", "4", "8", "all"]
    assert [row[0] for row in mixed] == ["bucket", "8", "16", "all"]
    assert "Not in this report: replays" in found.text["Buckets"]
    assert "Not in this report" in found.text["Timeline of one step"]
    assert "a note of the engine" in found.text["Run"]
    assert ["MoE layers", "2 layers: pooled"] in found.tables["Run"][0]


@pytest.mark.parametrize("kind", ["captured", "plugged"])
def test_what_was_served_until_the_end(request: pytest.FixtureRequest, kind: str):
    report = copy.deepcopy(request.getfixturevalue(kind))
    report["served"] = {
        "steps": 1012,
        "batches": {"3": 1000, "40": 12},
        "buckets": [{"size": 4, "replays": 1000, "padding_rows": 1000}],
        "fallbacks": {"above_max_batch": 12},
    }
    manager = report["managers"]["decode"] if kind == "plugged" else report
    for bucket in manager["buckets"]:
        bucket["replay_ms"] = None
    manager["buckets"][2]["replay_ms"] = 3.875
    found = read(report)
    table = found.tables["Buckets"][0]
    assert table[0][4:] == ["replay ms", "replays", "padding rows"]
    assert table[3][4:] == ["3.88", "1,000", "1,000 25%"]
    assert table[1][4:] == ["-", "0", "0"]
    assert found.tables["Fallbacks"][0][1][0::2] == ["above_max_batch", "12"]
    assert len(found.tables["Fallbacks"][0]) == 2


def test_unequal_tokens_are_shouted(decoded: Report):
    assert "NOT EQUAL" in read({**decoded, "outputs_equal": False}).text[""]


# -- what is missing -----------------------------------------------------------------------------


def test_a_decode_report_of_before_pages_were_drawn(decoded: Report):
    old = copy.deepcopy(decoded)
    for name in ("census", "pool_layout", "timeline", "versions", "capture_seconds"):
        del old[name]
    for bucket in old["buckets"]:
        del bucket["padding_rows"], bucket["largest_difference"], bucket["replay_ms"]
    found = read(old)
    for section in ("Launches by operation", "Pool", "Timeline of one step"):
        assert "Not in this report" in found.text[section]
    assert found.tables["Buckets"][0][1][4:] == [str(old["buckets"][0]["replays"]), "-"]


def test_a_batch_that_no_recording_serves(decoded: Report):
    changed = copy.deepcopy(decoded)
    changed.update(bucket=None, census=None)
    changed["timeline"]["replay"] = None
    found = read(changed)
    assert found.tables["Per token"][0][0][2] == "eager fallback"
    assert "no recording serves this batch" in found.text["Timeline of one step"]
    assert "no recording serves it" in found.text["Run"]


def test_nothing_is_recorded(captured: Report):
    nothing = copy.deepcopy(captured)
    nothing.update(buckets=[], census=None, failures={"4": "why", "8": "why"})
    found = read(nothing)
    assert "0 of 2" in found.text[""]
    assert "no bucket is recorded" in found.text["Buckets"]
    assert len(found.tables["Fallbacks"][0]) == 3


def test_a_pool_that_no_step_takes_from(captured: Report):
    found = read({**captured, "pool_bytes": 0, "pool_layout": {"events": 0, "buffers": []}})
    assert "Not in this report" in found.text["Pool"]
