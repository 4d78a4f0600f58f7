"""How a batch reaches the slots: by kept views, and from the host through images, here without a GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_host_work import Operations

from graphcap import staging
from graphcap.inputs import PadPolicy, Slot, StaticInputs
from graphcap.staging import SlotRows, Staging

SLOTS = {
    "token": Slot((), torch.int32),
    "x": Slot((3,), torch.float32, PadPolicy.fill(-2)),
    "flag": Slot((), torch.bool),
    "wave": Slot((2, 2), torch.complex64),
    "table": Slot((5,), torch.int64, PadPolicy.fill(-1)),
}
ROWS = 6


class Event:
    """Counts what is waited for and recorded."""

    made: list[Event]

    def __init__(self) -> None:
        self.seen: list[str] = []
        Event.made.append(self)

    def synchronize(self) -> None:
        self.seen.append("waited")

    def record(self, stream: Any) -> None:
        assert stream == "current"
        self.seen.append("recorded")


@pytest.fixture(params=[False, True], ids=["", "made in inference mode"])
def far(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StaticInputs:
    """Slots to which every batch comes from another device, as from the host to a GPU."""
    Event.made = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    zeros = torch.zeros

    def unpinned(*args, pin_memory=False, **options):
        return zeros(*args, **options)

    monkeypatch.setattr(staging.torch, "zeros", unpinned)

    # As on a GPU, but for the slots themselves, which lie on the host.
    class OnGpu(StaticInputs):
        def _layout(self) -> None:
            super()._layout()
            self.device = torch.device("cuda:0")

    with torch.inference_mode(request.param):
        return OnGpu(ROWS, SLOTS, "cpu")


def batch_of(rows: int, seed: int, names: Any = SLOTS) -> dict[str, torch.Tensor]:
    """Some of the tensors with odd strides, or conjugated."""
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    batch = {}
    for name in names:
        slot = SLOTS[name]
        tensor = torch.randn(rows, *slot.row_shape, generator=generator).mul(9).to(slot.dtype)
        if slot.dtype.is_complex and draw.random() < 0.5:
            tensor = (tensor + 1j).conj()
        elif draw.random() < 0.5:
            tensor = torch.stack([tensor, tensor], -1)[..., 0]
        batch[name] = tensor
    return batch


def hold(inputs: StaticInputs, batch: dict[str, torch.Tensor], rows: int) -> None:
    inputs.restore_pads()
    for name, tensor in batch.items():
        assert torch.equal(inputs[name][:rows], tensor), name
        pad = torch.tensor(SLOTS[name].pad.value, dtype=SLOTS[name].dtype)
        assert torch.equal(inputs[name][rows:], pad.expand_as(inputs[name][rows:]))
    assert int(inputs.views(1)["num_rows"]) == inputs.rows == rows


@pytest.mark.parametrize("from_host", [True, False])
def test_any_batches_one_after_another(far: StaticInputs, from_host: bool) -> None:
    inputs = far if from_host else StaticInputs(ROWS, SLOTS, "cpu")
    held: dict[str, torch.Tensor] = {}
    for turn in range(60):
        rows = turn * 7 % ROWS + 1
        names = list(SLOTS) if rows > inputs.rows else list(SLOTS)[turn % 3 :]
        given = batch_of(rows, turn, names)
        held = {name: given.get(name, held[name][:rows] if held else None) for name in SLOTS}
        before = inputs.launches
        inputs.load(given, rows)
        # Spans of one image are copied as one where they are neighbours; near ones by dtype.
        assert inputs.launches - before <= (2 if from_host else 1 + len(SLOTS))
        hold(inputs, held, rows)


def test_images_are_used_in_turn_and_waited_for(far: StaticInputs) -> None:
    for turn in range(2 * Staging.COPIES + 1):
        far.load(batch_of(2, turn), 2)
    assert [event.seen for event in Event.made] == [
        ["waited", "recorded"] * 2,
        ["waited", "recorded"] * 3,
        ["waited", "recorded"] * 2,
        ["waited", "recorded"] * 2,
    ]


def plain(rows: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.ones(rows, *slot.row_shape, dtype=slot.dtype) for name, slot in SLOTS.items()
    }


def operations(inputs: StaticInputs, batch: dict[str, torch.Tensor], rows: int) -> list[str]:
    with Operations() as seen:
        inputs.load(batch, rows)
    names = [name.removeprefix("aten.").split(".")[0] for name in seen.names]
    return [name for name in names if name != "detach"]  # which older torch adds to views


def test_a_batch_from_the_host_takes_one_operation_a_slot(far: StaticInputs) -> None:
    given = plain(4)
    far.load(given, 4)
    for _ in range(Staging.COPIES):  # each image makes its views once
        far.load(given, 4)
    # The row count, each slot into the image, the image to the arena.
    assert operations(far, given, 4) == ["fill_", *["copy_"] * len(SLOTS), "copy_"]


def test_a_near_batch_makes_views_of_what_is_given_alone() -> None:
    inputs, given = StaticInputs(ROWS, SLOTS, "cpu"), plain(4)
    inputs.load(given, 4)
    # Two views of each tensor given, none of the slots; one copy for all.
    assert operations(inputs, given, 4) == ["view"] * 2 * len(SLOTS) + ["_foreach_copy_"]
    assert operations(inputs, {}, 4) == []
    there = {name: inputs[name][:4] for name in SLOTS}
    assert operations(inputs, there, 4) == [], "it is there already"


@pytest.mark.parametrize("row_shape", [(), (1,), (1, 1)])
def test_a_single_element_of_any_stride(row_shape: tuple[int, ...]) -> None:
    inputs = StaticInputs(1, {"one": Slot(row_shape, torch.int32)}, "cpu")
    wide = torch.full((1, *row_shape, 3), 7, dtype=torch.int32)
    inputs.load({"one": wide[..., 1]}, 1)
    assert inputs["one"].flatten().tolist() == [7]


def test_a_slot_that_was_moved_is_followed() -> None:
    """A step that runs eagerly reads the slot where it is now."""
    inputs, given = StaticInputs(ROWS, SLOTS, "cpu"), plain(4)
    inputs.load(given, 4)
    moved = torch.zeros(ROWS, 3)
    inputs["x"].data = moved
    inputs.load(given, 4)
    assert torch.equal(moved[:4], given["x"])
    assert torch.equal(inputs.views(4)["x"], given["x"])


def test_no_more_views_are_kept_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "MOST_KEPT", 3)
    rows = SlotRows({"x": torch.arange(8)})
    for count in (1, 2, 3, 4, 5, 1):
        address, view, as_bytes = rows.of("x", count)
        assert view.tolist() == list(range(count))
        assert as_bytes.tolist() == view.view(torch.uint8).tolist()
        assert address == view.data_ptr()
        assert len(rows._kept) <= 3
    assert rows.of("x", 1)[1] is view
