"""``GRAPHCAP_BUCKETS=plan:FILE``: the plan becomes the ladder, anything else is refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from toy import double, floats, manager_of

from graphcap.buckets import BucketLadder
from graphcap.errors import LadderError, SettingsError
from graphcap.inputs import Slot, StaticInputs
from graphcap.manager import CaptureManager
from graphcap.settings import Settings


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"buckets": [3, 7, 31, 64], "expected_cost": 1.0}))
    return path


def test_a_plan_is_the_ladder(plan: Path):
    settings = Settings.from_env({"GRAPHCAP_BUCKETS": f"plan:{plan}"})
    assert settings.buckets == settings.value_of("GRAPHCAP_BUCKETS") == f"plan:{plan}"
    assert list(BucketLadder.parse(settings.buckets, 64)) == [3, 7, 31, 64]


def test_sizes_above_the_maximum_are_cut_and_it_is_added(plan: Path, caplog):
    assert list(BucketLadder.parse(f" PLAN: {plan}", 40)) == [3, 7, 31, 40]
    assert not caplog.records


def test_a_maximum_above_the_plan_is_added_and_warned_of(plan: Path, caplog):
    caplog.set_level(logging.WARNING, "graphcap")
    assert list(BucketLadder.parse(f"plan:{plan}", 256)) == [3, 7, 31, 64, 256]
    (record,) = caplog.records
    assert "batches of 65 to 256 all run in bucket 256; plan again with --max-batch 256" in (
        record.getMessage()
    )


def test_a_manager_takes_it(plan: Path):
    import torch

    inputs = StaticInputs(8, {"x": Slot((3,), torch.float32)}, "cpu")
    settings = Settings.from_env({"GRAPHCAP_BUCKETS": f"plan:{plan}"})
    with CaptureManager(double, inputs, settings=settings) as manager:
        manager.capture()
        manager.run({"x": floats(5)})
        assert list(manager.ladder) == [3, 7, 8]
        assert manager.stats().padding_rows == 2
    assert list(manager_of(max_batch=8, buckets=(3, 7)).ladder) == [3, 7, 8]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, r"cannot be read \(No such file or directory, in .*graphcap plan … --json > FILE"),
        ("buckets", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([1, 2], "expected an object with 'buckets', found list"),
        ({"shape": "tiny", "layers": 4}, "found keys shape, layers"),
        ({"buckets": [{"size": 1}]}, "expected 'buckets' to be positive integers, found \"{'size'"),
        ({"buckets": []}, "expected 'buckets' to be positive integers, found none"),
        ({"buckets": [4, 0]}, "found '0' among them"),
        ({"buckets": [4, True]}, "found 'True' among them"),
    ],
)
def test_what_is_no_plan(tmp_path: Path, contents: Any, message: str):
    path = tmp_path / "plan.json"
    if contents is not None:
        path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    with pytest.raises(SettingsError, match=f"^GRAPHCAP_BUCKETS: .*{message}"):
        Settings.from_env({"GRAPHCAP_BUCKETS": f"plan:{path}"})
    with pytest.raises(LadderError, match=message):
        BucketLadder.parse(f"plan:{path}", 8)


def test_no_file_is_named():
    with pytest.raises(SettingsError, match="expected plan:FILE, found no file after 'plan:'"):
        Settings.from_env({"GRAPHCAP_BUCKETS": "plan:"})


def test_a_folder_is_no_plan(tmp_path: Path):
    with pytest.raises(SettingsError, match="cannot be read"):
        Settings.from_env({"GRAPHCAP_BUCKETS": f"plan:{tmp_path}"})
