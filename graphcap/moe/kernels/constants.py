"""Constants of the torch kernels, as tensors that exist once.

torch wraps a Python number into a new tensor at every call (``x.add_(eps)``), which is an allocation
per token. A constant is made at the first, warming call and lives as long as the process.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def constant(value: float | int, like: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """`value` as a tensor of no dimension on device `like`."""
    return torch.full((), value, dtype=dtype, device=like)
