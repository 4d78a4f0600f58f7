"""``graphcap report``: where the page goes, and what is not a report."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphcap.cli import main

pytest.importorskip("matplotlib", reason="the page's charts need matplotlib: the extra `plot`")

Report = dict[str, Any]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["report", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("graphcap: error: ")
    assert printed.err.count("\n") == 1
    assert len(printed.err) < 600
    return printed.err


def test_the_page_is_written_where_it_is_asked_for(decoded: Report, tmp_path: Path, capsys):
    run, out = tmp_path / "run.json", tmp_path / "page.html"
    run.write_text(json.dumps(decoded))
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    html = out.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert "tiny, batch 3 on" in html
    assert "from run.json" in html


def test_report_html_is_the_default(captured: Report, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(json.dumps(captured))
    assert main(["report", "run.json"]) == 0
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".html"] == ["report.html"]


def test_standard_input(decoded: Report, tmp_path: Path, monkeypatch):
    content = io.BytesIO(json.dumps(decoded).encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(content))
    assert main(["report", "-", "--out", str(tmp_path / "page.html")]) == 0
    assert "from standard input" in (tmp_path / "page.html").read_text()


def test_the_whole_way_from_a_shell(tmp_path: Path):
    decode = [
        sys.executable,
        "-m",
        "graphcap",
        "decode",
        "--json",
        "--tokens",
        "2",
        "--layers",
        "1",
    ]
    run = subprocess.run(decode, capture_output=True, check=True)
    report = [sys.executable, "-m", "graphcap", "report", "-", "--out", "page.html"]
    made = subprocess.run(report, input=run.stdout, capture_output=True, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "page.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "none (Expecting value"),
        (b"{", "none (Expecting"),
        (b"\xff\xfe\xfa", "none ("),
        (b"[" * 100_000, "none ("),
        (b"[1, 2]", "found a list of 2"),
        (b"null", "found None"),
        (b'"text"', "found 'text'"),
        (b"{}", "found an object with nothing in it"),
        (b'{"machine": {}, "variables": []}', "'machine', 'variables'"),
        (b'{"a": ' + b"9" * 5000 + b"}", "none (Exceeds the limit"),
    ],
)
def test_what_is_no_report(tmp_path: Path, capsys, content: bytes, found: str):
    run = tmp_path / "run.json"
    run.write_bytes(content)
    error = refusal(capsys, str(run), "--out", str(tmp_path / "page.html"))
    assert "run.json: expected" in error
    assert found in error
    assert "graphcap decode --json > run.json" in error
    assert not (tmp_path / "page.html").exists()


def changed(report: Report, path: str, value: Any) -> Report:
    """A copy with `value` at ``a.b.0.c``; ``...`` takes what is there away."""
    report = copy.deepcopy(report)
    *outer, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    inner: Any = report
    for step in outer:
        inner = inner[step]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return report


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [
        ("decoded", "buckets", ..., "expected an object with 'buckets'"),
        ("decoded", "buckets", {}, "buckets: expected a list, found an object"),
        (
            "decoded",
            "buckets.1.nodes",
            "many",
            "buckets[1].nodes: expected an integer, found 'many'",
        ),
        ("decoded", "buckets.1.nodes", True, "buckets[1].nodes: expected an integer, found True"),
        ("decoded", "buckets.0.size", 0, "buckets[0].size: expected a size of at least 1, found 0"),
        ("decoded", "buckets.0.mib", -1, "buckets[0].mib: expected an integer of at least 0"),
        ("decoded", "buckets.0.capture_ms", float("nan"), "capture_ms: expected a finite number"),
        ("decoded", "buckets.0.capture_ms", float("inf"), "capture_ms: expected a finite number"),
        ("decoded", "buckets.0.replays", 10**30, "replays: expected an integer of at least 0 that"),
        ("decoded", "buckets.0.replays", 1.5, "replays: expected an integer, found 1.5"),
        ("decoded", "shape", 7, "shape: expected text, found 7"),
        ("decoded", "outputs_equal", "yes", "outputs_equal: expected true or false, found 'yes'"),
        ("decoded", "census.rows.0.count", None, "census.rows[0].count: expected an integer"),
        ("decoded", "fallbacks", [], "fallbacks: expected an object, found a list of 0"),
        (
            "decoded",
            "pool_layout.buffers.0.spans",
            [[5, 1]],
            "spans[0]: expected the first and last",
        ),
        (
            "decoded",
            "pool_layout.buffers.0.spans",
            [[0, 10**9]],
            "spans[0]: expected the first and",
        ),
        ("decoded", "timeline.eager.host.operations", [[99, 0, 1]], "the index of one of"),
        ("decoded", "timeline.eager.host.operations", [[0, 0]], "a name's index, a start and a le"),
        ("captured", "device", ..., "expected an object with 'device'"),
        ("captured", "buckets.0.nbytes", "2 MiB", "buckets[0].nbytes: expected an integer"),
        ("plugged", "managers", {}, "managers: expected an object with 'decode'"),
        ("plugged", "managers.other", {}, "managers: expected an object with 'decode'"),
        ("plugged", "managers.decode.failures", 3, "managers.decode.failures: expected an object"),
        ("plugged", "choice.mixed", None, "choice.mixed: expected text, found None"),
    ],
)
def test_a_wrong_field_is_named(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys,
    kind: str,
    path: str,
    value: Any,
    message: str,
):
    run = tmp_path / "run.json"
    run.write_text(json.dumps(changed(request.getfixturevalue(kind), path, value)))
    error = refusal(capsys, str(run), "--out", str(tmp_path / "page.html"))
    assert message in error
    assert "graphcap decode --json > run.json" in error
    assert not (tmp_path / "page.html").exists()


def test_a_file_that_is_not_there(tmp_path: Path, capsys):
    error = refusal(capsys, str(tmp_path / "none.json"))
    assert "none.json: expected a report that can be read, found: No such file" in error
    assert "Is a directory" in refusal(capsys, str(tmp_path))


def test_a_page_that_cannot_be_written(captured: Report, tmp_path: Path, capsys):
    run = tmp_path / "run.json"
    run.write_text(json.dumps(captured))
    error = refusal(capsys, str(run), "--out", str(tmp_path / "no" / "page.html"))
    assert "--out" in error
    assert "No such file or directory; give another" in error


def test_the_report_is_not_written_over(captured: Report, tmp_path: Path, capsys):
    run = tmp_path / "run.json"
    run.write_text(json.dumps(captured))
    assert "is the report itself" in refusal(capsys, str(run), "--out", str(run))
    assert json.loads(run.read_text()) == captured


def test_without_matplotlib_the_extra_is_named(
    captured: Report, tmp_path: Path, capsys, monkeypatch
):
    run = tmp_path / "run.json"
    run.write_text(json.dumps(captured))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'vllm-graphcap[plot]'" in refusal(capsys, str(run))
