"""What an operation was called with, so that two runs of a step can be compared."""

from __future__ import annotations

from typing import Any

import torch

_COMPARED = 4096


def signature_of(values: Any, *, contents: bool = False) -> tuple[Any, ...]:
    """Shapes, dtypes and Python values, flat, in order.

    Args:
        contents: also what small tensors hold; for constants made from Python values.
    """
    return tuple(_flat(values, contents))


def _flat(value: Any, contents: bool) -> Any:
    if isinstance(value, torch.Tensor):
        held: Any = ()
        if contents and value.device.type != "meta" and value.numel() <= _COMPARED:
            held = tuple(map(repr, value.reshape(-1).tolist()))
        yield "tensor", tuple(value.shape), str(value.dtype), held
    elif isinstance(value, dict):
        for key in value:
            yield from _flat(value[key], contents)
    elif isinstance(value, (tuple, list)):
        yield f"of {len(value)}"
        for item in value:
            yield from _flat(item, contents)
    elif isinstance(value, (int, float, complex, str, bool)) or value is None:
        yield repr(value)
    else:  # dtypes, devices; generators and other objects are told apart by type only
        is_plain = isinstance(value, (torch.dtype, torch.device, torch.layout))
        yield str(value) if is_plain else type(value).__name__


def difference(before: tuple[Any, ...], after: tuple[Any, ...]) -> str | None:
    """The first value in which two signatures differ, in words; None: they are equal."""
    for first, second in zip(before, after, strict=False):
        if first == second:
            continue
        if isinstance(first, tuple) and isinstance(second, tuple):
            for name, a, b in zip(
                ("a tensor of shape", "dtype"), first[1:3], second[1:3], strict=True
            ):
                if a != b:
                    return f"{name} {_short(a)}, then {_short(b)}"
            return f"a constant of {_held(first[3])}, then {_held(second[3])}"
        return f"{_short(first)}, then {_short(second)}"
    return None if len(before) == len(after) else "another number of arguments"


def _held(values: tuple[str, ...]) -> str:
    return f"[{', '.join(values[:4])}{', …' if len(values) > 4 else ''}]"


def _short(value: Any) -> str:
    return str(value)[:60]
