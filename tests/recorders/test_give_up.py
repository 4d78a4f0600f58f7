"""After a capture that torch could not end: the allocator's count of a pool's users is right."""

from __future__ import annotations

import pytest
import torch

from graphcap.recorders import torch_capture
from graphcap.recorders.torch_capture import give_up

DEVICE = torch.device("cuda", 1)
POOL = (0, 7)


class Allocator:
    """Counts as torch's allocator does: a capture begins to record to a pool and is one of its users."""

    def __init__(self) -> None:
        self.recording = False
        self.users = 1  # an earlier graph, which lives

    def begin(self) -> None:
        self.recording = True
        self.users += 1

    def end(self, device: int, pool: tuple[int, int]) -> None:
        assert (device, pool) == (1, POOL)
        if not self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording = False

    def release(self, device: int, pool: tuple[int, int]) -> None:
        assert (device, pool) == (1, POOL)
        self.users -= 1


class Graph:
    def __init__(self, allocator: Allocator, tidies: bool, fails: bool = False) -> None:
        self.allocator, self.tidies, self.fails = allocator, tidies, fails

    def reset(self) -> None:
        if self.fails:
            raise RuntimeError("CUDA error")
        if self.tidies and self.allocator.recording:
            self.allocator.end(1, POOL)
            self.allocator.release(1, POOL)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", found.release, raising=False)
    monkeypatch.setattr(torch_capture, "_broken", [])
    return found


@pytest.mark.parametrize("tidies", [False, True], ids=["torch to 2.13", "torch that tidies up"])
def test_the_graph_is_no_user_of_the_pool_any_more(allocator: Allocator, tidies: bool) -> None:
    allocator.begin()
    graph = Graph(allocator, tidies)
    give_up(graph, POOL, DEVICE)  # type: ignore[arg-type]
    assert not allocator.recording
    assert allocator.users == 1, (
        "the earlier graph's memory would never, or too early, be given back"
    )
    assert torch_capture._broken == ([] if tidies else [graph]), "torch still asks the graph"


def test_a_capture_that_never_began_is_not_counted_off(allocator: Allocator) -> None:
    give_up(Graph(allocator, False), POOL, DEVICE)  # type: ignore[arg-type]
    assert allocator.users == 1


def test_a_graph_that_cannot_be_reset_does_not_keep_the_pool(allocator: Allocator) -> None:
    allocator.begin()
    give_up(Graph(allocator, False, fails=True), POOL, DEVICE)  # type: ignore[arg-type]
    assert (allocator.recording, allocator.users) == (False, 1)


def test_torch_before_2_6_has_another_name_for_it(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateCurrentStreamToPool", allocator.end, raising=False
    )
    allocator.begin()
    give_up(Graph(allocator, False), POOL, DEVICE)  # type: ignore[arg-type]
    assert (allocator.recording, allocator.users) == (False, 1)
