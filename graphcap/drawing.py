"""Drawing: batches for verification, and memory filled with what nothing may depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from graphcap.inputs import Inputs
from graphcap.slots import Slot

Example = Callable[[int, torch.Generator], Mapping[str, torch.Tensor]]
"""Given a number of rows and a seeded CPU generator: a realistic batch with every slot."""

_DRAWN = 16
"""Batches that are drawn to find one for padding to meet."""


class Drawing:
    """Draws batches, the same ones in each process.

    Args:
        inputs: the slots.
        example: makes realistic batches. Without it floating-point slots are drawn from N(0, 1),
            booleans at random, and integer slots, whose valid range is not known, keep their pad
            value; `note` says so.
    """

    def __init__(self, inputs: Inputs, example: Example | None) -> None:
        self._inputs = inputs
        self._example = example
        self._generator = torch.Generator("cpu").manual_seed(20240917)
        unvaried = [n for n, s in inputs.slots.items() if _is_integer(s.dtype)]
        self._has_integers = bool(unvaried)
        self.note: str | None = None
        if example is None and unvaried:
            self.note = (
                f"verified with integer slots at their pad values ({', '.join(unvaried)}); "
                f"give CaptureManager an example to vary them"
            )

    def load(self, rows: int, shared: bool = False) -> None:
        """Bring a fresh batch of `rows` rows into the slots; with `shared` one in which a real row and
        padding meet in the same place, if the example ever gives one: see `_most_shared`."""
        batch = self._draw(rows, shared)
        self._inputs.load(batch, self._inputs.check(batch, rows))

    def _draw(self, rows: int, shared: bool) -> Mapping[str, torch.Tensor]:
        if self._example is not None:
            number = _DRAWN if shared and self._has_integers else 1
            drawn = [self._example(rows, self._generator) for _ in range(number)]
            return _most_shared(drawn, self._inputs.slots) if number > 1 else drawn[0]
        batch: dict[str, torch.Tensor] = {}
        for name, slot in self._inputs.slots.items():
            shape = (rows, *slot.row_shape)
            if slot.dtype == torch.bool:
                batch[name] = torch.rand(shape, generator=self._generator, device="cpu") < 0.5
            elif _is_integer(slot.dtype):
                batch[name] = torch.full(shape, slot.pad.value, dtype=slot.dtype, device="cpu")
            else:
                batch[name] = torch.randn(shape, generator=self._generator, device="cpu").to(
                    slot.dtype
                )
        return batch


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, or with what stands out among integers."""
    with torch.inference_mode():  # also where the step made its tensors in that mode
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(-1 if tensor.dtype.is_signed else 1)


def memory(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def distinct(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory, as those of an expanded tensor do."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return not any(length > 1 and stride == 0 for length, stride in sizes)


def _most_shared(
    batches: Sequence[Mapping[str, torch.Tensor]], slots: Mapping[str, Slot]
) -> Mapping[str, torch.Tensor]:
    """Of `batches` the first in which most integer slots have, in a real row, the value that padding has.

    Where that value is a place to write to (a slot of a cache), padding then overwrites the real row,
    which a batch without it would not show. A negative one counts from the end when it indexes: it
    meets the largest value that was drawn.
    """
    pads = {name: slot.pad.value for name, slot in slots.items() if _is_integer(slot.dtype)}
    for name, value in pads.items():
        if value < 0:
            pads[name] = max(int(b[name].max()) for b in batches if name in b) if batches else value
    return max(
        batches, key=lambda b: sum(bool((b[n] == v).any()) for n, v in pads.items() if n in b)
    )


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
