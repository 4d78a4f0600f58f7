"""Footguns of reports: cases 24 and 25 and their kin."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import CPU, WIDTH, double, floats, manager_of

from graphcap import cli
from graphcap.errors import CaptureError, FallbackError, SettingsError
from graphcap.pool import BufferPool
from graphcap.recorders.probe import CaptureProbe
from graphcap.recorders.select import select_recorder
from graphcap.settings import Settings

F32 = torch.float32


def fails(inputs: Any) -> Any:
    """Twice the input; cannot be recorded in bucket 2."""
    if inputs["x"].shape[0] == 2:
        inputs["x"].sum().item()
    return double(inputs)


# -- 24 ------------------------------------------------------------------------------------------


def test_24_the_memory_of_each_bucket_was_measured():
    """Elsewhere: an estimate, the first graph times their number, was off by tens of GiB.
    Here: what is reported was measured for each bucket; what is assumed says so."""

    def step(inputs: Any) -> Any:
        rows = inputs["x"].shape[0]
        wide = inputs["x"].new_zeros(rows, 1 << (16 if rows == 2 else 10))
        return {"y": inputs["x"] * 2 + wide[:, :1]}

    report = manager_of(step, buckets=(1, 2)).capture()
    measured = {bucket.size: bucket.nbytes for bucket in report.buckets}
    most = {size: size * 4 << (16 if size == 2 else 10) for size in (1, 2, 4)}
    for size, nbytes in measured.items():
        assert most[size] <= nbytes <= most[size] + 1024
    assert report.graph_bytes == sum(measured.values())
    assert report.graph_bytes != 3 * measured[4]


def test_24_kin_the_pool_beside_its_lower_bound():
    """Kin: the pool, given with the bound that no plan can go below."""
    pool = BufferPool(CPU)

    def step(inputs: Any) -> Any:
        rows = inputs["x"].shape[0]
        for name in ("first", "second"):
            pool.take(name, (rows, 1000), F32).zero_()
            pool.release(name)
        return double(inputs)

    report = manager_of(step, pool=pool).capture()
    assert report.pool_bytes == pool.arena.nbytes
    assert 4 * 1000 * 4 <= report.pool_lower_bound_bytes <= report.pool_bytes < 2 * 4 * 1000 * 4


def test_24_kin_what_was_not_measured_is_none(tmp_path: Path):
    """Kin: a figure that was not measured: it is None, in the file too."""
    path = tmp_path / "report.json"
    report = manager_of(settings=Settings(verify="off", report=path)).capture()
    for bucket in report.buckets:
        assert bucket.replay_ms is None
        assert bucket.largest_difference is None
    for bucket in json.loads(path.read_text())["buckets"]:
        assert (bucket["replay_ms"], bucket["largest_difference"]) == (None, None)


def test_24_kin_a_plan_says_what_its_memory_is_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Kin: `graphcap plan`: memory is measured, or said to be assumed."""
    traffic = tmp_path / "traffic.csv"
    traffic.write_text("batch,count\n1,10\n3,5\n")
    command = ["plan", "--histogram", str(traffic), "--max-batch", "4", "--max-graphs", "4"]
    assert cli.main([*command, "--memory-mib", "10", "--mib-per-graph", "2", "--json"]) == 0
    assert "were assumed" in capsys.readouterr().out
    assert cli.main([*command, "--memory-mib", "10"]) == 2
    assert "expected a source that tells the MiB of buckets" in capsys.readouterr().err


# -- 25 ------------------------------------------------------------------------------------------


