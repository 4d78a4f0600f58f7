"""What a failure must not leave behind: frames that keep tensors, plans, half a batch, memory of a pool."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from test_containment import Fault, collections_off, fail, make, surroundings
from torch.multiprocessing.reductions import StorageWeakRef
from toy import CPU, WIDTH, Inputs, double, floats, manager_of

from graphcap.errors import CaptureError, InputError, PoolError
from graphcap.inputs import NUM_ROWS
from graphcap.pool import BufferPool, _Request
from graphcap.recorders.base import BoundStep, Loop
from graphcap.recorders.broken_capture import explained
from graphcap.recorders.tape import TapeRecorder, TapeRecording
from graphcap.ring import Ring
from graphcap.settings import Settings
from graphcap.undo import let_go, surely

# -- errors --------------------------------------------------------------------------------------


def test_an_undo_that_is_interrupted_runs_once_more() -> None:
    runs: list[int] = []

    def undo() -> None:
        runs.append(len(runs))
        if len(runs) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        surely(undo)
    assert runs == [0, 1]
    surely(undo)
    assert runs == [0, 1, 2]


def failing(held: list[StorageWeakRef], how: Callable[[], object]) -> None:
    tensor = torch.ones(1000)
    held.append(StorageWeakRef(tensor.untyped_storage()))
    try:
        how()
    except ZeroDivisionError as error:
        raise ValueError("because of it") from error


def wrapping(held: list[StorageWeakRef]) -> None:
    try:
        failing(held, lambda: 1 / 0)
    except ValueError as error:
        raise RuntimeError from error


def test_frames_of_an_error_and_of_what_is_behind_it_are_let_go() -> None:
    held: list[StorageWeakRef] = []
    try:
        wrapping(held)  # the frame that holds the tensor is in the traceback of the cause alone
    except RuntimeError as caught:
        error = caught
    assert not held[0].expired()
    let_go(error, None)
    assert held[0].expired()


def test_an_error_that_somebody_was_handling_before_keeps_its_frames() -> None:
    held: list[StorageWeakRef] = []
    manager = manager_of(lambda inputs: {"y": inputs["x"] * (1 / 0)})
    try:
        failing(held, lambda: int("not a number"))
    except ValueError as error:
        assert set(manager.capture().failures) == {2, 4}
        assert not held[0].expired()
        trace = error.__traceback__
        assert trace is not None
        assert trace.tb_next is not None
        assert "tensor" in trace.tb_next.tb_frame.f_locals


def test_a_refusal_keeps_nothing_of_the_step() -> None:
    """It is an error of graphcap's, which the guard of the recording keeps too: a reference cycle."""
    held: list[StorageWeakRef] = []

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        y = inputs["x"] * 2
        held.append(StorageWeakRef(y.untyped_storage()))
        if inputs["x"].shape[0] == 4:
            try:
                y.sum().item()
            except CaptureError as error:
                raise ValueError("another error, with the refusal behind it") from error
        return {"y": y}

    manager = manager_of(step)
    with collections_off():
        failures = manager.capture().failures
        assert set(failures) == {4}
        assert ".item()" in failures[4]
        recording = manager.recording(2)
        mine = StorageWeakRef(recording.outputs["y"].untyped_storage())
        assert [ref.cdata for ref in held if not ref.expired()] == [mine.cdata]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "out of device memory at step.py:3"),
        (RuntimeError("CUDA error: out of memory"), "GRAPHCAP_BUCKETS"),
        (
            RuntimeError("CUDA error: operation failed due to a previous error during capture"),
            "keep other threads from waiting for the device",
        ),
        (RuntimeError("CUDA error: operation not permitted"), "remove what synchronises"),
    ],
)
def test_a_broken_capture_is_explained_by_its_kind(error: Exception, said: str) -> None:
    text = str(explained(error, 8, "step.py:3 (layer)"))
    assert said in text
    assert "bucket 8" in text
    assert str(error) in text


