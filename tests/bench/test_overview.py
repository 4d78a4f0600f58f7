"""The README's short tables, and the pages on which measured sections stand."""

from __future__ import annotations

import json
import re

import overview
import pytest
import tables

RESULTS = tables.ROOT / "bench" / "results"


def cells_of(line):
    return [cell.strip() for cell in line[1:-1].split("|")]


def cells(table, start):
    (line,) = (line for line in table.splitlines() if line.startswith(start))
    return cells_of(line)


def result(name):
    return json.loads((RESULTS / name).read_text())


@pytest.fixture
def under_vllm():
    def mode(name, ms, **more):
        return {
            "mode": name,
            "batches": {"1": {"ms": ms, "tokens_per_s": 1e3 / ms}},
            "census": {"device_operations": 1000.4},
            "mixed": {"tokens_per_s": 1234.5, "ttft_p50_ms": 61.2, "ttft_p99_ms": 2000.4},
            "graph_gib": 0.375,
            "ready_s": 12.34,
            **more,
        }

    machine = {"card": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "vllm": "0.26.0"}
    modes = [mode("eager", 90.0), mode("default", 4.0), mode("graphcap", 3.0)]
    modes[2]["batches"]["8"] = {"ms": 7.0, "tokens_per_s": 1142.9}
    return {"shape": "seed-64", "machine": {**machine, "commit": "abc1234"}, "modes": modes}


@pytest.fixture
def cold():
    return {"machine": {"commit": "def5678"}, "modes": [{"mode": "graphcap", "ready_s": 27.52}]}


def test_each_mode_is_a_column_and_each_question_a_row(under_vllm, cold):
    table = overview.vllm_overview(under_vllm, cold, ("a.json", "b.json"))
    assert cells(table, "| | ") == ["", "**graphcap**", "vLLM's default (compiled)"]
    rows = {line[0]: line[1:] for line in map(cells_of, table.splitlines()) if len(line) == 3}
    assert rows["batch 1: ms a step (tokens/s)"] == ["3.00 (333)", "4.00 (250)"]
    assert rows["batch 8: ms a step (tokens/s)"] == ["7.00 (1,143)", "-"]
    assert rows["device operations a token, batch 1"] == ["1,000", "1,000"]
    assert rows["mixed load: tokens/s"] == ["1,234", "1,234"]
    assert rows["first token under it, ms: p50 / p99"] == ["61 / 2,000", "61 / 2,000"]
    assert rows["graphs, GiB"] == ["0.38", "0.38"]
    assert rows["start: weights to ready, s"] == ["12.3", "12.3"]
    assert rows["the same with cold caches, s"] == ["27.5", "-"]
    assert "`bench/results/a.json` (commit `abc1234`)" in table
    assert "`bench/results/b.json` (`def5678`)" in table


def test_the_short_table_has_the_figures_of_the_long_one():
    """Read out of the two tables, not out of the functions that both are made with."""
    run, cold = (result(name) for name in tables.VLLM_OVERVIEW)
    short = overview.vllm_overview(run, cold, tables.VLLM_OVERVIEW)
    long = tables.vllm_table(run, tables.VLLM_OVERVIEW[0])
    head = cells(long, "| mode |")
    for column, mode in enumerate(("graphcap", "default", "decode-only", "full"), 1):
        row = dict(zip(head, cells(long, f"| {tables._NAMES[mode]} |"), strict=True))
        for batch in (1, 8, 32):
            assert cells(short, f"| batch {batch}:")[column] == row[f"batch {batch}"]
        first = cells(short, "| first token")[column].replace(",", "")
        assert first == row["first token p50 / p99 ms"]
        assert cells(short, "| mixed load")[column] == row["mixed load: tokens/s"]
        assert cells(short, "| graphs")[column] == row["graphs, GiB"]
        assert cells(short, "| start")[column] == row["ready after weights, s"]


def test_the_short_tables_of_a_shape_have_the_lines_of_the_long_ones():
    for path in sorted(RESULTS.glob("speed_*.json")):
        found = json.loads(path.read_text())
        vllm = tables.vllm_best(found["shape"])
        short = overview.speed_overview(found, path.name, vllm, None)
        long = tables.speed_table(found, path.name, vllm, "x.svg")
        lines = [line for line in short.splitlines() if line.startswith("|")]
        assert len(lines) == 2 + len(found["rows"])
        assert all(line in long for line in lines)
        assert "![" not in short
        assert "](x.svg)" in overview.speed_overview(found, path.name, vllm, "x.svg")


def test_every_section_stands_on_one_page():
    text = {page: page.read_text() for page in tables.pages()}
    for section in tables.SECTIONS:
        begin, end = (f"<!-- measured {section}: {which} -->" for which in ("begin", "end"))
        places = {page.name: body.count(begin) for page, body in text.items() if begin in body}
        assert places == {"README.md" if section.endswith("overview") else "measurements.md": 1}, (
            section
        )
        assert sum(body.count(end) for body in text.values()) == 1
    found = {name for body in text.values() for name in re.findall(r"<!-- measured (.*?):", body)}
    assert found == set(tables.SECTIONS)


def test_a_picture_is_linked_from_where_the_page_lies():
    page, readme = tables.ROOT / "docs" / "measurements.md", tables.ROOT / "README.md"
    assert "](speed_seed-64_h200.svg)" in tables.measured("speed", page)
    assert "](docs/speed_seed-64_h200.svg)" in tables.measured("speed overview", readme)


def test_pages_of_docs_are_checked_too(monkeypatch, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("nothing measured\n")
    page = tmp_path / "docs" / "measurements.md"
    page.write_text("a\n<!-- measured cpu: begin -->\n<!-- measured cpu: end -->\n")
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "cpu_any.json").write_text(
        (RESULTS / "cpu_qwen3-moe.json").read_text()
    )
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["tables.py", "--check"])
    assert tables.main() == 1
    monkeypatch.setattr("sys.argv", ["tables.py"])
    assert tables.main() == 0
    assert "from `bench/results/cpu_any.json`" in page.read_text()
    monkeypatch.setattr("sys.argv", ["tables.py", "--check"])
    assert tables.main() == 0
