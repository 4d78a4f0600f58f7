"""Third-party packages that vLLM 0.6.3 imports on its way and that the environment does not hold.

Import it before vLLM. Absent are `gguf` and `mistral_common` (file formats that no test reads) and
`xformers`, whose one function that vLLM calls is here in plain torch. Of Triton three functions of
version 3.0 are missing that name folders of its cache.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import triton.runtime.cache

ABSENT = ("gguf", "mistral_common")

for _name in ("default_cache_dir", "default_dump_dir", "default_override_dir"):
    if not hasattr(triton.runtime.cache, _name):
        setattr(triton.runtime.cache, _name, lambda: "")


class _Empty(ModuleType):
    """Has a class of every name, so that it can be imported from."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class CausalBlocks:
    """`BlockDiagonalCausalMask`: sequences behind each other, each causal."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    @classmethod
    def from_seqlens(cls, lengths: Sequence[int]) -> CausalBlocks:
        return cls(lengths)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: CausalBlocks,
    p: float,
    scale: float,
) -> torch.Tensor:
    """`memory_efficient_attention_forward`: query, key, value (1, tokens, *heads, head size)."""
    assert p == 0.0
    q, k, v = (t[0].flatten(1, -2).double() for t in (query, key, value))
    out = torch.empty_like(q)
    start = 0
    for length in attn_bias.lengths:
        rows = slice(start, start + length)
        scores = torch.einsum("qhd,khd->hqk", q[rows], k[rows]) * scale
        scores.masked_fill_(torch.ones(length, length).triu(1).bool(), -math.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[rows])
        start += length
    return out.to(query.dtype).view(query.shape)


def _xformers() -> None:
    package, ops = ModuleType("xformers"), ModuleType("xformers.ops")
    bias = _Empty("xformers.ops.fmha.attn_bias")
    fmha = ModuleType("xformers.ops.fmha")
    bias.BlockDiagonalCausalMask = CausalBlocks
    ops.memory_efficient_attention_forward = attention
    package.ops, ops.fmha, fmha.attn_bias = ops, fmha, bias
    for module in (package, ops, fmha, bias):
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        sys.modules[module.__name__] = module


sys.meta_path.append(_Finder())
_xformers()
