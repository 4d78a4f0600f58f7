"""A stand-in for ixformer, CoreX's library, which this project cannot ship or run: for tests only.

Its operations have exactly the known signatures of a generation, compute with torch on CPU and CUDA
tensors, and raise `Misuse` where a caller gets order, dtype or shape wrong or leaves an out-parameter
out. On CUDA they neither synchronise nor branch on values, so that they can be captured. What they
allocate inside is the library's own business, as in the real one; `inside()` tells an observer so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from ixformer_standin import first, newer
from ixformer_standin.checks import Misuse, inside

__all__ = [
    "GENERATIONS",
    "MOE_OPERATIONS",
    "Misuse",
    "capture_not_supported",
    "inside",
    "installed",
    "module_of",
]

GENERATIONS = ("0.4", "newer")
MOE_OPERATIONS = (
    "vllm_moe_topk_softmax",
    "vllm_moe_align_block_size",
    "vllm_invoke_fused_moe_kernel",
)
"""Absent in the BI-V100 images (ixformer 0.4.0+corex.3.2.3)."""

_SOURCES: Mapping[str, tuple[str, ModuleType]] = {
    "0.4": ("ixformer.functions", first),
    "newer": ("ixformer.inference.functions", newer),
}


def module_of(
    generation: str,
    *,
    without: Sequence[str] = (),
    renamed: Mapping[str, str] | None = None,
    replaced: Mapping[str, Callable[..., Any]] | None = None,
) -> ModuleType:
    """The module of operations of a generation, changed as asked: names left out, renamed, replaced."""
    path, source = _SOURCES[generation]
    module = ModuleType(path)
    for name, function in source.OPERATIONS.items():
        if name not in without:
            setattr(module, (renamed or {}).get(name, name), function)
    for name, function in (replaced or {}).items():
        setattr(module, name, function)
    return module


@contextmanager
def installed(generation: str, **changes: Any) -> Iterator[ModuleType]:
    """``import ixformer`` finds the stand-in inside. `changes`: see `module_of`."""
    path = _SOURCES[generation][0]
    before = {name: m for name, m in sys.modules.items() if name.split(".")[0] == "ixformer"}
    for name in before:
        del sys.modules[name]
    parts = path.split(".")
    for length in range(1, len(parts)):
        package = ModuleType(".".join(parts[:length]))
        package.__path__ = []
        package.__spec__ = ModuleSpec(package.__name__, None, is_package=True)
        sys.modules[package.__name__] = package
    module = sys.modules[path] = module_of(generation, **changes)
    try:
        yield module
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "ixformer"]:
            del sys.modules[name]
        sys.modules.update(before)


@contextmanager
def capture_not_supported() -> Iterator[None]:
    """Inside, beginning a graph capture fails as it was reported from a BI-V150."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("ixErrorNotSupported")

    graph: Any = torch.cuda.CUDAGraph
    own = graph.__dict__.get("capture_begin")
    graph.capture_begin = refuse
    try:
        yield
    finally:
        if own is None:
            del graph.capture_begin
        else:
            graph.capture_begin = own
