"""MoE layers on graphcap's pool and kernels, inside of a step and outside; the layers that stay vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from scenarios.common import turn_on
from scenarios.moe_block import Block


def serving(kind: str, **changes: Any) -> dict[str, Any]:
    block = Block(kind, **changes)
    method = block.runner.routed_experts.quant_method
    return {
        "classes": [type(block.runner).__name__, type(method).__name__],
        "backend": method.unquantized_backend.name,
        "renormalize": block.runner.routed_experts.renormalize,
        "inside": block.run(),
        "outside": block.run(serving=False),
        "inside again": block.run(),
        "monolithic outside": method.is_monolithic,
        "parameters": sorted(name for name, _ in block.block.named_parameters()),
    }


def without_graphcap() -> dict[str, Any]:
    block = Block(on=False)
    return {
        "classes": [type(block.runner).__name__, type(block.runner._quant_method).__name__],
        "outside": block.run(serving=False),
        "parameters": sorted(name for name, _ in block.block.named_parameters()),
    }


def vllms_kernels(kernels: str = "reference", **run: Any) -> dict[str, Any]:
    """Inside a step of graphcap's, and on vLLM's kernels all the same."""
    return Block(kernels=kernels).run(**run)


def many_rows() -> dict[str, Any]:
    from graphcap.hosts.vllm.experts import MOST_TOKENS

    block = Block()
    return {
        "most": block.run(rows=MOST_TOKENS, padding=0),
        "one more": block.run(rows=MOST_TOKENS, padding=1),
    }


def raises_inside() -> dict[str, Any]:
    """A step that fails half way leaves the layers vLLM's."""
    block = Block()
    run = block.experts.run

    def fails(*_: Any) -> None:
        raise RuntimeError("half way")

    block.experts.run = fails  # type: ignore[method-assign]
    try:
        block.run()
        raised = None
    except RuntimeError as error:
        raised = str(error)
    block.experts.run = run  # type: ignore[method-assign]
    return {"raised": raised, "outside": block.run(serving=False), "inside": block.run()}


def obstacles() -> dict[str, Any]:
    """Of a layer that has each in turn. An attribute that vLLM does not have (any more) fails here."""
    from graphcap.hosts.vllm.experts import obstacle

    block = Block()
    runner = block.runner
    routed, method, router, gate = (
        runner.routed_experts,
        runner.routed_experts.quant_method,
        runner.router,
        runner.gate,
    )

    class Quantised:
        """Of a checkpoint with quantised experts."""

    class GroupedTopKRouter:
        capture_fn = None

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    w13, w2 = routed.w13_weight, routed.w2_weight
    changes: dict[str, tuple[Any, str, Any]] = {
        "quantised": (routed, "quant_method", Quantised()),
        "router outside": (runner, "gate", None),
        "other router": (runner, "router", GroupedTopKRouter()),
        "routing returned": (router, "capture_fn", print),
        "sigmoid": (routed, "scoring_func", "sigmoid"),
        "activation": (routed, "activation", Named("GELU")),
        "weighted input": (routed, "apply_router_weight_on_input", True),
        "spread experts": (routed, "_expert_map", torch.zeros(8, dtype=torch.int32)),
        "biases": (runner.moe_config, "has_bias", True),
        "clamped": (routed, "swiglu_limit", 7.0),
        "fused gate": (runner, "_fse_fuse_gate", True),
        "transformed input": (runner, "routed_input_transform", torch.nn.Identity()),
        "biased router": (gate, "bias", torch.nn.Parameter(torch.zeros(8), requires_grad=False)),
        "other layout": (method, "unquantized_backend", Named("FLASHINFER_CUTLASS")),
        "not contiguous": (routed, "w13_weight", _parameter(w13.transpose(1, 2))),
        "other dtype": (routed, "w13_weight", _parameter(w13.float())),
        "other gate dtype": (gate, "weight", _parameter(gate.weight.float())),
        "other shapes": (routed, "w2_weight", _parameter(w2[:, :, :16].contiguous())),
    }
    found = {"none": obstacle(runner)}
    for name, (owner, attribute, value) in changes.items():
        assert hasattr(owner, attribute), f"{type(owner).__name__} has no {attribute}"
        before = getattr(owner, attribute)
        owner.__dict__.pop(attribute, None)  # a module has parameters and buffers elsewhere
        _put(owner, attribute, value)
        found[name] = obstacle(runner)
        _put(owner, attribute, before)
    found["none, put back"] = obstacle(runner)
    return found


def _put(owner: Any, attribute: str, value: Any) -> None:
    if isinstance(owner, torch.nn.Module):
        for members in (owner._parameters, owner._buffers, owner._modules):
            members.pop(attribute, None)
    setattr(owner, attribute, value)


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def theirs(name: str) -> dict[str, Any]:
    """Another plugin has registered its class for `name` before."""
    from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    if name == "MoERunner":

        @PluggableLayer.register_oot(name=name)
        class TheirRunner(MoERunner):
            pass
    else:

        @CustomOp.register_oot(name=name)
        class TheirMethod(UnquantizedFusedMoEMethod):
            pass

    turn_on()
    from graphcap.hosts.vllm.plugin import STATUS

    return {
        "part": STATUS.parts["experts"],
        "state": STATUS.state,
        "registered": {key: value.__name__ for key, value in op_registry_oot.items()},
    }


SCENARIOS: dict[str, Callable[[], Any]] = {
    "renormalized": partial(serving, "qwen3_moe", norm_topk_prob=True),
    "not renormalized": partial(serving, "qwen3_moe", norm_topk_prob=False),
    "shared expert": partial(serving, "qwen3_next"),
    "without graphcap": without_graphcap,
    "many rows": many_rows,
    "no slots": partial(vllms_kernels, slots=False),
    "GRAPHCAP_KERNELS=vllm": partial(vllms_kernels, "vllm"),
    "GRAPHCAP_KERNELS=auto": partial(vllms_kernels, "auto"),
    "raises inside": raises_inside,
    "obstacles": obstacles,
    "their MoERunner": partial(theirs, "MoERunner"),
    "their UnquantizedFusedMoEMethod": partial(theirs, "UnquantizedFusedMoEMethod"),
}
