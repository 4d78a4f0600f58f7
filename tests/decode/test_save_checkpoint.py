"""save_checkpoint: where it refuses to write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_files import SHAPE, assert_same, draw, load

from graphcap.decode.random_weights import random_weights
from graphcap.decode.safetensors_files import INDEX, SINGLE
from graphcap.decode.save_checkpoint import save_checkpoint
from graphcap.errors import CheckpointError


@pytest.mark.parametrize("file", ["config.json", INDEX, SINGLE, "model-00001-of-00002.safetensors"])
def test_saving_over_a_checkpoint_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("mine")
    with pytest.raises(CheckpointError, match=f"expected no checkpoint in it, found {file}"):
        save_checkpoint(draw(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [file]
    assert (tmp_path / file).read_text() == "mine"


def test_saving_beside_other_files_is_fine(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    weights = draw()
    save_checkpoint(weights, tmp_path)
    assert_same(load(tmp_path), weights)


def test_saving_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: expected a folder to write to"):
        save_checkpoint(draw(), tmp_path / "file")


def test_saving_meta_weights(tmp_path: Path) -> None:
    weights = random_weights(SHAPE, device="meta", dtype=torch.float32, seed=0)
    with pytest.raises(
        CheckpointError, match="'small': expected values to save, found device 'meta'"
    ):
        save_checkpoint(weights, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("size", [0, -5])
def test_saving_with_a_wrong_shard_size(tmp_path: Path, size: int) -> None:
    with pytest.raises(CheckpointError, match=f"max_shard_bytes: .* > 0, found {size}"):
        save_checkpoint(draw(), tmp_path, max_shard_bytes=size)


def test_saving_to_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"GiB needed, 0.00 GiB free. Make room"):
        save_checkpoint(draw(), tmp_path)
