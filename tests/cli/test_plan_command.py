"""``graphcap plan``: what it prints, what it promises, and that the promise is kept."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from graphcap.buckets import BucketLadder
from graphcap.cli import main
from graphcap.inputs import Slot, StaticInputs
from graphcap.manager import CaptureManager
from graphcap.settings import Settings

CSV = "batch,count\n1,100\n2,50\n3,40\n7,300\n9,20\n30,200\n31,10\n64,5\n"


@pytest.fixture
def histogram(tmp_path: Path) -> str:
    path = tmp_path / "h.csv"
    path.write_text(CSV)
    return str(path)


@pytest.fixture
def report(tmp_path: Path) -> str:
    buckets = [
        {"size": size, "nbytes": mib * 2**20, "replay_ms": ms}
        for size, mib, ms in ((8, 1, 2.0), (32, 2, 2.5), (64, 10, 4.0))
    ]
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"buckets": buckets}))
    return str(path)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


def test_json_of_a_plan_in_rows(capsys, histogram: str):
    result = plan(capsys, "--histogram", histogram, "--max-graphs", "4")
    assert result["buckets"] == [3, 7, 31, 64]
    assert result["setting"] == "GRAPHCAP_BUCKETS=3,7,31,64"
    rows = 100 + 100 + 120 + 2100 + 180 + 6000 + 310 + 320
    assert result["steps"] == 725
    assert result["unit"] == "rows"
    assert result["lower_bound"] == result["rows_per_step"] == pytest.approx(rows / 725)
    assert result["padding_rows_per_step"] == pytest.approx((200 + 50 + 440 + 200) / 725)
    assert result["expected_cost"] == pytest.approx((rows + 890) / 725)
    assert set(result["default_costs"]) == {"vllm", "sglang", "powers_of_two"}
    assert result["default_costs"]["powers_of_two"] == pytest.approx(
        (rows + 40 + 300 + 140 + 400 + 10) / 725
    )
    assert result["default_costs"]["sglang"] == pytest.approx(
        (rows + 40 + 300 + 60 + 400 + 10) / 725
    )
    assert result["default_buckets"]["vllm"] == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


def test_a_plan_in_ms_and_within_memory(capsys, histogram: str, report: str):
    common = ("--histogram", histogram, "--costs", report, "--max-graphs", "5")
    result = plan(capsys, *common)
    assert result["unit"] == "ms"
    assert [point["bucket"] for point in result["cost_model"]["points"]] == [8, 32, 64]
    assert result["memory_mib"] == 10 + (len(result["buckets"]) - 1) * 2
    assert result["buckets"] == [7, 9, 30, 31, 64]  # up to 8 rows cost the same: no bucket below 7
    limited = plan(capsys, *common, "--memory-mib", "15.9")
    assert len(limited["buckets"]) == 3
    assert limited["memory_mib"] == 14
    assert limited["expected_cost"] > result["expected_cost"]
    assert limited["buckets"][-1] == 64


def test_memory_that_is_assumed_and_that_is_not_known(capsys, histogram: str):
    common = ("--histogram", histogram, "--max-graphs", "8", "--memory-mib", "0.6")
    result = plan(capsys, *common, "--mib-per-graph", "0.2")  # 0.6 / 0.2 is below 3 in floats
    assert len(result["buckets"]) == 3
    assert any("0.2 MiB for each recording were assumed" in note for note in result["notes"])
    assert "found none in" in refused(capsys, *common)
    assert "the largest bucket alone needs 2.00 MiB" in refused(
        capsys, *common, "--mib-per-graph", "2"
    )


def test_the_maximum_is_in_the_ladder_seen_or_not(capsys, histogram: str, report: str):
    common = ("--histogram", histogram, "--max-graphs", "3")
    assert plan(capsys, *common, "--max-batch", "100")["buckets"][-1] == 100
    lower = plan(capsys, *common, "--max-batch", "40")
    assert lower["buckets"][-1] == 40
    assert lower["steps_above_max_batch"] == 5
    assert any("5 steps were larger than 40" in note for note in lower["notes"])
    assert any("not told" in note for note in plan(capsys, *common)["notes"])


def test_tables_and_the_plot_of_a_terminal(capsys, histogram: str):
    assert main(["plan", "--histogram", histogram, "--max-graphs", "4"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "GRAPHCAP_BUCKETS=3,7,31,64"
    for text in ("vLLM's default", "SGLang's default", "powers of two", "lower bound", "4 to 7"):
        assert text in printed
    bars = {
        line.split("│")[2].strip(): line.count("█")
        for line in printed.splitlines()
        if "%" in line and "│" in line and "to" in line
    }
    assert bars["7"] == 32 > bars["31"] > bars["3"] > bars["64"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_figure(capsys, histogram: str, tmp_path: Path, suffix: str):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{suffix}"
    common = ("plan", "--histogram", histogram, "--max-graphs", "4", "--plot", str(path))
    assert main([*common, "--json"]) == 0
    printed = capsys.readouterr()
    json.loads(printed.out)  # nothing else in it
    assert printed.err == f"{path}: {path.stat().st_size / 1024:,.0f} KiB, the plan as a figure\n"
    assert main([*common]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "GRAPHCAP_BUCKETS=3,7,31,64"
    assert printed.err.startswith(f"{path}: ")
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in path.read_bytes()
    wrong = tmp_path / "plan.nothing"
    assert "end the name in .png or .svg" in refused(
        capsys, "--histogram", histogram, "--max-graphs", "4", "--plot", str(wrong)
    )


def test_figure_without_a_suffix_is_named_as_it_is_written(capsys, histogram: str, tmp_path: Path):
    pytest.importorskip("matplotlib")
    plot = ("--plot", str(tmp_path / "plan"))
    assert main(["plan", "--histogram", histogram, "--max-graphs", "4", *plot]) == 0
    assert capsys.readouterr().err.startswith(f"{tmp_path / 'plan.png'}: ")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_figure_without_matplotlib(capsys, histogram: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'vllm-graphcap[plot]'" in refused(
        capsys, "--histogram", histogram, "--max-graphs", "4", "--plot", "plan.png"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--max-graphs", "4"),
            "one of the arguments --histogram --from-metrics --from-report is required",
        ),
        (("--histogram", "a", "--from-report", "b"), "not allowed with argument"),
        (("--histogram", "a"), "arguments are required: --max-graphs"),
        (("--histogram", "a", "--max-graphs", "0"), "expected an integer of at least 1"),
        (
            ("--histogram", "a", "--max-graphs", "1", "--memory-mib", "-1"),
            "a positive number of MiB",
        ),
    ],
)
def test_options_that_do_not_go(capsys, arguments: tuple[str, ...], message: str):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_planning_needs_no_torch(histogram: str):
    program = (
        "import sys; from graphcap.cli import main; "
        f"main(['plan', '--histogram', {histogram!r}, '--max-graphs', '4']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_the_report_of_decode_is_a_source(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GRAPHCAP_KERNELS", "reference")
    assert main(["decode", "--tokens", "4", "--max-batch", "4", "--json"]) == 0
    path = tmp_path / "decode.json"
    path.write_text(capsys.readouterr().out)
    result = plan(capsys, "--from-report", str(path), "--max-graphs", "2")
    assert result["unit"] == "ms"
    assert result["buckets"][-1] == 4  # whether there is another is as the measured times fall
    assert len(result["buckets"]) <= 2
    assert result["lower_bound"] <= result["expected_cost"]
    assert result["steps"] == json.loads(path.read_text())["served"]["steps"]


# -- from a running step to a better ladder ------------------------------------------------------

MOST = 48


def serve(settings: Settings, sizes: list[int]) -> CaptureManager:
    """A tape that has served batches of `sizes`."""
    manager = CaptureManager(
        lambda inputs: {"y": inputs["x"] * 2},
        StaticInputs(MOST, {"x": Slot((1,), torch.float32)}, "cpu"),
        settings=settings,
    )
    manager.capture()
    batches = {size: torch.randn(size, 1) for size in set(sizes)}
    for size in sizes:
        assert torch.equal(manager.run({"x": batches[size]})["y"], batches[size] * 2)
    return manager


def arrivals(seed: int, steps: int) -> list[int]:
    """Batch sizes of a server that breathes: two humps and a tail."""
    draw = random.Random(seed)
    centres = draw.choices((5, 27, 48), (5, 4, 1), k=steps)
    return [min(MOST, max(1, round(draw.gauss(centre, 3)))) for centre in centres]


def test_measured_padding_is_what_the_plan_promised(capsys, tmp_path: Path):
    report, path = tmp_path / "report.json", tmp_path / "plan.json"
    with serve(Settings(report=report), arrivals(1, 3000)) as first:
        padding_before = first.stats().padding_rows / 3000
    command = ["plan", "--from-report", str(report), "--max-graphs", "6", "--json"]
    assert main(command) == 0
    path.write_text(capsys.readouterr().out)
    promised = json.loads(path.read_text())
    assert promised["unit"] == "ms"
    assert promised["steps"] == 3000

    # The same traffic in another order: exactly what was promised.
    again = random.Random(2).sample(arrivals(1, 3000), 3000)
    settings = Settings.from_env({"GRAPHCAP_BUCKETS": f"plan:{path}"})
    with serve(settings, again) as planned:
        assert planned.ladder == BucketLadder(promised["buckets"])
        assert len(planned.ladder) <= 6
        found = planned.stats()
    assert found.replays == 3000
    assert found.padding_rows / 3000 == pytest.approx(promised["padding_rows_per_step"])
    assert padding_before > 0


def test_new_traffic_of_the_same_kind_is_padded_as_promised(capsys, tmp_path: Path):
    histogram, path = tmp_path / "histogram.json", tmp_path / "plan.json"
    sizes = arrivals(3, 20_000)
    histogram.write_text(json.dumps([[size, sizes.count(size)] for size in sorted(set(sizes))]))
    assert main(["plan", "--histogram", str(histogram), "--max-graphs", "6", "--json"]) == 0
    path.write_text(capsys.readouterr().out)
    promised = json.loads(path.read_text())
    drawn = random.Random(4).choices(sizes, k=20_000)
    settings = Settings.from_env({"GRAPHCAP_BUCKETS": f"plan:{path}"})
    with serve(settings, drawn) as planned:
        found = planned.stats()
    assert found.replays == 20_000
    measured = found.padding_rows / found.steps
    assert measured == pytest.approx(promised["padding_rows_per_step"], rel=0.02)
    assert (found.rows + found.padding_rows) / found.steps == pytest.approx(
        promised["expected_cost"], rel=0.02
    )
    defaults = promised["default_padding_rows_per_step"]
    assert measured < defaults["powers_of_two"]
