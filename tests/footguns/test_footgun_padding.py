"""Footguns of padding: cases 20 to 23 and their kin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from toy import CPU, WIDTH, ToyMoe, floats, manager_of, moe_manager

from graphcap.decode.step import decode_slots
from graphcap.errors import InputError
from graphcap.inputs import NUM_ROWS, PadPolicy, Slot, StaticInputs
from graphcap.manager import CaptureManager
from graphcap.pool import BufferPool

F32, I64 = torch.float32, torch.int64
CACHE = 16


def captured(step: Any, **options: Any) -> CaptureManager:
    manager = manager_of(step, max_batch=8, buckets=(1, 4), **options)
    assert not manager.capture().failures
    return manager


def refused(step: Any, **options: Any) -> str:
    """What verification says of the buckets that have padding; the others are recorded."""
    failures = manager_of(step, max_batch=8, buckets=(1, 4), **options).capture().failures
    assert set(failures) == {4, 8}
    return failures[4]


# -- 20 ------------------------------------------------------------------------------------------


def scaled(inputs: Any) -> Any:
    """As an FP8 layer does: one scale for the whole buffer, then rounding."""
    x = inputs["x"]
    scale = x.abs().amax() / 448
    return {"y": torch.round(x / scale) * scale}


def test_20_a_batch_wide_maximum_sees_declared_pads_at_every_run():
    """Elsewhere: a maximum over the whole buffer, an FP8 scale, picked up garbage in padding rows.
    Here: pads hold finite, declared values at every run, not only the first."""
    manager = captured(scaled)
    manager.run({"x": floats(8) * 1e6})  # what the rows hold that are padding from here on
    for rows in (3, 5, 6):
        x = floats(rows, seed=rows)
        manager.inputs["x"][rows:].fill_(float("nan"))
        assert torch.equal(manager.run({"x": x})["y"], scaled({"x": x})["y"])
        assert (manager.inputs["x"][rows:] == 0).all()


def test_20_kin_a_step_that_writes_into_its_pads():
    """Kin: a step that leaves NaN in its own padding rows."""

    def step(inputs: Any) -> Any:
        x = inputs["x"]
        y = scaled(inputs)["y"]
        is_pad = torch.arange(x.shape[0])[:, None] >= inputs[NUM_ROWS]
        x.masked_fill_(is_pad, float("nan"))
        return {"y": y}

    manager = captured(step)
    for _ in range(3):
        assert torch.equal(manager.run({"x": floats(3)})["y"], scaled({"x": floats(3)})["y"])


MIXING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(0),
    "mean": lambda x: x - x.mean(0),
    "flip": lambda x: x.flip(0),
    "sort": lambda x: x.sort(0)[0],
    "roll": lambda x: x.roll(1, 0),
    "last row": lambda x: x + x[-1],
    "variance": lambda x: x / (x.var(0, correction=0) + 1),
}


@pytest.mark.parametrize("what", MIXING)
def test_20_kin_other_ways_to_feel_padding(what: str):
    """Kin: a softmax, mean, sort or variance over the rows: refused by verification, unless
    `rows_mix=True` says that it is meant."""

    def step(inputs: Any) -> Any:
        return {"y": MIXING[what](inputs["x"])}

    text = refused(step)
    assert "what padding rows hold changes output 'y'" in text
    assert "inputs['num_rows']" in text
    assert "rows_mix=True" in text
    assert not manager_of(step, rows_mix=True).capture().failures


@pytest.mark.parametrize("divide", [lambda x: x / x.shape[0], lambda x: x / len(x)])
def test_20_kin_the_number_of_rows_as_a_value(divide: Any):
    """Kin: `x.shape[0]` as a value, which is the bucket's: the report tells of it."""
    (note,) = captured(lambda inputs: {"y": divide(inputs["x"])}).report.notes
    assert "output 'y' of every row is far" in note
    assert "inputs['num_rows']" in note
    right = captured(lambda inputs: {"y": inputs["x"] / inputs[NUM_ROWS].clamp(min=1)})
    assert right.report.notes == ()
    assert torch.equal(right.run({"x": floats(3)})["y"], floats(3) / 3)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (float("nan"), F32),
        (float("inf"), F32),
        (0.1, F32),
        (1e6, torch.float16),
        (300, torch.int8),
        (-1, torch.uint8),
        (0.5, torch.int32),
        (None, F32),
        ("0", F32),
    ],
)
def test_20_kin_a_pad_value_that_the_dtype_cannot_hold(value: Any, dtype: torch.dtype):
    """Kin: a pad value that is not finite, or that the dtype does not hold exactly."""
    with pytest.raises(InputError, match=r"slot 'x': pad value .* not a finite value of"):
        StaticInputs(2, {"x": Slot((), dtype, PadPolicy.fill(value))}, CPU)