ELSEWHERE = "keep other threads from waiting for the device"
CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`")
UNSUPPORTED = RuntimeError("CUDA error: operation not permitted when stream is capturing")
WRAPPED = ValueError("the layer failed")
WRAPPED.__cause__ = UNSUPPORTED
CIRCLE = ValueError("raised from itself")
CIRCLE.__cause__ = CIRCLE


@pytest.mark.parametrize(
    ("error", "invalidated", "elsewhere"),
    [
        (CUBLAS, True, True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True, True),
        (ValueError("a library's own words"), True, True),
        (CUBLAS, False, False),
        (CUBLAS, None, False),
        (UNSUPPORTED, True, False),
        (WRAPPED, True, False),
        (CIRCLE, True, True),
    ],
)
def test_a_capture_that_the_driver_gave_up_is_told_from_a_step_that_fails(
    error: Exception, invalidated: bool | None, elsewhere: bool
) -> None:
    text = str(explained(error, 8, "step.py:3 (layer)", invalidated))
    assert str(error) in text
    assert (ELSEWHERE in text) is elsewhere
    assert ("before or at step.py:3" in text) is elsewhere
    assert "remove what synchronises or allocates outside torch there" in text.replace("\n", " ")


# -- the pool ------------------------------------------------------------------------------------


def test_a_warm_up_that_fails_plans_nothing() -> None:
    """Else a largest bucket for which there is no memory would be planned for, and the arena with it."""

    def step_of(pool: BufferPool, fails: bool) -> Callable[[Inputs], Mapping[str, torch.Tensor]]:
        def step(inputs: Inputs) -> Mapping[str, torch.Tensor]:
            rows = inputs["x"].shape[0]
            wide = pool.take("wide", (rows, 1000 if rows == 4 else 10), torch.float32)
            pool.take(f"only {rows}", (rows, 10), torch.float32)
            if fails and rows == 4:
                raise MemoryError
            return {"y": wide[:, :WIDTH].copy_(inputs["x"])}

        return step

    pool = BufferPool(CPU)
    manager = manager_of(step_of(pool, True), buckets=(1, 2), pool=pool)
    assert set(manager.capture().failures) == {4}
    alone = BufferPool(CPU)
    small = manager_of(step_of(alone, False), max_batch=2, buckets=(1,), pool=alone)
    small.capture()
    assert pool.plan == alone.plan
    assert {b.name for b in pool.layout.buffers} == {"wide", "only 1", "only 2"}
    assert pool.layout == alone.layout
    for rows in (1, 2, 4):
        if rows < 4:
            assert torch.equal(manager.run({"x": floats(rows)})["y"], floats(rows))


def test_an_arena_for_which_there_is_no_memory_says_so() -> None:
    pool = BufferPool(CPU)
    pool._requests["wide"] = _Request(2**60, set())
    with pytest.raises(PoolError, match=r"arena of the pool, \d+\.00 MiB, cannot be .* lower the"):
        pool.freeze()
    assert not pool.frozen
    del pool._requests["wide"]
    pool.freeze()


# -- slots ---------------------------------------------------------------------------------------


def test_a_batch_that_comes_in_half_is_not_taken_for_the_old_one() -> None:
    seen = []
    for at in range(60):
        manager = manager_of(lambda inputs: {"y": inputs["x"] + inputs[NUM_ROWS]}, max_batch=4)
        manager.capture()
        manager.run({"x": floats(3)})
        fault = Fault(fail(KeyboardInterrupt), at)
        try:
            with fault:
                manager.run({"x": floats(4, seed=1)})
        except KeyboardInterrupt:
            seen.append(manager.inputs.rows)
        if not fault.fired:
            break
        if manager.inputs.rows == 0:
            with pytest.raises(InputError, match="at least one row"):
                manager.run()
        # As many rows as before the failure: their number must reach the device again.
        assert torch.equal(manager.run({"x": floats(3, seed=2)})["y"], floats(3, seed=2) + 3)
        assert manager.inputs["x"][3].count_nonzero() == 0, "the padding row is real on the device"
        manager.close()
    else:
        pytest.fail("a run has not so many operations")
    assert 0 in seen


# -- memory of failed recordings -----------------------------------------------------------------


class Pooled(TapeRecorder):
    """Behaves as a graph memory pool: what a failed attempt took goes when all recordings are closed.

    Attributes:
        log: what happened, in order.
    """

    takes = 2**20 + 1

    def __init__(self) -> None:
        super().__init__(CPU)
        self.log: list[str] = []
        self.open: list[TapeRecording] = []

    def record(self, step: BoundStep, bucket: int) -> TapeRecording:
        try:
            made = super().record(step, bucket)
        except CaptureError:
            if any(r._entries is not None for r in self.open):
                self.stranded += self.takes
            self.log.append(f"failed {bucket}")
            raise
        self.open.append(made)
        self.log.append(f"recorded {bucket}")
        return made

    def reclaim(self) -> None:
        assert all(r._entries is None for r in self.open), "a recording is open"
        self.log.append("reclaimed")
        super().reclaim()


class Fails:
    """Doubles; cannot be recorded for the sizes given, from the n-th time on."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self.sizes = dict(sizes)
        self.recording = False

    def __call__(self, inputs: Inputs) -> Mapping[str, torch.Tensor]:
        size = inputs["x"].shape[0]
        if self.recording and size in self.sizes:
            self.sizes[size] -= 1
            if self.sizes[size] < 0:
                raise MemoryError("not a byte more")
        return double(inputs)

    def watch(self, done: int, total: int, what: str) -> None:
        self.recording = what.startswith("recording")


def test_memory_that_a_failed_recording_left_is_had_back_by_recording_the_others_again() -> None:
    recorder, step = Pooled(), Fails({2: 0})
    manager = manager_of(step, max_batch=8, buckets=(1, 2, 4), recorder=recorder)
    report = manager.capture(step.watch)
    assert set(report.failures) == {2}
    assert recorder.log == [
        *("recorded 8", "recorded 4", "failed 2", "recorded 1"),
        *("reclaimed", "recorded 8", "recorded 4", "recorded 1"),
    ]
    assert [r._entries is None for r in recorder.open] == [True] * 3 + [False] * 3
    assert recorder.stranded == 0
    assert [bucket.size for bucket in report.buckets] == [1, 4, 8]
    assert not [note for note in report.notes if "stay with" in note]
    for rows in range(1, 9):
        assert torch.equal(manager.run({"x": floats(rows)})["y"], floats(rows) * 2)
    assert manager.stats().fallbacks == {"not_recorded": 1}


def test_a_bucket_may_fail_when_it_is_recorded_again() -> None:
    recorder, step = Pooled(), Fails({2: 0, 4: 1})
    manager = manager_of(step, max_batch=8, buckets=(1, 2, 4), recorder=recorder)
    assert set(manager.capture(step.watch).failures) == {2, 4}
    assert recorder.log[4:] == [
        *("reclaimed", "recorded 8", "failed 4", "recorded 1"),
        *("reclaimed", "recorded 8", "recorded 1"),
    ]
    for rows in range(1, 9):
        assert torch.equal(manager.run({"x": floats(rows)})["y"], floats(rows) * 2)


def test_an_interrupt_while_recording_again_gives_everything_back() -> None:
    recorder, step = Pooled(), Fails({2: 0})
    manager = manager_of(step, max_batch=8, buckets=(1, 2, 4), recorder=recorder)

    def interrupt(done: int, total: int, what: str) -> None:
        step.watch(done, total, what)
        if what == "recording bucket 4 again":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        manager.capture(interrupt)
    assert all(r._entries is None for r in recorder.open)
    step.sizes.clear()
    assert manager.capture().failures == {}


def test_little_memory_is_not_worth_it() -> None:
    recorder, step = Pooled(), Fails({2: 0})
    recorder.takes = 2**20
    manager = manager_of(step, max_batch=8, buckets=(1, 2, 4), recorder=recorder)
    report = manager.capture(step.watch)
    assert "reclaimed" not in recorder.log
    assert [
        n for n in report.notes if n.startswith("1.00 MiB that failed recordings cost stay with")
    ]


def test_a_host_that_goes_through_the_phases_itself_is_told() -> None:
    """Only it can bind the steps of buckets that would have to be recorded again."""
    recorder, step = Pooled(), Fails({2: 0})
    manager = manager_of(step, max_batch=8, buckets=(1, 2, 4), recorder=recorder)
    for size in (8, 4, 2, 1):
        manager.warm_up(size)
    manager.freeze()
    step.recording = True
    assert [manager.record(size) for size in (8, 4, 2, 1)] == [True, True, False, True]
    step.recording = False
    report = manager.finish()
    assert recorder.log == ["recorded 8", "recorded 4", "failed 2", "recorded 1"]
    assert [n for n in report.notes if "until these are closed" in n]


# -- phases and loops ----------------------------------------------------------------------------


def test_capture_after_phases_that_a_host_began_closes_what_they_recorded() -> None:
    manager = manager_of()
    for size in (4, 2):
        manager.warm_up(size)
    manager.freeze()
    manager.record(4)
    begun = manager.recording(4)
    manager.verify(4)
    assert manager.capture().failures == {}
    assert begun.outputs == {}, "not closed"
    assert torch.equal(manager.run({"x": floats(3)})["y"], floats(3) * 2)


def test_a_phase_of_a_host_that_is_interrupted_anywhere_puts_everything_back() -> None:
    """Also in the middle of putting back: there is no capture() around it to do it again."""
    for at in range(60):
        manager, step = make()
        before = surroundings(manager, step)
        fault = Fault(fail(KeyboardInterrupt), at)
        try:
            with fault:
                manager.warm_up(4)
        except KeyboardInterrupt:
            pass
        assert surroundings(manager, step) == before, at
        if not fault.fired:
            break
        manager.abandon()
        assert manager.capture().failures == {}
        manager.close()
    else:
        pytest.fail("a warm-up has not so many operations")
    assert at > 8


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("the driver fails")])
def test_a_loop_that_cannot_be_had_for_any_reason_costs_no_bucket(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def repeated(self: Any, left: torch.Tensor, live: torch.Tensor, begin: Any = None) -> Loop:
        raise error

    monkeypatch.setattr(TapeRecording, "repeated", repeated)
    ring = Ring(3, {"y": ((WIDTH,), torch.float32)})
    manager = manager_of(ring=ring)
    with caplog.at_level(logging.WARNING):
        report = manager.capture()
    assert report.failures == {}
    assert f"{type(error).__name__}: {error}" in caplog.text
    assert [note for note in report.notes if str(error) in note]
    out = manager.run_many(2, {"x": floats(3)}).outputs["y"]
    assert torch.equal(out, (floats(3) * 2).expand(2, 3, WIDTH))


def test_an_interrupt_while_a_loop_is_tried_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    class Trying(Loop):
        def launch(self) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            closed.append(1)

    monkeypatch.setattr(TapeRecording, "repeated", lambda *_: Trying())
    manager = manager_of(ring=Ring(3, {"y": ((WIDTH,), torch.float32)}))
    with pytest.raises(KeyboardInterrupt):
        manager.capture()
    assert closed == [1]
    assert manager.state == "new"
    assert gc.isenabled()
    assert sys.exc_info() == (None, None, None)
    assert manager.settings == Settings()
