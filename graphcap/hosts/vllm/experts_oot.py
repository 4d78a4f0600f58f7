"""The classes that vLLM instantiates in place of its MoE runner and its unquantised MoE method.

Importing this module registers them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp, PluggableLayer
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from graphcap.hosts.vllm import ahead
from graphcap.hosts.vllm.engine import row_slots
from graphcap.hosts.vllm.experts import MOST_TOKENS, PooledExperts, obstacle, serving_now


@PluggableLayer.register_oot(name="MoERunner")
class PooledMoERunner(MoERunner):
    """vLLM's MoE runner, whose router and experts are graphcap's inside a step of graphcap's.

    Shared experts, reductions over ranks and everything else stay vLLM's code.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._graphcap: PooledExperts | None = None
        method = self.routed_experts.quant_method
        if isinstance(method, PooledMoEMethod):
            method.graphcap_runner = _Reference(self)
            ahead.experts_made(self)
        if self.gate is not None:
            _skip_gate(self, self.gate)

    def _forward_impl(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._graphcap = self._serving(hidden_states.shape[0])
        try:
            return super()._forward_impl(hidden_states, *args, **kwargs)
        finally:
            self._graphcap = None

    def _serving(self, tokens: int) -> PooledExperts | None:
        experts = serving_now()
        if experts is None:
            return None
        if experts.kernels is None:
            why: str | None = experts.why
        elif row_slots(get_forward_context()) is None:
            why = "its step does not tell padding"
        else:
            why = obstacle(self)
        if why is not None:
            experts.note(self, f"vLLM's kernels: {why}")
            return None
        assert experts.kernels is not None
        if tokens > MOST_TOKENS:
            return None
        experts.note(self, f"graphcap's {experts.kernels.name} kernels up to {MOST_TOKENS} tokens")
        return experts


@CustomOp.register_oot(name="UnquantizedFusedMoEMethod")
class PooledMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM's unquantised MoE method; asked for a layer of a graphcap step, it routes and merges too."""

    graphcap_runner: _Reference | None = None

    @property
    def is_monolithic(self) -> bool:
        return self._serving() is not None or super().is_monolithic

    def apply_monolithic(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        experts = self._serving()
        if experts is None:
            return super().apply_monolithic(layer, x, router_logits, *args, **kwargs)
        assert self.graphcap_runner is not None
        slots = row_slots(get_forward_context())
        assert slots is not None  # asked before: see PooledMoERunner
        return experts.run(self.graphcap_runner.runner, x, slots)

    def _serving(self) -> PooledExperts | None:
        # is_monolithic is asked while the class is still being constructed.
        reference = self.__dict__.get("graphcap_runner")
        return None if reference is None else reference.runner._graphcap


class _Reference:
    """Keeps a module out of the sight of torch.nn.Module, which would make it a submodule."""

    __slots__ = ("runner",)

    def __init__(self, runner: PooledMoERunner) -> None:
        self.runner = runner


def _skip_gate(runner: PooledMoERunner, gate: torch.nn.Module) -> None:
    """Leave out vLLM's router GEMM where graphcap's own follows in the same layer.

    Only the module's `forward` is replaced, on this instance: its names, weights and loading stay.
    """
    original = gate.forward
    reference = _Reference(runner)

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if reference.runner._graphcap is not None:
            return x, None  # nobody reads it
        return original(x, *args, **kwargs)

    gate.forward = forward  # type: ignore[method-assign]
