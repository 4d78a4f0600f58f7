"""What may lie in the folder of tuned plans: it is told of, and nothing hangs or dies of it."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
import torch
from plan_samples import H200, SEED, bucket, file_of, pretend

pytest.importorskip("triton", minversion="3.0")

from graphcap.cli import main
from graphcap.decode import plan_choice, plan_files
from graphcap.decode.expert_plans import ExpertPlans
from graphcap.decode.kernels import decode_kernels
from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.plan_files import read_plans
from graphcap.decode.plan_json import plan_from_json, plan_to_json
from graphcap.decode.plan_key import PlanKey
from graphcap.errors import InputError
from graphcap.moe.kernels import Backend
from graphcap.moe.kernels.triton_pairs import PairTile

TRITON = decode_kernels(Backend("triton", "tests"))
KEY = PlanKey.of(SEED, torch.bfloat16, H200)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(plan_choice, "_told", set())
    pretend(monkeypatch)
    return tmp_path


def source_of_8() -> str:
    """Where the plan of 8 rows is from."""
    kernels, device = TRITON.experts, torch.device("cuda:0")
    return ExpertPlans(kernels, TRITON.fused, KEY.experts, torch.bfloat16, device).choice(8).source


def make_pipe(path: Path) -> None:
    os.mkfifo(path)  # reading it would wait for ever


def make_folder(path: Path) -> None:
    path.mkdir()


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)  # no byte of it is on the disk


def make_bytes(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize("make", [make_pipe, make_folder, make_loop, make_large, make_bytes])
def test_what_is_no_file_of_plans_is_told_of_and_passed_over(
    make, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / KEY.file_name
    make(path)
    with caplog.at_level(logging.WARNING, "graphcap"):
        assert source_of_8() == "table"
        assert source_of_8() == "table"
    assert caplog.text.count("tuned plans are not used") == 1
    assert f"{path}: file of plans: " in caplog.text


def test_a_link_to_nothing_is_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / KEY.file_name).symlink_to(folder / "gone")
    assert source_of_8() == "table"
    assert caplog.text == ""


def test_a_file_that_goes_away_while_it_is_looked_for_is_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / KEY.file_name
    file_of(bucket(8)).write(path)
    read = plan_choice.read_plans

    def gone(path: Path) -> object:
        path.unlink()
        return read(path)

    monkeypatch.setattr(plan_choice, "read_plans", gone)
    assert source_of_8() == "table"
    assert caplog.text == ""


def test_each_file_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen is what was looked at, also where it is written anew at that moment."""
    file_of(bucket(8)).write(folder / KEY.file_name)
    reads: list[Path] = []
    read = plan_choice.read_plans
    monkeypatch.setattr(plan_choice, "read_plans", lambda path: (reads.append(path), read(path))[1])
    assert source_of_8() == "cache"
    assert reads == [folder / KEY.file_name]


def test_a_folder_that_cannot_be_listed_is_told_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file_of(bucket(8)).write(folder / KEY.file_name)

    def refuse(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(plan_choice.os, "listdir", refuse)
    with caplog.at_level(logging.WARNING, "graphcap"):
        assert source_of_8() == "table"
    assert f"{folder}: folder of plans: PermissionError" in caplog.text
    assert "graphcap explain tune-cache" in caplog.text


def test_a_folder_that_is_not_there_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (folder / "none", folder / "file" / "below"):
        (folder / "file").write_text("")
        monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", str(name))
        assert source_of_8() == "table"
    assert caplog.text == ""


def test_the_largest_file_that_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "plans.json"
    file_of(bucket(8)).write(path)
    monkeypatch.setattr(plan_files, "_LARGEST_FILE", path.stat().st_size)
    assert read_plans(path).buckets == (bucket(8),)
    monkeypatch.setattr(plan_files, "_LARGEST_FILE", path.stat().st_size - 1)
    with pytest.raises(InputError, match=r"expected at most \d+ bytes, found \d+"):
        read_plans(path)


@pytest.mark.parametrize(
    ("kernel", "tile", "field"),
    [
        ("gated_gemm", {"tile": "Tile", "n": 24, "k": 64, "warps": 4, "stages": 2}, "n"),
        ("down_gemm", {"tile": "Tile", "n": 32, "k": 48, "warps": 4, "stages": 2}, "k"),
        ("down_gemm", {"tile": "Tile", "n": 32, "k": 64, "warps": 3, "stages": 2}, "warps"),
        ("pair_down", {"tile": "PairTile", "rows": 3, "depth": 64}, "rows"),
        ("router", {"tile": "RowsTile", "rows": 6, "warps": 4, "lanes": 5}, "rows"),
        ("router", {"tile": "DotTile", "n": 16, "depth": 100, "warps": 4, "stages": 4}, "depth"),
        ("attend", {"tile": "AttendTile", "splits": 5, "tokens": 20, "warps": 4}, "tokens"),
    ],
)
def test_tiles_that_triton_has_no_tensors_for_are_refused(
    kernel: str, tile: dict[str, object], field: str
) -> None:
    with pytest.raises(InputError, match=f"{field} of an? {tile['tile']}: expected a power of two"):
        plan_from_json({"layers": "apart", "tiles": {kernel: tile}})


def test_counts_that_are_no_sizes_of_tensors_may_be_anything() -> None:
    plan = LayerPlan("fused", tiles={"pair_gate_up": PairTile(1, 2048, 80)})
    assert plan_from_json(plan_to_json(plan)) == plan
    cuda = {"layers": "fused", "tiles": {"norm_qkv": {"tile": "CudaRows", "rows": 20}}}
    assert plan_to_json(plan_from_json(cuda)) == cuda


def test_without_a_home_nothing_is_written_below_a_folder_named_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from graphcap.cli import tune

    monkeypatch.chdir(tmp_path)
    for name in ("GRAPHCAP_TUNE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(tune.SettingsError, match="this user has no home; name a folder"):
        tune._check_writable(plan_files.cache_folder(), "GRAPHCAP_TUNE_CACHE", "file")
    assert list(tmp_path.iterdir()) == []
    assert main(["tune", "--dry-run", "--batches", "1", "--shape", "seed-64"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_replaced_by_a_file_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    from graphcap.cli import tune

    (tmp_path / KEY.file_name).mkdir()
    with pytest.raises(tune.SettingsError, match="expected a file, or none, at"):
        tune._check_writable(tmp_path, "GRAPHCAP_TUNE_CACHE", KEY.file_name)
