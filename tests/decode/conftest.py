"""Checkpoints on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
