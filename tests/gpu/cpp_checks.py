"""What the tests of the kernels in CUDA C++ share."""

from __future__ import annotations

import pytest
import torch

from graphcap.cuda import source

BF16, HALF = torch.bfloat16, torch.float16
NAN = float("nan")
STEP = {BF16: 2.0**-8, HALF: 2.0**-11}
"""Of a rounding, relative to the value."""


@pytest.fixture(autouse=True)
def compiles(device: torch.device) -> None:
    """Of every test of a module that imports it: they need NVRTC, and draw anew at each run."""
    why = source.obstacle(device)
    if why:
        pytest.skip(why)
    torch.manual_seed(torch.initial_seed() % 2**31)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
