"""The table of cosines and sines that RoPE turns queries and keys by."""

from __future__ import annotations

import torch


def rotary_table(
    dim: int,
    theta: float,
    positions: int,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Cosines and sines of RoPE (https://arxiv.org/abs/2104.09864): (positions, dim), cosines first.

    Computed in float32 and rounded to the model's dtype, as transformers does.
    """
    if torch.device(device).type == "meta":
        return torch.empty(positions, dim, device=device, dtype=dtype)
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], 1).to(device=device, dtype=dtype)
