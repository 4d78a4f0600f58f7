"""Slot and PadPolicy: what one persistent input of a step is, and what its padding rows hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphcap.errors import InputError


@dataclass(frozen=True)
class PadPolicy:
    """What a slot's padding rows hold: one finite value."""

    value: float | int | bool

    ZERO: ClassVar[PadPolicy]
    ONE: ClassVar[PadPolicy]

    @classmethod
    def fill(cls, value: float | int | bool) -> PadPolicy:
        return cls(value)


PadPolicy.ZERO = PadPolicy(0)
PadPolicy.ONE = PadPolicy(1)


@dataclass(frozen=True)
class Slot:
    """One persistent input.

    Attributes:
        row_shape: shape of one row; the slot's tensor is (max_batch, *row_shape).
        dtype: dtype; a batch has exactly this one.
        pad: what padding rows hold.
    """

    row_shape: tuple[int, ...]
    dtype: torch.dtype
    pad: PadPolicy = PadPolicy.ZERO


def check_pad(name: str, slot: Slot) -> None:
    """Raises `InputError` where the dtype cannot hold the pad value exactly, or it is not finite."""
    if not isinstance(slot.pad, PadPolicy):
        raise InputError(
            f"slot {name!r}: expected a PadPolicy, found {slot.pad!r}; use PadPolicy.fill(value)"
        )
    shape = slot.row_shape
    if not isinstance(shape, tuple) or not all(isinstance(n, int) and n > 0 for n in shape):
        raise InputError(
            f"slot {name!r}: expected a row shape of positive integers such as (), (4,), found {shape!r}"
        )
    value: Any = slot.pad.value
    try:
        stored = torch.tensor(value, dtype=slot.dtype, device="cpu").item()
        finite = math.isfinite(value)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        stored, finite = None, False
    if not finite or stored != value:
        raise InputError(
            f"slot {name!r}: pad value {value!r} is not a finite value of {slot.dtype}; "
            f"give one that the dtype holds exactly"
        )
