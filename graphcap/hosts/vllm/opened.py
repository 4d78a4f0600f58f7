"""Which of vLLM's custom operators a tape looks into: those implemented in Python, where all that they
start on the GPU is seen (torch's operators, Triton's launches, graphcap's kernels).

What else is implemented in Python, a collective or kernels of another library, the tape calls live
at each replay, with the metadata of the step: a break, which the report names.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from graphcap.recorders.bindings import opened_as

_ATTENTION = "vllm.model_executor.layers.attention.attention"
_MOE = "vllm.model_executor.layers.fused_moe.runner.moe_runner"

OPERATORS = (
    ("unified_attention_with_output", _ATTENTION, "unified_attention_with_output", 4),
    ("unified_kv_cache_update", _ATTENTION, "unified_kv_cache_update", 2),
    ("moe_forward", _MOE, "_moe_forward", 4),
    ("moe_forward_shared", _MOE, "_moe_forward_shared", 4),
)
"""Operator, module and name of the function that implements it, and which argument names its layer."""

_ATTENTION_SEEN = frozenset({"TritonAttentionImpl", "FlashAttentionImpl"})
"""Their kernels are Triton's and operators of vLLM's; those of FlashInfer come by ways of its own."""

_EXPERTS_SEEN = frozenset({"TRITON", "MARLIN"})


def install() -> None:
    """Tell the tape. An operator that this vLLM lacks, or implements elsewhere, stays a break."""
    for name, module, function, position in OPERATORS:
        operator = getattr(getattr(torch.ops.vllm, name, None), "default", None)
        implementation = getattr(import_module(module), function, None)
        if operator is not None and implementation is not None:
            seen = _attention_seen if module == _ATTENTION else _experts_seen
            opened_as(operator, implementation, when=_of_layer(position, seen))


def _of_layer(position: int, seen: Callable[[Any], bool]) -> Callable[..., bool]:
    def when(*args: Any) -> bool:
        layer = _layer(args[position]) if len(args) > position else None
        return layer is not None and seen(layer)

    return when


def _layer(name: Any) -> Any:
    """The layer that an operator's argument names: a string, or vLLM's wrapper of one; None: unknown."""
    return get_forward_context().no_compile_layers.get(getattr(name, "value", name))


def _attention_seen(layer: Any) -> bool:
    return type(getattr(layer, "impl", None)).__name__ in _ATTENTION_SEEN


def _experts_seen(layer: Any) -> bool:
    """Whether the experts' kernels, graphcap's or vLLM's, are such as can be seen."""
    method = getattr(getattr(layer, "routed_experts", None), "quant_method", None)
    backends = [
        getattr(value, "name", None)
        for name, value in getattr(method, "__dict__", {}).items()
        if name.endswith("_backend")
    ]
    return bool(backends) and all(backend in _EXPERTS_SEEN for backend in backends)
