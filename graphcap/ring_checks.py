"""What a ring is told to keep, held against what the step returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graphcap.errors import CaptureError


def is_spec(spec: object) -> bool:
    """Whether it is the shape and dtype of a row."""
    if not isinstance(spec, (tuple, list)) or len(spec) != 2:
        return False
    shape, dtype = spec
    return (
        isinstance(dtype, torch.dtype)
        and isinstance(shape, (tuple, list))
        and all(type(size) is int and size >= 0 for size in shape)
    )


def check_values(output: str, values: Sequence[int], dtype: torch.dtype) -> None:
    """What the output cannot hold would be cut to its bits, and end rows that hold those. Raises
    `CaptureError`."""
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        return
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    for value in values:
        if not least <= value <= most:
            raise CaptureError(
                f"the ring stops where output {output!r} is {value}, expected a value of its dtype "
                f"{dtype}, {least} to {most}; correct Stop(values=)"
            )


def check_output(
    outputs: Mapping[str, torch.Tensor],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """The output `name`. Raises `CaptureError` where it is missing or not of that row shape and dtype."""
    if name not in outputs:
        raise CaptureError(
            f"the ring keeps output {name!r}, and the step returns {', '.join(sorted(outputs))}; "
            f"name one of these in Ring(outputs=, stop=)"
        )
    tensor = outputs[name]
    found = tuple(tensor.shape)
    if found != (*found[:1], *shape) or not found or dtype not in (None, tensor.dtype):
        kind = "one element a row" if not shape else f"rows of shape {shape}"
        raise CaptureError(
            f"the ring expects output {name!r} to have {kind}"
            f"{'' if dtype is None else f' of {dtype}'}, found shape {found} of {tensor.dtype}; "
            f"declare in Ring(outputs=, stop=) what the step returns"
        )
    return tensor
