"""Ranks of tensor parallelism run by the same plans, or by none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.plan_files import PlanFile, TunedBucket
from graphcap.decode.plan_key import DIMENSIONS, PlanKey
from graphcap.hosts.vllm import common_plans, ranks
from graphcap.hosts.vllm.common_plans import digest, with_common_plans
from graphcap.settings import Settings

CUDA = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def _a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "A Card")


def folder_with(path: Path, block: int, machine: str = "one") -> Path:
    key = PlanKey("A Card", tuple((name, 8) for name in DIMENSIONS), "bfloat16")
    plan = LayerPlan("apart", block=block, without_pdl=frozenset({"merge", "align", "top_k"}))
    file = PlanFile(key, "shape", "kernels", {"commit": machine}, (TunedBucket(4, 256, plan, 1.0),))
    file.write(path / key.file_name)
    return path


def beside(monkeypatch: pytest.MonkeyPatch, other: Callable[[], int]) -> None:
    """A second rank, whose number is `other`."""
    monkeypatch.setattr(common_plans, "alone", lambda: False)

    def lowest(mine: int) -> int:
        return min(mine, other() if mine >= 0 else -other())

    monkeypatch.setattr(ranks, "_lowest", lowest)


def test_ranks_with_the_same_plans_run_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Settings(tune_cache=folder_with(tmp_path / "mine", 16))
    theirs = Settings(tune_cache=folder_with(tmp_path / "theirs", 16))
    beside(monkeypatch, lambda: digest(theirs, CUDA))
    assert with_common_plans(mine, CUDA) is mine
    assert caplog.text == ""


@pytest.mark.parametrize("swapped", [False, True])
def test_ranks_with_other_plans_run_without(
    swapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both of them: whoever has the smaller number too."""
    pair = [
        Settings(tune_cache=folder_with(tmp_path / "a", 16)),
        Settings(tune_cache=folder_with(tmp_path / "b", 32)),
    ]
    mine, theirs = reversed(pair) if swapped else pair
    beside(monkeypatch, lambda: digest(theirs, CUDA))
    with caplog.at_level(logging.WARNING, "graphcap"):
        found = with_common_plans(mine, CUDA)
    assert (found.schedule, mine.schedule) == ("plain", "auto")
    assert "experts run without plans on all tensor-parallel ranks" in caplog.text
    assert "graphcap explain tune-cache" in caplog.text


def test_one_rank_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(mine: int) -> int:
        raise AssertionError("nobody is there")

    monkeypatch.setattr(common_plans, "alone", lambda: True)
    monkeypatch.setattr(ranks, "_lowest", refuse)
    settings = Settings()
    assert with_common_plans(settings, CUDA) is settings


def test_the_number_is_of_what_plans_are_chosen_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(tune_cache=folder_with(tmp_path, 16))
    number = digest(settings, CUDA)
    assert 0 <= number < 2**31
    assert digest(settings, CUDA) == number
    found = {number, digest(Settings(tune_cache=tmp_path / "none"), CUDA)}
    found.add(digest(Settings(tune_cache=tmp_path, schedule="plain"), CUDA))
    (next(tmp_path.iterdir())).write_text("{")
    found.add(digest(settings, CUDA))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Another Card")
    found.add(digest(settings, CUDA))
    assert len(found) == 5
