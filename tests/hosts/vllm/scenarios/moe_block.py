"""A MoE block of vLLM's model code, and what is stood in for around it.

vLLM's own code: the block of the model, its gate, router, runner, weights and shared expert, with their
modules as graphcap's classes. Stood in for: the compiled kernels of vLLM's own path (routing, experts,
activation), each of which counts its calls.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from scenarios import fakes
from scenarios.common import compilation, engine_config, load_plugins, set_variables, turn_on
from scenarios.fakes import LAYER, RECURRENT

ROWS, PADDING = 5, 3

_libraries: list[Any] = []  # operations live as long as these


class Block:
    """One MoE block of a model, with random weights, and what was called of vLLM's own."""

    def __init__(
        self,
        kind: str = "qwen3_moe",
        kernels: str = "reference",
        on: bool = True,
        **changes: Any,
    ) -> None:
        set_variables({"VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1"})  # a CUDA stream
        if on:
            turn_on(kernels=kernels)
        else:
            set_variables({"GRAPHCAP": "0"})
            load_plugins()
        fakes.without_cuda()
        self.called: Counter[str] = Counter()
        self._stand_ins()
        self.config = engine_config(kind, changes, **compilation(custom_ops=["all"]))
        self.block = self._built(kind)
        self.runner = self.block.experts
        self.hybrid = kind == "qwen3_next"
        layers = self.config.compilation_config.static_forward_context
        layers[LAYER] = fakes.attention_layer()
        if self.hybrid:
            layers[RECURRENT] = _recurrent_layer()
        self._draw_weights()
        if on:
            from graphcap.hosts.vllm.experts import PooledExperts
            from graphcap.pool import BufferPool
            from graphcap.settings import Settings

            self.pool = BufferPool("cpu")
            self.experts = PooledExperts(self.pool, Settings.from_env(), torch.device("cpu"))

    def _stand_ins(self) -> None:
        from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
        from vllm.model_executor.layers.fused_moe.runner import moe_runner
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
            UnquantizedFusedMoEMethod,
        )

        called = self.called

        def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
            half = x.shape[-1] // 2
            out.copy_(torch.nn.functional.silu(x[..., :half]) * x[..., half:])

        compiled = torch.library.Library("_C", "FRAGMENT")
        compiled.define("silu_and_mul(Tensor! result, Tensor input) -> ()")
        compiled.impl("silu_and_mul", silu_and_mul, "CPU")
        # The operations of the runner exist for the platform's device only.
        operations = torch.library.Library("vllm", "FRAGMENT")
        operations.impl("moe_forward", moe_runner._moe_forward, "CPU")
        operations.impl("moe_forward_shared", moe_runner._moe_forward_shared, "CPU")
        _libraries.extend([compiled, operations])

        def route(self: Any, hidden: Any, logits: Any, indices: Any, **_: Any) -> Any:
            called["vLLM's routing"] += 1
            weights, ids = torch.topk(logits.float().softmax(-1), self.top_k, dim=-1)
            if self.renormalize:
                weights = weights / weights.sum(-1, keepdim=True)
            return weights, ids.int()

        def experts(
            self: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, **_: Any
        ) -> Any:
            called["vLLM's experts"] += 1
            out = torch.zeros(x.shape, dtype=torch.float64)
            for row, (weights, ids) in enumerate(zip(topk_weights, topk_ids, strict=True)):
                for weight, expert in zip(weights, ids, strict=True):
                    out[row] += weight * _expert(x[row], layer, int(expert))
            return out.to(x.dtype)

        FusedTopKRouter._compute_routing = route
        UnquantizedFusedMoEMethod.forward_cuda = experts
        UnquantizedFusedMoEMethod.forward_native = experts

    def _built(self, kind: str) -> Any:
        from importlib import import_module

        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.linear import ReplicatedLinear

        called, forward = self.called, ReplicatedLinear.forward

        def counted(layer: Any, x: torch.Tensor) -> Any:
            called[f"vLLM's {layer.prefix.rsplit('.', 1)[-1]}"] += 1
            return forward(layer, x)

        ReplicatedLinear.forward = counted
        name = {"qwen3_moe": "Qwen3Moe", "qwen3_next": "Qwen3Next"}[kind]
        module = import_module(f"vllm.model_executor.models.{kind}")
        torch.set_default_dtype(torch.bfloat16)
        with set_current_vllm_config(self.config):
            return getattr(module, f"{name}SparseMoeBlock")(
                vllm_config=self.config, prefix="model.layers.0.mlp"
            )

    def _draw_weights(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for parameter in self.block.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.data.copy_(noise / parameter.shape[-1] ** 0.5)
        routed = self.runner.routed_experts
        routed.quant_method.process_weights_after_loading(routed)

    # -- runs --------------------------------------------------------------------------------------

    def run(
        self, serving: bool = True, rows: int = ROWS, padding: int = PADDING, slots: bool = True
    ) -> dict[str, Any]:
        """The block's output for `rows` rows and some padding, held against float64."""
        from vllm.forward_context import set_forward_context

        generator = torch.Generator().manual_seed(1)
        tokens = rows + padding
        hidden = torch.randn(
            tokens, self.block.gate.weight.shape[1], generator=generator
        ).bfloat16()
        mapping = torch.arange(tokens, dtype=torch.int64)
        mapping[rows:] = -1
        mappings = {LAYER: mapping}
        if self.hybrid:  # the recurrent layers of such a model come first
            mappings = {RECURRENT: torch.full_like(mapping, -1), **mappings}
        self.called.clear()
        with (
            torch.inference_mode(),
            set_forward_context(
                {}, self.config, num_tokens=tokens, slot_mapping=mappings if slots else None
            ),
        ):
            if serving:
                with self.pool.step(), self.experts.serving():
                    out = self.block(hidden.clone())
            else:
                out = self.block(hidden.clone())
        expected = self.reference(hidden)
        gap = (out.double() - expected)[:rows].abs().max() / expected[:rows].abs().max()
        shared = self.shared(hidden)[rows:]
        return {
            "error": float(gap),
            # A padding row has nothing but the shared expert.
            "padding": float((out[rows:].double() - shared).abs().max()) if padding else 0.0,
            "called": dict(self.called),
            "layers": dict(self.experts.layers) if hasattr(self, "experts") else {},
        }

    def reference(self, hidden: torch.Tensor) -> torch.Tensor:
        routed = self.runner.routed_experts
        logits = hidden.double() @ self.block.gate.weight.double().T
        weights, ids = torch.topk(logits.softmax(-1), routed.top_k, dim=-1)
        if routed.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out = self.shared(hidden)
        for row in range(hidden.shape[0]):
            for weight, expert in zip(weights[row], ids[row], strict=True):
                out[row] += weight * _expert(hidden[row], routed, int(expert))
        return out

    def shared(self, hidden: torch.Tensor) -> torch.Tensor:
        expert = getattr(self.block, "shared_expert", None)
        x = hidden.double()
        if expert is None:
            return torch.zeros_like(x)
        both = x @ expert.gate_up_proj.weight.double().T
        half = both.shape[-1] // 2
        inner = torch.nn.functional.silu(both[:, :half]) * both[:, half:]
        out = inner @ expert.down_proj.weight.double().T
        share = x @ self.block.shared_expert_gate.weight.double().T
        return out * torch.sigmoid(share)


def _recurrent_layer() -> Any:
    """Of vLLM's class, not initialised."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )

    return QwenGatedDeltaNetAttention.__new__(QwenGatedDeltaNetAttention)


def _expert(x: torch.Tensor, layer: Any, expert: int) -> torch.Tensor:
    both = layer.w13_weight[expert].double() @ x.double()
    half = both.shape[0] // 2
    inner = torch.nn.functional.silu(both[:half]) * both[half:]
    return layer.w2_weight[expert].double() @ inner
