"""Whether a batch fits the slots of a step; asked before anything is launched."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphcap.buckets import is_count
from graphcap.errors import InputError
from graphcap.slots import Slot

_CPU = torch.device("cpu")


def rows_of(
    batch: Mapping[str, torch.Tensor],
    rows: int | None,
    slots: Mapping[str, Slot],
    device: torch.device,
    held: int,
) -> int:
    """The number of rows of `batch`.

    Args:
        batch: slot name -> tensor (n, *row_shape) of the slot's dtype, on the host or on `device`.
        rows: n, where `batch` is empty or to make sure.
        device: where the slots lie.
        held: real rows that the slots hold now; what a batch leaves out keeps them.

    Raises:
        InputError: names the slot, what was expected, what was found, and the cure.
    """
    found = rows
    for name, tensor in batch.items():
        slot = slots.get(name)
        if slot is None:
            raise InputError(f"unknown slot {name!r}; this step has {', '.join(sorted(slots))}")
        if not isinstance(tensor, torch.Tensor):
            raise InputError(
                f"slot {name!r}: expected a tensor, found {type(tensor).__name__}; "
                f"convert it with torch.as_tensor(value, dtype={slot.dtype})"
            )
        if tensor.layout != torch.strided or tensor.is_nested:
            raise InputError(
                f"slot {name!r}: expected a dense tensor, found "
                f"{'a nested one' if tensor.is_nested else f'layout {tensor.layout}'}; "
                f"convert it with .to_dense() or to_padded_tensor()"
            )
        shape, row_shape = tuple(tensor.shape), tuple(slot.row_shape)
        if not shape or shape[1:] != row_shape or (found is not None and shape[0] != found):
            rows_text = "n" if found is None else str(found)
            raise InputError(
                f"slot {name!r}: expected shape ({', '.join([rows_text, *map(str, row_shape)])})"
                f", found {shape}; every slot of a batch has the same number of rows"
            )
        if tensor.dtype != slot.dtype:
            raise InputError(
                f"slot {name!r}: expected dtype {slot.dtype}, found {tensor.dtype}; convert it "
                f"with .to({slot.dtype}), graphcap does not cast in silence"
            )
        if tensor.device not in (device, _CPU):
            raise InputError(
                f"slot {name!r}: expected a tensor on {device} or the CPU, found one on "
                f"{tensor.device}; move it with .to({str(device)!r})"
            )
        found = shape[0]
    if found is None:
        found = held
    if not is_count(found):
        raise InputError(
            f"a batch needs at least one row, as an integer, found {found!r}; "
            f"skip the step when there is nothing to decode"
        )
    missing = [name for name in slots if name not in batch]
    if missing and found > held:
        raise InputError(
            f"a batch of {found} rows follows one of {held} and leaves out slot(s) "
            f"{', '.join(missing)}, whose rows {held} to {found - 1} hold padding; "
            f"give every slot when the batch grows"
        )
    return int(found)


def check_agreed(agreed_batch: int, count: int) -> None:
    """Raises `InputError` where the ranks cannot have agreed on that batch: this one has `count` rows."""
    if not is_count(agreed_batch) or agreed_batch < count:
        raise InputError(
            f"agreed_batch is {agreed_batch!r} but this rank has {count} rows; "
            f"agree on the maximum over all ranks, as an integer"
        )
