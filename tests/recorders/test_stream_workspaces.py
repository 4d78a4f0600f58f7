"""A stream's workspaces: what happens where they cannot be had."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from graphcap.recorders import streams

POOL = SimpleNamespace(id=(0, 7))


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_idle", {})
    monkeypatch.setattr(streams, "_new_pool", lambda: POOL)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "stream")


@pytest.fixture
def lease() -> streams.StreamLease:
    made = streams.StreamLease(torch.device("cuda", 0))
    assert made.pool == POOL.id
    return made


def refusing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def use(*_: object) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "use_mem_pool", use, raising=False)


def test_no_room_for_workspaces_is_an_error_of_the_warm_up(lease, monkeypatch) -> None:
    refusing(monkeypatch, torch.cuda.OutOfMemoryError("34 MiB"))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        lease.take_workspace()
    assert lease.pool == POOL.id


def test_an_allocator_without_pools_is_told_of(lease, monkeypatch, caplog) -> None:
    refusing(monkeypatch, RuntimeError("no pools here"))
    with caplog.at_level(logging.INFO, streams.__name__):
        lease.take_workspace()
    assert lease.pool is None
    assert "no pools here" in caplog.text


def test_a_stream_and_its_pool_are_lent_again_together() -> None:
    streams.StreamLease(torch.device("cuda", 0))  # gone at once
    assert list(streams._idle.values()) == [[("stream", POOL)]]
    assert streams.StreamLease(torch.device("cuda", 0)).pool == POOL.id