def test_20_kin_a_users_nan_stays_in_its_row_and_run():
    """Kin: a NaN in a real row, which stays in that row and that run."""
    manager = captured(lambda inputs: {"y": inputs["x"] * 2})
    x = floats(5)
    x[2] = float("nan")
    y = manager.run({"x": x})["y"]
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 4]].isfinite().all()
    assert torch.equal(manager.run({"x": floats(6)})["y"], floats(6) * 2)


# -- 21 ------------------------------------------------------------------------------------------

VALUES = floats(CACHE, 3)


def attention(inputs: Any) -> Any:
    """Uniform attention over the first `length` entries; 0 entries are 0 divided by 0."""
    lengths = inputs["lengths"]
    seen = torch.arange(CACHE)[None] < lengths[:, None]
    scores = torch.zeros(lengths.shape[0], CACHE).masked_fill(~seen, -float("inf"))
    return {"y": scores.softmax(-1) @ VALUES}


def draw_lengths(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"lengths": torch.randint(1, CACHE, (rows,), generator=generator)}


def with_lengths(pad: PadPolicy) -> CaptureManager:
    return captured(attention, slots={"lengths": Slot((), I64, pad)}, example=draw_lengths)


def test_21_a_pad_row_has_length_1():
    """Elsewhere: a padding row of sequence length 0 made attention divide 0 by 0.
    Here: lengths are padded with 1, and outputs of padding rows stay finite."""
    manager = with_lengths(PadPolicy.ONE)
    for rows in (8, 3, 1):
        given = draw_lengths(rows, torch.Generator().manual_seed(rows))
        out = manager.run(given)["y"]
        torch.testing.assert_close(out, attention(given)["y"])
        bucket = manager.ladder.bucket_for(rows)
        assert manager.recording(bucket).outputs["y"].isfinite().all()
    assert manager.report.notes == ()


def test_21_kin_the_decode_steps_own_lengths_are_padded_with_1():
    """Kin: graphcap's own decode step."""
    slots = decode_slots(blocks_per_sequence=4)
    assert slots["seq_lens"].pad == PadPolicy.ONE
    assert slots["slot_mapping"].pad == PadPolicy.fill(-1)


def test_21_kin_a_length_padded_with_0_is_told_of():
    """Kin: a length padded with 0 all the same: the NaN is never returned, and the report tells of it."""
    manager = with_lengths(PadPolicy.ZERO)
    (note,) = manager.report.notes
    assert "padding rows give NaN in output 'y'" in note
    assert "a length wants 1" in note
    given = {"lengths": torch.tensor([3, 9, 1])}
    out = manager.run(given)["y"]
    assert out.shape == (3, WIDTH)
    assert out.isfinite().all()


# -- 22 ------------------------------------------------------------------------------------------


def unpadded_hits(rows: int, seed: int) -> torch.Tensor:
    step = ToyMoe(BufferPool(CPU))
    step(step.batch(rows, seed))
    return step.hits


def test_22_pads_reach_no_expert():
    """Elsewhere: padding rows were routed like tokens, read extra experts' weights and counted as load.
    Here: pads reach no expert; hit counts are those of the unpadded batch."""
    step, manager = moe_manager()
    manager.capture()
    step.hits.zero_()
    manager.run(step.batch(5, seed=1))
    assert torch.equal(step.hits[:-1], unpadded_hits(5, 1)[:-1])
    assert step.hits[-1] == (8 - 5) * step.top_k  # dropped


def test_22_kin_after_a_larger_batch_and_in_every_bucket():
    """Kin: after a larger batch, in every bucket, with `rows=` alone, over many replays."""
    step, manager = moe_manager()
    manager.capture()
    for rows in (8, 1, 6, 3, 2, 5):
        manager.run(step.batch(rows, seed=rows))
        step.hits.zero_()
        for _ in range(3):
            manager.run()
        assert torch.equal(step.hits[:-1], 3 * unpadded_hits(rows, rows)[:-1])
    manager.run(step.batch(8, seed=9))
    step.hits.zero_()
    manager.run(rows=3)
    assert step.hits[:-1].sum() == 3 * step.top_k


