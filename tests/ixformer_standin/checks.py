"""What the stand-in demands of its callers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_depth = 0

MODEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The library documents the first two for most operations; float32 is for tests that want exactness."""


class Misuse(TypeError):
    """An operation was called with what the real one would reject or, worse, misread."""


def inside() -> bool:
    """Whether an operation of the stand-in is running: what it does is not its caller's doing."""
    return _depth > 0


def operation(function: Function) -> Function:
    """Marks the run of an operation; see `inside`. The signature stays."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        global _depth
        _depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _depth -= 1

    return wrapper  # type: ignore[return-value]


def tensor(
    name: str,
    value: Any,
    shape: tuple[int | None, ...],
    *dtypes: torch.dtype,
    dense: bool = True,
) -> None:
    """`value` is a tensor of this shape (None: any) and one of the dtypes; `dense`: contiguous."""
    if not isinstance(value, torch.Tensor):
        raise Misuse(f"{name}: expected a tensor, found {type(value).__name__}")
    if value.dtype not in dtypes:
        raise Misuse(f"{name}: expected {' or '.join(map(str, dtypes))}, found {value.dtype}")
    fits = len(shape) == value.dim() and all(
        want is None or want == size for want, size in zip(shape, value.shape, strict=True)
    )
    if not fits:
        raise Misuse(f"{name}: expected shape {shape}, found {tuple(value.shape)}")
    if dense and not value.is_contiguous():
        raise Misuse(f"{name}: expected a contiguous tensor, found strides {value.stride()}")


def number(name: str, value: Any, kind: type, wanted: Any = None) -> None:
    if type(value) is not kind:
        raise Misuse(f"{name}: expected {kind.__name__}, found {type(value).__name__}")
    if wanted is not None and value != wanted:
        raise Misuse(f"{name}: expected {wanted}, found {value}")


def rows_without_gaps(name: str, value: torch.Tensor) -> None:
    """(M, heads, D) whose rows may lie apart, but not what is in a row."""
    if value.stride()[1:] != (value.shape[2], 1):
        raise Misuse(f"{name}: expected rows without gaps, found strides {value.stride()}")


def host_range(name: str, value: torch.Tensor, low: int, high: int) -> None:
    """On the host, where values can be looked at: low <= value < high. A card would read elsewhere."""
    if value.is_cpu and value.numel() and not (low <= int(value.min()) <= int(value.max()) < high):
        raise Misuse(f"{name}: expected values of {low} to {high - 1}, found {value.tolist()}")
