"""Which operators of this vLLM the tape looks into, and for which layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from scenarios.common import turn_on

METHODS = {
    "unquantised, Triton": {"unquantized_backend": "TRITON"},
    "unquantised, FlashInfer": {"unquantized_backend": "FLASHINFER_TRTLLM"},
    "FP8, Marlin": {"fp8_backend": "MARLIN"},
    "FP8, DeepGEMM": {"fp8_backend": "DEEPGEMM"},
    "no backend named": {},
}
ATTENTION = ("TritonAttentionImpl", "FlashAttentionImpl", "FlashInferImpl")


def operators() -> dict[str, Any]:
    """Each operator: whether the schema's argument of the layer is where it is thought to be."""
    turn_on()
    import torch

    from graphcap.hosts.vllm import opened
    from graphcap.recorders import bindings

    return {
        name: {
            "opened": getattr(torch.ops.vllm, name).default in bindings._OPENED,
            "argument": getattr(torch.ops.vllm, name).default._schema.arguments[position].name,
            "arguments": len(getattr(torch.ops.vllm, name).default._schema.arguments),
        }
        for name, _, _, position in opened.OPERATORS
    }


def layers() -> dict[str, Any]:
    """Through a forward context: what is asked of the operator's arguments."""
    turn_on()
    import torch

    from graphcap.hosts.vllm import opened
    from graphcap.recorders.bindings import opened as looked_into

    names = {name: position for name, _, _, position in opened.OPERATORS}
    context = SimpleNamespace(no_compile_layers={})
    opened.get_forward_context = lambda: context

    def asked(operator: str, layer: Any, wrapped: bool = False) -> bool:
        context.no_compile_layers = {"a.layer": layer}
        given: list[Any] = [None] * names[operator]
        given.append(SimpleNamespace(value="a.layer") if wrapped else "a.layer")
        overload = getattr(torch.ops.vllm, operator).default
        return looked_into(overload, tuple(given)) is not None

    found: dict[str, Any] = {}
    for name, backends in METHODS.items():
        method = SimpleNamespace(**{k: SimpleNamespace(name=v) for k, v in backends.items()})
        layer = SimpleNamespace(routed_experts=SimpleNamespace(quant_method=method))
        found[name] = [asked("moe_forward", layer, w) for w in (False, True)]
    for name in ATTENTION:
        layer = SimpleNamespace(impl=type(name, (), {})())
        found[name] = [asked("unified_attention_with_output", layer, w) for w in (False, True)]
    context.no_compile_layers = {}
    overload = torch.ops.vllm.moe_forward.default
    found["unknown layer"] = [looked_into(overload, (None,) * 4 + ("from_forward_context",))]
    return found


def backends() -> list[str]:
    """Names that vLLM's MoE methods have for their kernels."""
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    return [b.name for kind in (Fp8MoeBackend, UnquantizedMoeBackend) for b in kind]


SCENARIOS = {"operators": operators, "layers": layers, "backends": backends}
