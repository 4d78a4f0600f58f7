"""What can be tuned: a device, a model and kernels for which the fused schedule has plans.

Imports no Triton, so that it can say that there is none.
"""

from __future__ import annotations

import torch

from graphcap.decode.kernels import DecodeKernels
from graphcap.decode.model_shape import ModelShape
from graphcap.decode.schedule import fused_obstacle
from graphcap.errors import BackendError, InputError
from graphcap.moe.kernels import has_triton


def check_device(device: torch.device) -> None:
    """Raises BackendError where `device` is no CUDA device."""
    if device.type != "cuda":
        raise BackendError(
            f"graphcap tune measures on the device that will serve: expected a CUDA device, found "
            f"{device.type}; run it on the machine with the GPU (--dry-run shows what it would try)"
        )


def check_triton() -> None:
    """Raises BackendError where graphcap's Triton kernels cannot be imported."""
    if not has_triton():
        raise BackendError(
            "graphcap tune measures Triton kernels: expected Triton 3.0 or newer, found none that can "
            "be imported; pip install triton"
        )


def check_shape(shape: ModelShape, dtype: torch.dtype) -> None:
    """Raises InputError where no plan is for this model, or for `dtype`."""
    if shape.is_hybrid:
        raise InputError(
            f"there is nothing to tune: expected a model whose layers all have full attention, found "
            f"{shape.name}, a hybrid, which runs by the plain schedule"
        )
    if dtype.itemsize != 2:
        raise InputError(
            f"there is nothing to tune in {str(dtype).removeprefix('torch.')}: expected bfloat16 or "
            f"float16, which tiles are for; give --dtype bfloat16"
        )


def check_tunable(
    shape: ModelShape, dtype: torch.dtype, device: torch.device, kernels: DecodeKernels
) -> None:
    """Raises:
    BackendError: there is no CUDA device, or no Triton.
    InputError: the fused schedule cannot run this model by these kernels, or not in `dtype`.
    """
    check_device(device)
    check_triton()
    check_shape(shape, dtype)
    obstacle = fused_obstacle(shape, kernels.cache_format, kernels)
    if obstacle is not None:
        raise InputError(f"there is nothing to tune: {obstacle}")
