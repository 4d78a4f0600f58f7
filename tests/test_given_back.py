"""What looks at a capture (the search for an operation, pointers, the fingerprint) gives all back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_containment import Fault, fail
from torch.multiprocessing.reductions import StorageWeakRef
from toy import CPU, Inputs, floats, manager_of

from graphcap.errors import CaptureError, StaleRecordingError
from graphcap.recorders.base import BoundStep, Recording
from graphcap.recorders.tape import TapeRecorder, TapeRecording
from graphcap.settings import Settings


class Watching(TapeRecorder):
    """Writes down what is recorded, and where; finds fault with the pointers of `dangles`.

    Attributes:
        log: bucket, and whether it was recorded apart.
    """

    def __init__(self, dangles: frozenset[int] = frozenset()) -> None:
        super().__init__(CPU)
        self.log: list[tuple[int, bool]] = []
        self.is_apart = False
        self.dangles = dangles
        self.looks = 0
        self.made_apart: list[TapeRecording] = []
        self.fails_apart: Exception | None = None
        self.copies: StorageWeakRef | None = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        assert not self.is_apart
        self.is_apart = True
        try:
            yield
        finally:
            self.is_apart = False
            assert all(made._entries is None for made in self.made_apart), "not closed"
            assert self.copies is None or self.copies.expired(), "their memory is given back now"

    def record(self, step: BoundStep, bucket: int) -> TapeRecording:
        self.log.append((bucket, self.is_apart))
        if self.is_apart and self.fails_apart is not None:
            copies = floats(4)
            self.copies = StorageWeakRef(copies.untyped_storage())
            raise self.fails_apart
        made = super().record(step, bucket)
        if self.is_apart:
            self.made_apart.append(made)
        return made

    def dangling(self, recordings: Mapping[int, Recording]) -> Mapping[int, CaptureError]:
        self.looks += 1
        return {s: CaptureError(f"bucket {s}: dangles") for s in recordings if s in self.dangles}


class Drifts:
    """Uses a number that the host changes at each run."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        self.runs += 1
        return {"y": inputs["x"] + 1 + self.runs}


@pytest.mark.parametrize("error", [None, RuntimeError("no memory")])
def test_the_search_for_an_operation_records_apart_from_what_lives(
    error: Exception | None,
) -> None:
    """Its copies would stay in the memory that all recordings share, as long as one of them lives."""
    recorder = Watching()
    recorder.fails_apart = error
    manager = manager_of(Drifts(), buckets=(2,), recorder=recorder)
    failures = manager.capture().failures
    assert set(failures) == {2, 4}
    for text in failures.values():
        found = "result differs is" if error is None else "ended with RuntimeError: no memory"
        assert found in text
    assert recorder.log == [(4, False), (2, False), (4, True), (2, True)]
    assert not recorder.is_apart


def test_a_closed_manager_keeps_nothing_that_the_step_let_go() -> None:
    class Step:
        def __init__(self) -> None:
            self.weight, self.table = floats(4), floats(4)

        def __call__(self, inputs: Inputs) -> dict[str, torch.Tensor]:
            return {"y": inputs["x"] + self.weight[:1] + self.table[:1]}

    step = Step()
    with manager_of(step) as manager:
        assert manager.capture().failures == {}
        old = [StorageWeakRef(t.untyped_storage()) for t in (step.weight, step.table)]
        step.weight, step.table = floats(4), floats(4)
        with pytest.raises(StaleRecordingError, match=r"\.weight is another tensor"):
            manager.run({"x": floats(3)})
        assert not any(storage.expired() for storage in old), "recordings read them"
    assert [storage.expired() for storage in old] == [True, True]


