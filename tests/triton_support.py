"""What the tests of the Triton kernels share: the device, poisoned buffers, calls with scratch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from graphcap.operations import Operation

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# The interpreter rounds bfloat16 towards zero, so two roundings may differ from the exact result.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

INTEGER_POISON = 1_234_567_890

Case = TypeVar("Case")


def sizes(small: Sequence[Case], real: Sequence[Case]) -> list[Case]:
    """Small odd sizes everywhere; those of real models only where the kernels run at speed."""
    return [*small, *(real if ON_GPU else [])]


def generator(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def normal(
    seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> torch.Tensor:
    values = torch.randn(*shape, generator=generator(seed, DEVICE), device=DEVICE)
    return (values * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A buffer that nothing has been written to: NaN, or an integer no result may contain."""
    value = float("nan") if dtype.is_floating_point else INTEGER_POISON
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


def run(op: Operation, *args: Any) -> None:
    """Call `op` as a pool would: with the scratch it declares, poisoned."""
    plan = {} if op.scratch is None else op.scratch(*args)
    op(*args, **{name: poisoned(*shape, dtype=dtype) for name, (shape, dtype) in plan.items()})


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """`actual`, computed in `dtype`, against a float64 reference."""
    tolerance = TOLERANCE[dtype]
    expected = expected.double().cpu()
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        actual.double().cpu(), expected, rtol=tolerance, atol=tolerance * max(scale, 1e-3)
    )
