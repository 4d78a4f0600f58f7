"""Slots: addresses that never change, pads that are declared, batches that are checked first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcap.errors import InputError
from graphcap.inputs import NUM_ROWS, PadPolicy, Slot, StaticInputs

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def tables() -> StaticInputs:
    return StaticInputs(
        8,
        {
            "ids": Slot((), torch.int32),
            "slot_mapping": Slot((), torch.int64, PadPolicy.fill(-1)),
            "lens": Slot((), torch.int32, PadPolicy.ONE),
            "blocks": Slot((3,), torch.int32),
            "x": Slot((5,), torch.bfloat16, PadPolicy.fill(0.5)),
        },
        "cpu",
    )


def batch(rows: int, value: int = 9) -> dict[str, torch.Tensor]:
    return {
        "ids": torch.full((rows,), value, dtype=torch.int32),
        "slot_mapping": torch.full((rows,), value, dtype=torch.int64),
        "lens": torch.full((rows,), value, dtype=torch.int32),
        "blocks": torch.full((rows, 3), value, dtype=torch.int32),
        "x": torch.full((rows, 5), value, dtype=torch.bfloat16),
    }


def load(inputs: StaticInputs, given: dict[str, torch.Tensor], rows: int | None = None) -> None:
    inputs.load(given, inputs.check(given, rows))
    inputs.restore_pads()


PADS = {"ids": 0, "slot_mapping": -1, "lens": 1, "blocks": 0, "x": 0.5}


def test_new_slots_hold_pads():
    inputs = tables()
    for name, value in PADS.items():
        assert (inputs[name] == value).all()
    assert inputs.rows == 0


@settings(max_examples=40)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_rows_beyond_the_batch_hold_their_pads_whatever_came_before(sizes: list[int]):
    inputs = tables()
    for turn, rows in enumerate(sizes, start=1):
        load(inputs, batch(rows, turn))
        for name, value in PADS.items():
            assert (inputs[name][:rows] == turn).all(), name
            assert (inputs[name][rows:] == value).all(), name
        assert inputs.views(4)[NUM_ROWS].tolist() == [rows]


def test_pads_come_back_whatever_a_step_wrote_there():
    inputs = tables()
    load(inputs, batch(3))
    inputs["x"].fill_(float("nan"))
    inputs["lens"].zero_()
    inputs.restore_pads()
    assert (inputs["x"][3:] == 0.5).all()
    assert (inputs["lens"][3:] == 1).all()
    assert inputs["x"][:3].isnan().all()  # real rows are the step's own business


def test_poison_fills_pads_only():
    inputs = tables()
    load(inputs, batch(3))
    inputs.poison_pads(3)
    assert inputs["x"][3:].isnan().all()
    assert (inputs["ids"][3:] == -1).all()
    assert (inputs["x"][:3] == 9).all()
    assert inputs.views(1)[NUM_ROWS].item() == 3


def test_addresses_never_change():
    inputs = tables()
    before = {name: inputs[name].data_ptr() for name in PADS}
    views = inputs.views(4)
    for rows in (8, 1, 5):
        load(inputs, batch(rows))
    assert {name: inputs[name].data_ptr() for name in PADS} == before
    again = inputs.views(4)
    assert all(again[name].data_ptr() == views[name].data_ptr() for name in views)
    assert all(views[name].shape[0] == 4 for name in PADS)
    assert all(address % 64 == inputs.arena.data_ptr() % 64 for address in before.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_shape", [(), (1,), (3,), (2, 3)])
def test_every_dtype_and_row_shape(dtype: torch.dtype, row_shape: tuple[int, ...]):
    # Next to a slot of wide words, so that the unit of the pad image is the odd one's.
    slots = {"odd": Slot(row_shape, dtype, PadPolicy.ONE), "wide": Slot((2,), torch.int64)}
    inputs = StaticInputs(5, slots, "cpu")
    ones = torch.ones(2, *row_shape).to(dtype)
    zeros = torch.zeros_like(ones)
    load(inputs, {"odd": zeros, "wide": torch.full((2, 2), 7)})
    wide = torch.complex64 if dtype.is_complex else torch.float32
    assert torch.equal(inputs["odd"][:2].to(wide), zeros.to(wide))
    assert (inputs["odd"][2:].to(wide) == 1).all()
    assert inputs["wide"].tolist() == [[7, 7]] * 2 + [[0, 0]] * 3


def test_launches_are_counted():
    inputs = tables()
    load(inputs, batch(3))
    assert inputs.launches == 1  # one multi-tensor copy, the row count with it
    load(inputs, batch(3))
    assert inputs.launches == 2
    load(inputs, {})
    assert inputs.launches == 2
    load(inputs, {}, rows=2)
    assert inputs.launches == 3
    load(inputs, {"ids": inputs["ids"][:2]})  # is there already
    assert inputs.launches == 3


def test_smaller_batch_may_leave_slots_out_and_larger_may_not():
    inputs = tables()
    load(inputs, batch(5))
    load(inputs, {"ids": torch.zeros(4, dtype=torch.int32)})
    assert inputs["lens"].tolist() == [9] * 4 + [1] * 4
    with pytest.raises(InputError, match=r"batch of 5 rows follows one of 4.*lens.*rows 4 to 4"):
        inputs.check({"ids": torch.zeros(5, dtype=torch.int32)})


@pytest.mark.parametrize(
    ("given", "rows", "words"),
    [
        ({"idz": torch.zeros(2)}, None, ["'idz'", "blocks, ids"]),
        ({"ids": [1, 2]}, None, ["'ids'", "list", "as_tensor"]),
        ({"ids": torch.zeros(2)}, None, ["'ids'", "torch.int32", "torch.float32", ".to("]),
        ({"ids": torch.zeros(2, 1, dtype=torch.int32)}, None, ["'ids'", "(n)", "(2, 1)"]),
        ({"ids": torch.zeros((), dtype=torch.int32)}, None, ["'ids'", "()"]),
        ({"blocks": torch.zeros(2, 4, dtype=torch.int32)}, None, ["(n, 3)", "(2, 4)"]),
        ({"ids": torch.zeros(2, dtype=torch.int32)}, 3, ["'ids'", "(3)", "(2,)"]),
        ({"ids": torch.zeros(2, dtype=torch.int32, device="meta")}, None, ["meta", ".to('cpu')"]),
        ({"ids": torch.zeros(0, dtype=torch.int32)}, None, ["at least one row", "0"]),
        ({}, None, ["at least one row"]),
        ({}, 0, ["at least one row"]),
        ({}, -2, ["at least one row", "-2"]),
        ({}, True, ["at least one row", "True"]),
    ],
)
def test_bad_batches_are_refused_before_anything_is_written(
    given: dict, rows: int | None, words: list[str]
):
    inputs = tables()
    before = inputs.arena.clone()
    with pytest.raises(InputError) as caught:
        inputs.check(given, rows)
    for word in words:
        assert word in str(caught.value)
    assert torch.equal(inputs.arena, before)
    assert inputs.launches == 0


def test_disagreeing_rows_name_the_second_slot():
    inputs = tables()
    wrong = {**batch(3), "x": torch.zeros(2, 5, dtype=torch.bfloat16)}
    with pytest.raises(InputError, match=r"'x'.*\(3, 5\).*\(2, 5\)"):
        inputs.check(wrong)


@pytest.mark.parametrize(
    "slot",
    [
        Slot((), torch.float32, PadPolicy.fill(float("nan"))),
        Slot((), torch.float32, PadPolicy.fill(float("inf"))),
        Slot((), torch.float16, PadPolicy.fill(1e6)),
        Slot((), torch.float32, PadPolicy.fill(0.1)),
        Slot((), torch.int8, PadPolicy.fill(300)),
        Slot((), torch.uint8, PadPolicy.fill(-1)),
        Slot((), torch.int32, PadPolicy.fill(0.5)),
        Slot((), torch.float32, PadPolicy.fill("zero")),  # type: ignore[arg-type]
        Slot((), torch.float32, 0),  # type: ignore[arg-type]
        Slot((0,), torch.float32),
    ],
)
def test_slots_that_cannot_be_padded_are_refused(slot: Slot):
    with pytest.raises(InputError, match="'bad'"):
        StaticInputs(2, {"good": Slot((), torch.int64), "bad": slot}, "cpu")


def test_reserved_name_no_slot_and_no_row():
    with pytest.raises(InputError, match="reserved"):
        StaticInputs(2, {NUM_ROWS: Slot((), torch.int32)}, "cpu")
    with pytest.raises(InputError, match="at least one slot"):
        StaticInputs(2, {}, "cpu")
    with pytest.raises(InputError, match="at least 1, found 0"):
        StaticInputs(0, {"x": Slot((), torch.int32)}, "cpu")


def rows_in_order() -> StaticInputs:
    inputs = StaticInputs(
        4, {"a": Slot((2,), torch.float32), "b": Slot((2,), torch.float32)}, "cpu"
    )
    values = torch.arange(8.0).view(4, 2)
    load(inputs, {"a": values, "b": values + 100})
    return inputs


def test_rows_can_be_moved_within_a_slot():
    inputs = rows_in_order()
    # The first sequence ended: the others move up.
    load(inputs, {"a": inputs["a"][1:4], "b": inputs["b"][1:4]})
    assert inputs["a"].tolist() == [[2, 3], [4, 5], [6, 7], [0, 0]]
    assert inputs["b"][0].tolist() == [102, 103]


def test_slots_can_be_exchanged():
    inputs = rows_in_order()
    load(inputs, {"a": inputs["b"], "b": inputs["a"]})
    assert inputs["a"][0].tolist() == [100, 101]
    assert inputs["b"][0].tolist() == [0, 1]


def test_batches_that_are_not_contiguous_or_want_gradients():
    inputs = rows_in_order()
    transposed = torch.arange(4.0, requires_grad=True).view(2, 2).t()
    load(inputs, {"a": transposed, "b": transposed.contiguous()})
    assert inputs["a"][:2].tolist() == inputs["b"][:2].tolist() == [[0, 2], [1, 3]]
    assert not inputs["a"].requires_grad
    assert not inputs.arena.requires_grad


def test_conjugated_batch_is_resolved():
    inputs = StaticInputs(2, {"z": Slot((), torch.complex64)}, "cpu")
    load(inputs, {"z": torch.tensor([1 + 2j, 3 - 1j]).conj()})
    assert inputs["z"].tolist() == [1 - 2j, 3 + 1j]


def test_snapshot_and_restore():
    inputs = tables()
    load(inputs, batch(5))
    saved = inputs.snapshot()
    inputs.clear()
    inputs.restore_pads()
    assert (inputs["lens"] == 1).all()
    inputs.restore(saved)
    assert inputs.rows == 5
    assert inputs["lens"].tolist() == [9] * 5 + [1] * 3
    assert inputs.views(1)[NUM_ROWS].item() == 5


def test_slots_made_in_inference_mode_can_be_loaded_outside():
    with torch.inference_mode():
        inputs = tables()
    load(inputs, batch(2))
    assert inputs["ids"].tolist() == [9, 9] + [0] * 6