def doctor(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["doctor", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_25_a_failed_capture_is_told_of_everywhere(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Elsewhere: capture failed at start-up with a line at DEBUG, and users ran eagerly for weeks.
    Here: one WARNING with the reason, also in `stats()`, the report and `doctor`; an error with strict."""
    path = tmp_path / "report.json"
    caplog.set_level(logging.DEBUG, "graphcap")
    manager = manager_of(fails, buckets=(1, 2), settings=Settings(report=path))
    report = manager.capture()
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    reason = ".item()"
    assert warning.startswith("1 of 3 buckets (2) are not recorded and run eagerly: ")
    assert warning.endswith("(graphcap explain capture)")
    monkeypatch.setenv("GRAPHCAP_REPORT", str(path))
    (line,) = doctor(capsys)["warnings"]
    assert "did not record 1 of 3 buckets (2)" in line
    for told in (warning, report.failures[2], manager.stats().failures[2], line):
        assert reason in told
        assert "test_footgun_reports.py" in told
    with pytest.raises(CaptureError, match=r"\.item\(\)"):
        manager_of(fails, settings=Settings(strict=True)).capture()


def test_25_kin_doctor_tells_of_eager_steps_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Kin: eager steps since: in `stats()`, in the report at the end, and so in `doctor`."""
    path = tmp_path / "report.json"
    monkeypatch.setenv("GRAPHCAP_REPORT", str(path))
    assert doctor(capsys)["warnings"] == []  # nothing was captured yet
    with manager_of(settings=Settings(report=path)) as manager:
        manager.capture()
        for rows in (9, 2, 9):
            manager.run({"x": floats(rows)})
    (line,) = doctor(capsys)["warnings"]
    assert "2 steps ran eagerly: above_max_batch" in line
    path.write_text("{")
    (line,) = doctor(capsys)["warnings"]
    assert "cannot be read as a capture report" in line


def test_25_kin_a_host_with_several_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Kin: one rank of several, in a file of its own."""
    good = manager_of().capture().to_json()
    bad = manager_of(fails).capture().to_json()
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"host": "vllm", "managers": {"decode": good, "mixed": good}}))
    other = tmp_path / "report.rank1.json"
    other.write_text(json.dumps({"host": "vllm", "managers": {"decode": good, "mixed": bad}}))
    monkeypatch.setenv("GRAPHCAP_REPORT", str(path))
    (line,) = doctor(capsys)["warnings"]
    assert "report.rank1.json) did not record 1 of 2 mixed buckets (2)" in line


def test_25_kin_many_buckets_one_reason(caplog: pytest.LogCaptureFixture):
    """Kin: many buckets that fail for one reason are one WARNING, not one each."""

    def never(inputs: Any) -> Any:
        return {"y": inputs["x"] * inputs["x"].sum().item()}

    manager = manager_of(never, max_batch=8, buckets=(1, 2, 4))
    caplog.set_level(logging.WARNING, "graphcap")
    manager.capture()
    assert len(caplog.records) == 1
    assert "4 of 4 buckets (1, 2, 4, 8)" in caplog.records[0].getMessage()


def test_25_kin_a_card_that_captures_no_graphs(caplog: pytest.LogCaptureFixture):
    """Kin: a card that captures no graphs: the tape, one WARNING, and the report's notes."""
    caplog.set_level(logging.WARNING, "graphcap")

    def refuses(device: torch.device) -> CaptureProbe:
        return CaptureProbe(False, "no capture can be begun: not supported", "begin")

    recorder = select_recorder("auto", torch.device("cuda:0"), refuses)
    assert recorder.name == "tape"
    assert recorder.why is not None
    assert "not supported" in recorder.why
    (record,) = caplog.records
    assert "cannot capture graphs" in record.getMessage()
    assert "not supported" in record.getMessage()


def test_25_kin_a_failed_verification(caplog: pytest.LogCaptureFixture):
    """Kin: a bucket that verification refuses."""
    calls = [0]

    def counts(inputs: Any) -> Any:
        calls[0] += 1
        return {"y": inputs["x"] * calls[0]}

    caplog.set_level(logging.WARNING, "graphcap")
    manager = manager_of(counts)
    manager.capture()
    assert all("differs from the eager step" in r.getMessage() for r in caplog.records)
    manager.run({"x": floats(2)})
    assert manager.stats().fallbacks == {"verification": 1}
    strict = manager_of(settings=Settings(strict=True))
    strict.capture()
    strict.drop(2, "verification", "bucket 2: differs")
    with pytest.raises(FallbackError, match="verification"):
        strict.run({"x": floats(2)})


BAD_VARIABLES = [
    ("GRAPHCAP", "on", "0 or 1"),
    ("GRAPHCAP_STRICT", "true", "0 or 1"),
    ("GRAPHCAP_STRICT", "", "0 or 1"),
    ("GRAPHCAP_VERIFY", "0", "a number N of at least 1"),
    ("GRAPHCAP_VERIFY", "1.5", "a number N of at least 1"),
    ("GRAPHCAP_POOL_MIB", "nan", "a positive number"),
    ("GRAPHCAP_POOL_MIB", "10M", "a positive number"),
    ("GRAPHCAP_RECORDER", "gpu", "auto, cuda, tape"),
    ("GRAPHCAP_KERNELS", "cutlass", "auto, triton"),
    ("GRAPHCAP_REPORT", "/no/such/folder/report.json", "in an existing folder"),
    ("GRAPHCAP_BUCKETS", "plan:/no/such/plan", "cannot be read"),
]


@pytest.mark.parametrize(("name", "value", "accepted"), BAD_VARIABLES)
def test_25_kin_a_variable_with_a_bad_value(name: str, value: str, accepted: str):
    """Kin: a variable with a bad value: refused at start-up with variable, value and what is accepted."""
    with pytest.raises(SettingsError, match=accepted) as caught:
        Settings.from_env({name: value})
    assert name in str(caught.value)
    assert value.removeprefix("plan:") in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"strict": "0"},
        {"verify_every": True},
        {"verify_every": "3"},
        {"pool_mib": -1},
        {"report": "report.json"},
        {"recorder": "gpu"},
    ],
)
def test_25_kin_settings_made_by_hand(fields: dict[str, Any]):
    """Kin: settings made by hand, where `strict="0"` would be true."""
    (name,) = fields
    with pytest.raises(SettingsError, match=rf"Settings\.{name}: expected"):
        Settings(**fields)


def test_25_kin_a_misspelt_variable(caplog: pytest.LogCaptureFixture):
    """Kin: a misspelt variable: one WARNING with the nearest name."""
    caplog.set_level(logging.WARNING, "graphcap")
    Settings.from_env({"GRAPHCAP_STRIKT": "1"})
    (record,) = caplog.records
    assert "GRAPHCAP_STRIKT is not a graphcap variable" in record.getMessage()
    assert "did you mean GRAPHCAP_STRICT?" in record.getMessage()


def test_25_kin_the_report_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Kin: a report that cannot be written: one WARNING, and the recordings serve."""
    caplog.set_level(logging.WARNING, "graphcap")
    manager = manager_of(settings=Settings(report=tmp_path / "gone" / "report.json"))
    manager.capture()
    (record,) = caplog.records
    assert "the capture report was not written" in record.getMessage()
    assert manager.run({"x": floats(3)})["y"].shape == (3, WIDTH)
