"""A platform for vLLM that answers as an H200 would, on a machine that has none.

It serves tests of how vLLM and the plugin rewrite a configuration: cudagraph mode, capture sizes,
compilation mode, worker and runner. Nothing can run on it: the compiled modules are empty, and the
only operations that exist are those that vLLM asks, while it is imported, what the hardware can do.

vLLM imports this module only under `env=PRETEND_H200` (environments.py), and logs that it did.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec

import torch

COMPILED_MODULES = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
# What the kernels of the wheel support on compute capability 9.0.
CAPABILITIES = {
    "cutlass_scaled_mm_supports_fp8": True,
    "cutlass_scaled_mm_supports_block_fp8": True,
    "cutlass_scaled_mm_supports_fp4": False,
    "cutlass_group_gemm_supported": True,
}

# Before the import of vllm.platforms.cuda, which imports the first of them.
for _name in COMPILED_MODULES:
    sys.modules.setdefault(_name, importlib.util.module_from_spec(ModuleSpec(_name, None)))

_library = torch.library.Library("_C", "FRAGMENT")  # its operations live as long as it does
for _name, _answer in CAPABILITIES.items():
    _library.define(f"{_name}(int cuda_device_capability) -> bool")
    _library.impl(_name, lambda _, answer=_answer: answer, "CompositeExplicitAutograd")

from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class PretendH200Platform(NonNvmlCudaPlatform):
    """One H200: the real CUDA platform, except for what it would ask the device."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(major=9, minor=0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H200"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 150_000_000_000  # bytes

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False  # torch cannot pin memory without a driver

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132

    @classmethod
    def device_count(cls) -> int:
        return 1

    @classmethod
    def get_cuda_runtime_major(cls) -> int:
        return 13
