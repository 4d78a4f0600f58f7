"""Checkpoints on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_files import draw

from graphcap.decode.save_checkpoint import save_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(draw(), tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_checkpoint(draw(), tmp_path / "sharded", max_shard_bytes=20_000)
    return tmp_path / "sharded"
