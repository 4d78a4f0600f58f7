"""What a measured layer plan belongs to: a device, the sizes that its kernels see, and the kernels."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphcap import __version__
from graphcap.decode.kernel_code import code_of
from graphcap.decode.model_shape import ModelShape

DIMENSIONS = (
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_experts",
    "top_k",
    "moe_intermediate_size",
)
"""Sizes that the kernels of a plan see. The number of layers, the vocabulary and dense layers, whose
products cuBLAS makes, are not among them."""

SOURCES = (
    "cuda/attend.cu",
    "cuda/attend_cluster.cuh",
    "cuda/attend_softmax.cuh",
    "cuda/attend_tiles.cuh",
    "cuda/choice.cuh",
    "cuda/common.cuh",
    "cuda/down.cu",
    "cuda/gate_up.cu",
    "cuda/linear.cu",
    "decode/kernels/cuda_attend.py",
    "decode/kernels/cuda_linear.py",
    "decode/kernels/triton_fused_attention.py",
    "decode/kernels/triton_fused_linear.py",
    "decode/kernels/triton_norm.py",
    "moe/kernels/cuda_down.py",
    "moe/kernels/cuda_gate_up.py",
    "moe/kernels/triton.py",
    "moe/kernels/triton_align.py",
    "moe/kernels/triton_gemm.py",
    "moe/kernels/triton_pairs.py",
    "moe/kernels/triton_pdl.py",
    "moe/kernels/triton_topk.py",
)
"""The kernels that a plan has tiles for or launches; paths below the package."""


class ExpertSizes(NamedTuple):
    """Of `DIMENSIONS` those that the kernels of routed experts see: models that differ in the others share
    the plans of their experts."""

    hidden_size: int
    num_experts: int
    top_k: int
    moe_intermediate_size: int


@dataclass(frozen=True)
class PlanKey:
    """Attributes:
    device: as the driver names it, such as "NVIDIA H200".
    sizes: name of `DIMENSIONS` -> size, in their order.
    dtype: of weights and cache, such as "bfloat16".
    """

    device: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str

    @classmethod
    def of(cls, shape: ModelShape, dtype: torch.dtype, device: str) -> PlanKey:
        sizes = tuple((name, int(getattr(shape, name))) for name in DIMENSIONS)
        return cls(device, sizes, str(dtype).removeprefix("torch."))

    @property
    def file_name(self) -> str:
        """One for each key: the device and dtype to read, and a digest."""
        digest = hashlib.sha256(repr((self.device, self.sizes, self.dtype)).encode()).hexdigest()
        return f"{file_name_start(self.device, self.dtype)}{digest[:12]}.json"

    @property
    def experts(self) -> ExpertSizes:
        """The sizes that the kernels of routed experts see."""
        sizes = dict(self.sizes)
        return ExpertSizes(*(sizes[name] for name in ExpertSizes._fields))

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes)
        return f"{self.device}, {self.dtype}, {sizes}"


def file_name_start(device: str, dtype: str) -> str:
    """With what the name of every file of plans for `device` and `dtype` starts."""
    return f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}_{dtype}_"


@cache
def kernels_digest() -> str:
    """16 hexadecimal digits that change with the code of any of `SOURCES`."""
    package = Path(__file__).resolve().parent.parent
    return digest_of(lambda name: (package / name).read_bytes())


def digest_of(read: Callable[[str], bytes]) -> str:
    """The digest of the code of `SOURCES`, whose bytes `read` gives; see `code_of`."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(f"{name}\0".encode() + code_of(name, read(name)) + b"\0")
    return digest.hexdigest()[:16]


def versions_here() -> dict[str, str | None]:
    """Versions that a plan is measured with."""
    try:
        triton: str | None = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "graphcap": __version__,
        "triton": triton,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def differences(made_with: Mapping[str, Any], kernels: str) -> list[str]:
    """What of Triton, torch and the kernels is another now than when a plan was measured."""
    here = versions_here()
    found = [
        f"{name} {made_with.get(name)}, here {here[name]}"
        for name in ("triton", "torch")
        if made_with.get(name) != here[name]
    ]
    if kernels != kernels_digest():
        found.append(f"kernels {kernels}, here {kernels_digest()}")
    return found