def test_what_was_found_to_advance_is_put_back_by_the_phases_that_follow_and_forgotten_at_the_end() -> (
    None
):
    """A counter that is not in state=: verification finds it and keeps the later buckets from moving it."""

    class Step:
        def __init__(self) -> None:
            self.counter = torch.zeros(2)

        def __call__(self, inputs: Inputs) -> dict[str, torch.Tensor]:
            self.counter.add_(1)
            return {"y": inputs["x"] * 2}

    step = Step()
    manager = manager_of(step, buckets=(1, 2))
    after: dict[str, float] = {}

    def follow(done: int, total: int, what: str) -> None:
        after[what] = float(step.counter[0])

    assert manager.capture(follow).failures == {}
    assert after["verifying bucket 2"] == after["verifying bucket 1"] == after["done"]
    state = manager._state_of_step
    assert [tensor is step.counter for tensor in state._saved] == [True]
    counter = StorageWeakRef(step.counter.untyped_storage())
    step.counter = torch.zeros(2)
    manager.close()
    assert counter.expired()


def test_phases_that_begin_anew_begin_anew() -> None:
    """Pointers are looked at again, and a bucket that failed has another chance."""
    recorder, broken = Watching(frozenset({2})), [True]

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        if broken[0] and inputs["x"].shape[0] == 4:
            raise ValueError("by design")
        return {"y": inputs["x"] * 2}

    manager: Any = manager_of(step, buckets=(1, 2), recorder=recorder)
    for turn in (1, 2):
        for size in (4, 2, 1):
            manager.warm_up(size)
        if turn == 1:
            manager.freeze()
            made = [manager.record(size) for size in (4, 2, 1)]
            assert made == [False, True, True]
            assert manager.check_pointers() == (2,)
            manager.abandon()
            broken[0] = False
            assert manager.failure_of(4) is None
    manager.freeze()
    assert [manager.record(size) for size in (4, 2, 1)] == [True, True, True]
    recorder.dangles = frozenset({1})
    assert manager.check_pointers() == (1,)
    assert recorder.looks == 2
    report = manager.finish()
    assert set(report.failures) == {1}
    assert [bucket.size for bucket in report.buckets] == [2, 4]


class Counts:
    """Adds the number of its runs, and keeps it in a table that is not in `state`."""

    def __init__(self) -> None:
        self.counter, self.table = torch.zeros(1), torch.zeros(4)

    def __call__(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        self.counter.add_(1)
        self.table.copy_(self.counter.expand(4))
        return {"y": inputs["x"] * 2 + self.counter}


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("CUDA out of memory.")])
def test_a_check_while_serving_that_runs_out_of_memory_anywhere_leaves_the_replay(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    step = Counts()
    manager = manager_of(step, state=[step.counter], settings=Settings(verify_every=1))
    assert manager.capture().failures == {}
    warned, last = 0, 0
    for at in range(400):
        manager._warned_unverified = False
        caplog.clear()
        fault, before, x = (
            Fault(fail(type(error), str(error)), at),
            manager.stats(),
            floats(3, seed=at),
        )
        try:
            with fault:
                y = manager.run({"x": x})["y"]
        except type(error):
            assert not warned, "the batch was not in yet"
            assert float(step.counter) == at
            y = manager.run({"x": x})["y"]
        runs = at + 1
        assert torch.equal(y, x * 2 + runs), at
        assert float(step.counter) == runs, at
        assert step.table.tolist() == [runs] * 4, at
        if not fault.fired:
            break
        last = at
        after = manager.stats()
        assert after.replays == before.replays + 1
        assert after.fallbacks == {}
        if "was not held against the eager one" in caplog.text:
            warned += 1
            assert after.verified == before.verified
    assert last > 20
    assert warned > last / 2


def test_what_else_fails_in_a_check_while_serving_is_raised_and_the_step_has_not_run() -> None:
    step = Counts()
    manager = manager_of(step, state=[step.counter], settings=Settings(verify_every=1))
    assert manager.capture().failures == {}
    manager.run({"x": floats(3)})  # makes the views of its outputs, which takes operations
    raised = 0
    for at in range(400):
        before = (float(step.counter), step.table.tolist())
        fault = Fault(fail(ZeroDivisionError), at)
        try:
            with fault:
                manager.run({"x": floats(3)})
        except ZeroDivisionError:
            raised += 1
            assert (float(step.counter), step.table.tolist()) == before, at
        if not fault.fired:
            break
    assert raised > 20
