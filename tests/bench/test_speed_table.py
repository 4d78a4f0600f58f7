"""The README's table and the plot of a result of bench/speed.py."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest
import speed_plot
import speed_table
import tables

SVG = "{http://www.w3.org/2000/svg}"
VLLM = {1: 4.36, 8: 9.98, 32: 19.45}


def way(ms, batch, floor, **facts):
    return {
        "ms": ms,
        "timed": 45,
        "tokens_per_s": batch / ms * 1e3,
        "tb_s": 4.6 * floor / ms,
        "of_floor": floor / ms,
        "host_us": 12.4,
        "operations": 1097,
        "launches": 1,
        "allocations": 0,
        "graph_mib": 2.0,
        "capture_ms": 140.2,
        **facts,
    }


def row(batch, floor, context=256, **ms):
    names = {
        "eager": "eager",
        "torch": "torch graph",
        "plain": "graphcap plain",
        "ours": "graphcap",
    }
    ways = {names[key]: way(value, batch, floor) for key, value in ms.items()}
    ways["eager"]["timed"] = 18
    return {"batch": batch, "context": context, "floor_ms": floor, "ways": ways}


@pytest.fixture
def result():
    found = {
        "shape": "seed-64",
        "layers": 64,
        "dtype": "bfloat16",
        "context": 256,
        "weights_gib": 98.35,
        "read_tb_s": 4.63,
        "machine": {
            "card": "NVIDIA H200",
            "driver": "580.1",
            "torch": "2.11.0",
            "triton": "3.6.0",
            "commit": "abc1234",
        },
        "tokens": {
            "compared": 512,
            "equal": 508,
            "reference": "plain torch in float32",
            "largest_lead": 0.031,
            "lead_allowed": 0.4,
            "error": 0.011,
            "plain_error": 0.012,
        },
        "many": [{"batch": 1, "tokens": 32, "loop": True, "host_us_per_call": 41.6, "ms": 1.71}],
        "left_out": ["batch 64: no time left", "bucket 32: a replay differs; mask its rows"],
        "rows": [
            row(1, 1.1, eager=44.8, torch=7.0, plain=3.4, ours=1.75),
            row(8, 5.6, eager=80.0, torch=14.0, plain=8.2, ours=6.65),
            row(16, 8.9, eager=80.0, torch=18.0, plain=12.0),
            row(1, 1.2, context=4096, eager=45.0, torch=7.5, plain=4.0, ours=2.0),
        ],
    }
    compiled = way(6.5, 1, 1.1, unit="step", compile_s=93.2, host_us=None, graph_mib=-382.0)
    found["rows"][0]["ways"]["torch.compile"] = compiled
    return found


def cells(table, start):
    (line,) = (line for line in table.splitlines() if line.startswith(start))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_is_joined_with_the_best_of_vllm(result):
    table = speed_table.speed_table(result, "speed_seed-64_h200.json", VLLM, "docs/speed.svg")
    head = cells(table, "| batch | floor")
    one = dict(zip(head, cells(table, "| 1 | 1.10 "), strict=True))
    assert one == {
        "batch": "1",
        "floor": "1.10",
        "eager": "44.80",
        "plain torch in a CUDA graph": "7.00",
        "torch.compile": "6.50",
        "graphcap, plain schedule": "3.40",
        "**graphcap**": "**1.75**",
        "tokens/s": "571",
        "of the floor": "63%",
        "vLLM's best": "4.36",
        "speed-up over it": "2.49",
    }
    eight = dict(zip(head, cells(table, "| 8 | 5.60 "), strict=True))
    assert (eight["torch.compile"], eight["speed-up over it"]) == ("-", "1.50")


def test_what_was_not_measured_is_a_dash(result):
    table = speed_table.speed_table(result, "speed_seed-64_h200.json", VLLM, "docs/speed.svg")
    head = cells(table, "| batch | floor")
    lost = dict(zip(head, cells(table, "| 16 | 8.90 "), strict=True))
    assert [lost[n] for n in ("**graphcap**", "tokens/s", "vLLM's best")] == ["-", "-", "-"]
    # vLLM's figures are not of so long a context.
    far = dict(zip(head, cells(table, "| 1, context 4,096 |"), strict=True))
    assert (far["**graphcap**"], far["vLLM's best"]) == ("**2.00**", "-")
    assert "Left out: batch 64: no time left; bucket 32: a replay differs." in table


def test_a_shape_without_figures_of_vllm_has_no_columns_for_them(result):
    table = speed_table.speed_table(result, "speed_seed-64_h200.json", {}, "docs/speed.svg")
    assert cells(table, "| batch | floor")[-1] == "of the floor"
    assert cells(table, "| 1 | 1.10 ")[-1] == "63%"
    assert "vLLM" not in table


def test_every_column_of_every_way_is_there(result):
    table = speed_table.speed_table(result, "speed_seed-64_h200.json", VLLM, "docs/speed.svg")
    assert cells(table, "| 8 | 256 | **graphcap** |") == [
        *("8", "256", "**graphcap**", "6.65", "1,203", "1,097", "1", "0"),
        *("3.87", "84%", "12", "2.0", "140"),
    ]
    compiled = cells(table, "| 1 | 256 | torch.compile |")
    assert (compiled[10], compiled[11]) == ("-", "-"), "memory that was given back tells nothing"
    widths = {line.count("|") for line in table.split("<details>")[1].splitlines() if "|" in line}
    assert len(widths) == 1


def test_text_says_what_was_checked(result):
    table = speed_table.speed_table(result, "speed_seed-64_h200.json", VLLM, "docs/speed.svg")
    for said in (
        "commit `abc1234`, from `bench/results/speed_seed-64_h200.json`",
        "medians of at least 45 tokens (eager: 18)",
        "508 of 512 greedy tokens",
        "leads by at most 0.031 (rounding alone explains 0.4)",
        "costs the host 42 µs a call (one launch) and 1.71 ms a step",
        "by the step, took up to 93 s a batch",
        "![seed-64: milliseconds a token against batch](docs/speed.svg)",
        "the fastest of its own modes in another run",
    ):
        assert said in table


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {
                "host_calls": 203,
                "host_us_least": 11.4,
                "host_us_after_idle": 30.2,
                "host_us_behind_steps": 51.3,
            },
            "costs the host 42 µs a call (one launch; median of 203 calls, least 11, 30 after idle, "
            "51 behind a call with all its steps) and",
        ),
        (
            {
                "host_calls": 9,
                "host_us_least": 40.0,
                "host_us_after_idle": None,
                "host_waits": True,
            },
            "(one launch; median of 9 calls, least 40; with a queue of whole calls the host waits for",
        ),
    ],
)
def test_text_says_what_is_known_of_the_hosts_part(result, more, said):
    """Without it: a result of before, as in the other tests."""
    result["many"][0].update(more)
    assert said in speed_table.speed_table(result, "speed.json", {}, "docs/speed.svg")


def test_the_best_of_vllm_is_of_its_own_modes_on_one_card():
    best = tables.vllm_best("seed-64")
    assert sorted(best) == [1, 8, 32]
    assert (round(best[1], 2), round(best[8], 2), round(best[32], 2)) == (4.38, 10.0, 19.72)
    assert tables.vllm_best("another") == {}


def test_no_mode_of_graphcap_is_taken_for_one_of_vllm(monkeypatch, tmp_path):
    (tmp_path / "bench" / "results").mkdir(parents=True)
    modes = [
        {"mode": name, "batches": {"1": {"ms": ms}}}
        for name, ms in (("graphcap", 1.0), ("tape", 2.0), ("tape-vllm", 3.0), ("eager", 4.0))
    ]
    result = {"shape": "seed-64", "tp": 1, "modes": modes}
    (tmp_path / "bench" / "results" / "vllm_any.json").write_text(json.dumps(result))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.vllm_best("seed-64") == {1: 4.0}


def points(svg, series):
    root = ElementTree.fromstring(svg)
    found = [c for c in root.iter(f"{SVG}circle") if c.get("class") == f"dot way-{series}"]
    return [(float(c.get("cx")), float(c.get("cy")), c.find(f"{SVG}title").text) for c in found]


def test_the_plot_has_every_series_where_it_belongs(result):
    svg = speed_plot.plot(result, VLLM)
    assert [title for _, _, title in points(svg, "graphcap")] == [
        "graphcap, batch 1: 1.75 ms",
        "graphcap, batch 8: 6.65 ms",
    ]
    assert [title for _, _, title in points(svg, "vllm")] == [
        "vLLM's best, batch 1: 4.36 ms",
        "vLLM's best, batch 8: 9.98 ms",
    ]
    floor, eager = points(svg, "floor"), points(svg, "eager")
    assert len(floor) == len(eager) == 3, "the row of the long context is not in it"
    assert all(f[1] > e[1] for f, e in zip(floor, eager, strict=True)), "less time is lower"
    # Both axes are logarithmic: 1 to 8 is three times as far as 8 to 16; heights go by ratios.
    (x1, y1, _), (x8, y8, _), (x16, y16, _) = floor
    assert (x8 - x1) / (x16 - x8) == pytest.approx(3, rel=0.01)
    assert all(60 <= x <= 700 and 74 <= y <= 382 for x, y, _ in (*floor, *eager))
    (_, torch1, _), (_, torch8, _), _ = points(svg, "torch-graph")
    assert y1 > y8 > y16
    assert torch1 - torch8 == pytest.approx((y1 - y8) * 0.4261, rel=0.02)  # log 2 : log(5.6 / 1.1)


def test_the_plot_is_readable_in_light_and_dark(result):
    svg = speed_plot.plot(result, VLLM)
    assert svg == speed_plot.plot(result, VLLM)
    style = re.search("<style>(.*)</style>", svg)[1]
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    for name in speed_plot.WAYS:
        assert f".{speed_plot._class(name)}{{stroke:" in light
        assert f".{speed_plot._class(name)}{{stroke:" in dark
    for part, paper in ((light, "#fff"), (dark, "#0d1117")):
        assert f".paper{{fill:{paper}}}" in part
        for ink in re.findall(r"stroke:(#[0-9a-f]{6});--c", part) + re.findall(
            r"text{[^}]*fill:(#[0-9a-f]+)", part
        ):
            assert contrast(ink, paper) > 3


def contrast(first, second):
    """Of two colours, as WCAG 2 has it."""

    def luminance(colour):
        digits = colour[1:] if len(colour) == 7 else "".join(2 * d for d in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_plots_are_what_the_files_say(monkeypatch, tmp_path, result):
    """A plot that is missing or old is found by --check, and written without it."""
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- measured speed: begin -->\nold\n<!-- measured speed: end -->\nb\n")
    written = tmp_path / "bench" / "results" / "speed_seed-64_h200.json"
    written.write_text(json.dumps(result))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["tables.py", "--check"])
    assert tables.main() == 1
    monkeypatch.setattr("sys.argv", ["tables.py"])
    assert tables.main() == 0
    monkeypatch.setattr("sys.argv", ["tables.py", "--check"])
    assert tables.main() == 0
    assert "docs/speed_seed-64_h200.svg" in readme.read_text()
    assert readme.read_text().startswith("a\n<!-- measured speed: begin -->\nShape `seed-64`")
    picture = tmp_path / "docs" / "speed_seed-64_h200.svg"
    picture.write_text(picture.read_text() + " ")
    assert tables.main() == 1
