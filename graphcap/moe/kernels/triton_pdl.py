# mypy: allow-untyped-defs
"""Programmatic dependent launch (PDL): a kernel starts while the one before it is still finishing.

Kernels here run between kernels of other libraries, so each of them keeps to two rules:

- Every program, also one that has nothing to do, calls `wait_for_previous` before it writes anything and
  before it reads anything but weights. That returns when the previous kernel has ended and its writes
  are visible; since that one has waited too, or is no PDL kernel, everything earlier has ended as well.
- `let_next_start` comes after it. A next kernel that knows nothing of PDL waits for the whole of this one.

So a kernel that always follows one of these may, before its wait, also read what is older than that one.

Where PDL is missing (an older device or Triton, another vendor, the interpreter) both are nothing.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

try:
    from triton.backends.nvidia.compiler import CUDAOptions
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    IN_TRITON = "launch_pdl" in CUDAOptions.__dataclass_fields__
except ImportError:  # Triton before 3.3, or one for other devices
    IN_TRITON = False

    @triton.jit
    def gdc_wait():
        pass

    @triton.jit
    def gdc_launch_dependents():
        pass


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@cache
def _on_device(device: torch.device) -> bool:
    return (
        IN_TRITON
        and device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def pdl_options(tensor: torch.Tensor) -> dict[str, Any]:
    """What a launch on `tensor`'s device adds to its keyword arguments: ``PDL``, for the kernel, and the
    launch option where it exists."""
    if _on_device(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
