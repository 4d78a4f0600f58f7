"""What run_many hands out again, rows that have ended where a batch shrinks, and what an eager step of a
batch that is too large gets."""

from __future__ import annotations

import pytest
import torch
from loop_fakes import LoopingRecorder
from walks import batch_of, walker, walks

from graphcap.buckets import BucketLadder
from graphcap.errors import StaleRecordingError
from graphcap.inputs import Slot, StaticInputs
from graphcap.manager import CaptureManager
from graphcap.ring import Stop
from graphcap.settings import Settings
from graphcap.staging import MOST_KEPT

both = pytest.mark.parametrize("looped", [True, False], ids=["loop", "replays"])


def captured(looped, stop=None, length=8):
    manager = walker(length, recorder=LoopingRecorder() if looped else None, stop=stop)
    manager.capture()
    return manager


@both
def test_what_a_caller_does_to_a_tensor_itself_is_not_met_again(looped):
    with captured(looped, Stop("token", (99,))) as manager:
        given = batch_of(2)
        first = manager.run_many(4, given)
        assert manager.run_many(4) is first, "made once"
        first.outputs["token"].t_()
        second = manager.run_many(4)
        assert second.outputs["token"].t().tolist() == [row[8:] for row in walks(given, 12)]
        for spoil in (
            lambda many: many.counts.unsqueeze_(0),
            lambda many: many.live.resize_(1),
            lambda many: setattr(many.outputs["token"], "data", torch.zeros(4, 2).int()),
        ):
            spoil(second)
            second = manager.run_many(4)
            assert second.outputs["token"].shape == (4, 2)
            assert second.counts.tolist() == [4, 4]
            assert second.live.tolist() == [True, True]


def test_views_of_all_numbers_of_steps_are_not_kept_for_ever():
    with walker(MOST_KEPT, settings=Settings(verify="off")) as manager:
        buffer = manager._many.buffer
        for rows in (1, 2):
            for steps in range(1, MOST_KEPT + 1):
                assert buffer.result(steps, rows).outputs["token"].shape == (steps, rows)
        assert len(buffer._views) <= MOST_KEPT


@both
@pytest.mark.parametrize("drops", [(), (2, 4)], ids=["recorded", "eager"])
@pytest.mark.parametrize("between", ["run_many", "run"])
def test_fewer_rows_of_the_same_batch_do_not_bring_back_a_row_that_has_ended(
    looped, drops, between
):
    given = batch_of(4, 1)
    tokens = walks(given, 4)
    end = tokens[0][0]
    assert all(end not in row[:3] for row in tokens[1:])
    with captured(looped, Stop("token", (end,))) as manager:
        for size in drops:
            manager.drop(size, "not_recorded", "the host says so")
        assert manager.run_many(1, given).live.tolist() == [False, True, True, True]
        if between == "run":
            manager.run(rows=3)
            many = manager.run_many(1)
        else:
            many = manager.run_many(2, rows=3)
        assert many.live.tolist() == [False, True, True]
        assert many.counts.tolist() == ([0, 1, 1] if between == "run" else [0, 2, 2])
        # Rows that are given up are live no more: a loop does not run for them.
        assert manager._many.buffer.live.tolist() == [False, True, True, False, False, False]
        assert manager.run_many(1, given).counts.tolist() == [1, 1, 1, 1]


def test_a_batch_that_is_too_large_reaches_the_step_contiguous_as_slots_are():
    def step(inputs):
        return {"doubled": inputs["pair"].view(-1).view(-1, 2) * 2}

    inputs = StaticInputs(4, {"pair": Slot((2,), torch.complex64)}, "cpu")
    with CaptureManager(step, inputs, ladder=BucketLadder((2,), 4), settings=Settings()) as manager:
        manager.capture()
        for rows in (3, 7):  # 7 eagerly
            wide = torch.randn(2, rows, dtype=torch.complex64)
            for pair in (wide.t(), wide.t().conj(), wide[:, :1].t().expand(rows, 2)):
                assert torch.equal(manager.run({"pair": pair})["doubled"], pair * 2)


def test_a_number_of_steps_may_be_numpys_as_a_number_of_rows_may():
    numpy = pytest.importorskip("numpy")
    with captured(True) as manager:
        given = batch_of(2)
        many = manager.run_many(numpy.int64(3), given, rows=numpy.int32(2))
        assert many.outputs["token"].t().tolist() == walks(given, 3)
        assert manager.run_many(3).outputs["token"].shape == (3, 2)


@pytest.mark.parametrize("rows", [3, 8], ids=["recorded", "eager"])
@pytest.mark.parametrize("given_away", ["token", "counts", "live"])
@both
def test_memory_of_the_ring_that_was_given_away_is_not_written_to(looped, given_away, rows):
    with captured(looped, Stop("token", (99,))) as manager:
        given = batch_of(rows)
        many = manager.run_many(4, given)
        named = {"token": many.outputs["token"], "counts": many.counts, "live": many.live}
        named[given_away].untyped_storage().resize_(0)
        calls = [lambda: manager.run_many(4), manager.run, lambda: manager.run(given)]
        calls += [lambda: manager.run_many(4, given)]
        calls += [lambda: manager.replay(4, 3)] if rows == 3 else []
        for call in calls:
            with pytest.raises(StaleRecordingError, match=r"ring .* has moved to another address"):
                call()
