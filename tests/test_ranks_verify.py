"""Ranks that run a step together give a bucket up together, and none waits for one that has gone on.

Two managers in two threads stand for two ranks. Their step meets the other rank's in the middle, as an
all-reduce does: a rank that runs the step once more than the other waits there, here until a time is up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from toy import CPU, WIDTH, Inputs, floats, manager_of

from graphcap.errors import VerificationError
from graphcap.manager import CaptureManager
from graphcap.operations import operation
from graphcap.recorders.tape import TapeRecorder
from graphcap.settings import Settings

PATIENCE = 20.0
"""Seconds until a rank that waits for the other gives up; the whole test takes two."""


class Ranks:
    """Two ranks: where their steps meet, and their votes."""

    def __init__(self) -> None:
        self._steps = threading.Barrier(2, timeout=PATIENCE)
        self._votes = threading.Barrier(2, timeout=PATIENCE)
        self._said = [True, True]
        self.votes = 0

    def step_of(self, scale: torch.Tensor) -> Callable[[Inputs], dict[str, torch.Tensor]]:
        @operation("all_reduce", "a barrier")
        def all_reduce(tensor: torch.Tensor) -> None:
            self._steps.wait()

        def step(inputs: Inputs) -> dict[str, torch.Tensor]:
            out = inputs["x"] * scale
            all_reduce(out)
            return {"y": out + 0}

        return step

    def agree_as(self, rank: int) -> Callable[[bool], bool]:
        def agree(mine: bool) -> bool:
            self._said[rank] = mine
            self._votes.wait()
            both = all(self._said)
            self._votes.wait()
            self.votes += rank
            return both

        return agree

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work` returns, or the exception it raises, on each rank."""
        found: list[Any] = [None, None]

        def as_rank(rank: int) -> None:
            try:
                found[rank] = work(rank)
            except BaseException as error:
                found[rank] = error

        threads = [threading.Thread(target=as_rank, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * PATIENCE)
        waited = [self._steps.broken, self._votes.broken]
        assert waited == [False, False]
        return found


class Faulty(TapeRecorder):
    """Its recordings of one bucket are wrong, once `broken`: in outputs, or in the cache."""

    def __init__(self, bucket: int | None, what: str = "y") -> None:
        super().__init__(CPU)
        self.bucket, self.what, self.broken = bucket, what, True

    def record(self, step: Any, bucket: int) -> Any:
        recording = super().record(step, bucket)
        if bucket == self.bucket:
            right = recording.replay

            def replay() -> None:
                right()
                if self.broken and self.what == "raises":
                    raise RuntimeError("the device fell off")
                if self.broken:
                    recording.outputs[self.what].add_(1)

            recording.replay = replay  # type: ignore[method-assign]
        return recording


class ChangesPads(TapeRecorder):
    """Real rows of its recordings feel padding: they follow the last row of the slot."""

    def __init__(self, manager: Callable[[], CaptureManager]) -> None:
        super().__init__(CPU)
        self.manager = manager

    def record(self, step: Any, bucket: int) -> Any:
        recording = super().record(step, bucket)
        right = recording.replay

        def replay() -> None:
            right()
            inputs = self.manager().inputs
            if inputs.rows < bucket:
                recording.outputs["y"].add_(inputs["x"][bucket - 1])

        recording.replay = replay  # type: ignore[method-assign]
        return recording


def two(
    recorders: list[TapeRecorder], settings: Settings | None = None
) -> tuple[Ranks, list[CaptureManager], list[torch.Tensor]]:
    ranks = Ranks()
    scales = [torch.full((WIDTH,), 2.0) for _ in range(2)]
    managers = [
        manager_of(
            ranks.step_of(scales[rank]),
            recorder=recorders[rank],
            settings=settings,
            agree=ranks.agree_as(rank),
        )
        for rank in range(2)
    ]
    return ranks, managers, scales


def served(ranks: Ranks, managers: list[CaptureManager], rows: int, seed: int = 0) -> list[Any]:
    return ranks.run(lambda rank: managers[rank].run({"x": floats(rows, seed)})["y"].clone())


def test_healthy_ranks_verify_and_serve():
    ranks, managers, _ = two([TapeRecorder(CPU), TapeRecorder(CPU)], Settings(verify_every=2))
    reports = ranks.run(lambda rank: managers[rank].capture())
    assert [report.failures for report in reports] == [{}, {}]
    for turn in range(4):
        for out in served(ranks, managers, 3, turn):
            assert torch.equal(out, floats(3, turn) * 2)
    assert [manager.stats().verified for manager in managers] == [2, 2]


@pytest.mark.parametrize("what", ["y", "raises"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_differs_at_capture_does_not_leave_the_other_waiting(rank: int, what: str):
    recorders: list[TapeRecorder] = [TapeRecorder(CPU), TapeRecorder(CPU)]
    recorders[rank] = Faulty(4, what)
    ranks, managers, _ = two(recorders)
    if what == "raises":  # a replay that is broken off meets nobody in the eager step
        ranks._steps = threading.Barrier(1)
    ranks.run(lambda r: managers[r].capture())
    mine, other = managers[rank], managers[1 - rank]
    assert set(mine.stats().failures) == set(other.stats().failures) == {4}
    told = "the device fell off" if what == "raises" else "the operation was not looked for: other"
    assert told in mine.stats().failures[4]
    assert other.stats().failures[4].startswith("bucket 4: it differed on another rank")
    assert other.reason_of(4) == "rank_failed"
    if what == "y":
        for rows in (4, 2):
            for out in served(ranks, managers, rows):
                assert torch.equal(out, floats(rows) * 2)
        assert mine.stats().fallbacks == {"verification": 1}
        assert other.stats().fallbacks == {"rank_failed": 1}


def test_a_rank_that_feels_padding_does_not_leave_the_other_waiting():
    """Only it would run the unpadded step to make sure."""
    managers: list[CaptureManager] = []
    ranks, made, _ = two([TapeRecorder(CPU), ChangesPads(lambda: managers[1])])
    managers += made
    ranks.run(lambda rank: managers[rank].capture())
    # Its real rows equal those of the unpadded step, so it is not to blame.
    assert [manager.stats().failures for manager in managers] == [{}, {}]


@pytest.mark.parametrize("turn", [2, 3])
def test_a_rank_that_fails_over_padding_does_not_leave_the_other_waiting(turn: int) -> None:
    """After its replay with padding that is like row 0, or like row 1: the other one must not go on to the
    next run, which needs both."""

    class Fails(TapeRecorder):
        def record(self, step: Any, bucket: int) -> Any:
            recording = super().record(step, bucket)
            right, replays = recording.replay, [0]

            def replay() -> None:
                right()
                if bucket == 4 and managers[1].inputs.rows < bucket:
                    replays[0] += 1
                    if replays[0] == turn:
                        raise RuntimeError("the device fell off")

            recording.replay = replay  # type: ignore[method-assign]
            return recording

    managers: list[CaptureManager] = []
    ranks, made, _ = two([ChangesPads(lambda: managers[0]), Fails(CPU)])
    managers += made
    ranks.run(lambda rank: managers[rank].capture())
    other, mine = (manager.stats().failures for manager in managers)
    assert set(mine) == set(other) == {4}
    assert "the device fell off" in mine[4]
    assert other[4].startswith("bucket 4: it differed on another rank")


def test_a_rank_that_differs_while_serving_takes_the_other_along():
    faulty = Faulty(4)
    faulty.broken = False
    ranks, managers, _ = two([TapeRecorder(CPU), faulty], Settings(verify_every=3))
    ranks.run(lambda rank: managers[rank].capture())
    served(ranks, managers, 4)
    faulty.broken = True
    served(ranks, managers, 4)
    for turn in (1, 2, 3):
        for out in served(ranks, managers, 4, turn):
            assert torch.equal(out, floats(4, turn) * 2)
    assert [m.stats().fallbacks for m in managers] == [{"rank_failed": 3}, {"verification": 3}]
    assert not any(manager.serves(4) for manager in managers)
    for out in served(ranks, managers, 2):
        assert torch.equal(out, floats(2) * 2)
    assert [manager.stats().replays for manager in managers] == [3, 3]


def test_strict_ranks_raise_together():
    ranks, managers, _ = two([TapeRecorder(CPU), Faulty(4)], Settings(strict=True))
    found = ranks.run(lambda rank: managers[rank].capture())
    assert [type(error) for error in found] == [VerificationError, VerificationError]
    assert "it differed on another rank" in str(found[0])


def test_a_stale_rank_keeps_the_other_from_a_check_alone():
    """A check runs the step twice: a rank that cannot replay would run it once."""
    ranks, managers, scales = two([TapeRecorder(CPU), TapeRecorder(CPU)], Settings(verify_every=2))
    ranks.run(lambda rank: managers[rank].capture())
    served(ranks, managers, 4)
    scales[0].data = torch.full((WIDTH,), 2.0)
    votes = ranks.votes

    def turn(rank: int) -> Any:
        try:
            return managers[rank].run({"x": floats(4)})["y"].clone()
        except Exception as error:  # what a host does then: the step, eagerly
            managers[rank].step(managers[rank].inputs.views(4))
            return error

    stale, other = ranks.run(turn)
    assert "scale has moved" in str(stale)
    assert torch.equal(other, floats(4) * 2)
    assert ranks.votes == votes + 1
    assert managers[1].stats().verified == 0