def test_22_kin_garbage_in_pads():
    """Kin: garbage in padding rows: other ids, NaN in their hidden states."""
    step, manager = moe_manager()
    manager.capture()
    wanted = manager.run(step.batch(3))["out"].clone()
    step.hits.zero_()
    manager.inputs["row_ids"][3:] = 2
    manager.inputs["hidden"][3:] = float("nan")
    assert torch.equal(manager.run()["out"], wanted)
    assert step.hits[:-1].sum() == 3 * step.top_k


@pytest.mark.parametrize("pad", [10, -1])
def test_22_kin_a_pad_token_outside_the_vocabulary(pad: int):
    """Kin: a pad token outside the vocabulary: named while warming up, before anything is recorded."""
    table = torch.nn.Embedding(10, WIDTH)
    slots = {"token": Slot((), I64, PadPolicy.fill(pad))}
    failures = (
        manager_of(lambda inputs: {"y": table(inputs["token"])}, slots=slots).capture().failures
    )
    assert set(failures) == {2, 4}
    assert "warmed up" in failures[4]
    assert "out of range" in failures[4]


# -- 23 ------------------------------------------------------------------------------------------


class CacheStep:
    """Writes each row into its slot of a cache, then reads it back. The last slot is padding's."""

    def __init__(self) -> None:
        self.cache = torch.zeros(CACHE + 1, WIDTH)

    def __call__(self, inputs: Any) -> Any:
        self.cache[inputs["slot"]] = inputs["x"]
        return {"y": self.cache[inputs["slot"]] * 2}

    @staticmethod
    def example(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        slots = torch.randperm(CACHE, generator=generator)[:rows]
        return {"x": torch.randn(rows, WIDTH, generator=generator), "slot": slots}


def cache_slots(pad: int) -> dict[str, Slot]:
    return {"x": Slot((WIDTH,), F32), "slot": Slot((), I64, PadPolicy.fill(pad))}


def test_23_pads_never_write_to_a_real_cache_slot():
    """Elsewhere: a batch of 3 after one of 8: rows 3 to 7 held old requests and wrote into their cache.
    Here: pads point nowhere at every run, whatever the rows held before."""
    step = CacheStep()
    manager = captured(step, slots=cache_slots(CACHE), example=step.example)
    step.cache.zero_()
    first = {"x": floats(8), "slot": torch.arange(8)}
    manager.run(first)
    second = {"x": floats(3, 1), "slot": torch.arange(8, 11)}
    assert torch.equal(manager.run(second)["y"], floats(3, 1) * 2)
    assert torch.equal(step.cache[:8], floats(8))
    assert torch.equal(step.cache[8:11], floats(3, 1))
    assert not step.cache[11:CACHE].any()


def test_23_kin_fewer_rows_without_a_batch():
    """Kin: fewer rows by `rows=` alone, or by an agreed batch."""
    step = CacheStep()
    manager = captured(step, slots=cache_slots(CACHE), example=step.example)
    manager.run({"x": floats(8), "slot": torch.arange(8)})
    step.cache.zero_()
    manager.run(rows=3)
    manager.run({"x": floats(2, 1), "slot": torch.arange(8, 10)}, agreed_batch=7)
    written = [index for index in range(CACHE) if step.cache[index].any()]
    assert written == [0, 1, 2, 8, 9]


@pytest.mark.parametrize("pad", [0, -1], ids=["slot 0", "the last, by counting from the end"])
def test_23_kin_a_pad_value_that_is_a_real_slot(pad: int):
    """Kin: a pad value that is a real slot, as 0 is, or -1 where it counts from the end: found by
    verification, with a batch in which a real row is there."""

    class Without(CacheStep):
        def __init__(self) -> None:
            self.cache = torch.zeros(CACHE, WIDTH)

    step = Without()
    text = refused(step, slots=cache_slots(pad), example=step.example)
    assert "what padding rows hold changes output 'y'" in text
    assert "give that slot a pad value that no real row has" in text


def test_23_kin_rows_that_move_up():
    """Kin: rows that move up when a sequence ends."""
    step = CacheStep()
    manager = captured(step, slots=cache_slots(CACHE), example=step.example)
    manager.run({"x": floats(4), "slot": torch.arange(4)})
    step.cache.zero_()
    slots = manager.inputs
    out = manager.run({name: slots[name][1:4] for name in ("x", "slot")})["y"]
    assert torch.equal(out, floats(4)[1:] * 2)
    assert not step.cache[0].any()
    assert torch.equal(step.cache[1:4], floats(4)[1:])
