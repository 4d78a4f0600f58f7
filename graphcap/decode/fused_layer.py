"""The layers of a decode step in few kernels, for few rows, each bucket by its `LayerPlan`.

- "fused": norm_qkv → attend (two launches, or one, see `CudaAttend`) → output_residual → norm_router →
  gate_up → down: seven kernels a layer at batch 1, or six. The MLP's result stays apart from the residual
  stream until the next layer's norm_qkv adds it.
- "apart", for more rows: add_norm → qkv → attend → output → add_norm → router → experts. Norms are
  made once, not by every program of a projection; attention is the same.

What neither takes runs by the plain schedule, one kernel an operation (see `DecodeStep`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from graphcap.decode.cache import PagedCache
from graphcap.decode.kernels import DecodeKernels
from graphcap.decode.layer_plan import LayerPlan, PlannedKernels, planned
from graphcap.decode.schedule import Schedule
from graphcap.decode.weights import DenseWeights, LayerWeights, ModelWeights
from graphcap.moe.experts import RoutedExperts
from graphcap.moe.kernels import ExpertKernels
from graphcap.pool import BufferPool

MakeExperts = Callable[[ExpertKernels], Sequence[RoutedExperts | None]]
"""The experts of every layer on kernels of one's choice; None where a layer is dense."""


def fused_layers(
    schedule: Schedule,
    weights: ModelWeights,
    cache: PagedCache,
    kernels: DecodeKernels,
    pool: BufferPool,
    make_experts: MakeExperts,
    cos_sin: torch.Tensor,
) -> Callable[[int], FusedLayers | None]:
    """What `schedule` chooses: the layers of a bucket; None where it runs by the plain schedule."""
    made: dict[int, FusedLayers] = {}

    def layers_of(rows: int) -> FusedLayers | None:
        plan = schedule.choice(rows).plan
        if plan.layers == "plain":
            return None
        if rows not in made:
            own = planned(kernels, plan)
            experts = make_experts(own.decode.experts)
            made[rows] = FusedLayers(weights, cache, plan, own, pool, experts, cos_sin)
        return made[rows]

    return layers_of


class FusedLayers:
    """All layers of a model and its final norm, by one plan.

    Args:
        kernels: as the plan wants them.
        experts: of each layer; None where it is dense.
        cos_sin: the rotary table.
    """

    def __init__(
        self,
        weights: ModelWeights,
        cache: PagedCache,
        plan: LayerPlan,
        kernels: PlannedKernels,
        pool: BufferPool,
        experts: Sequence[RoutedExperts | None],
        cos_sin: torch.Tensor,
    ) -> None:
        self._apart = plan.layers == "apart"
        self._weights = weights
        self._cache = cache
        self._kernels = kernels
        self._norm_gate_up = kernels.norm_qkv.named("norm_gate_up")
        self._pool = pool
        self._experts = experts
        self._cos_sin = cos_sin

    def __call__(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """residual (M, H), the embedded tokens -> hidden (M, H), the normed output of the last layer.

        `residual` is overwritten.
        """
        if self._apart:
            self._run_apart(hidden, residual, inputs)
        else:
            self._run_fused(hidden, residual, inputs)

    def _run_apart(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        pool, kernels, weights, eps = self._pool, self._kernels, self._weights, self._eps
        row_ids = inputs["slot_mapping"]
        pool.run(kernels.decode.rms_norm, residual, weights.layers[0].input_norm, hidden, eps)
        for index, layer in enumerate(weights.layers):
            assert isinstance(layer, LayerWeights)  # no hybrid, see `fused_layers`
            qkv = self._take_qkv(hidden)
            pool.run(kernels.qkv, hidden, layer.qkv, layer.qkv_bias, qkv)
            attended = self._attend(index, layer, qkv, inputs)
            flat = attended.view(hidden.shape[0], -1)
            pool.run(kernels.output, flat, layer.output, layer.output_bias, hidden)
            pool.release("attended")
            pool.run(kernels.add_norm, hidden, residual, layer.post_norm, eps)
            experts = self._experts[index]
            if experts is None:
                self._dense_normed(layer, hidden)
            else:
                experts.after_norm(
                    kernels.router, (hidden, experts.router, None), hidden, row_ids, out=hidden
                )
            last = index + 1 == len(weights.layers)
            norm = weights.final_norm if last else weights.layers[index + 1].input_norm
            pool.run(kernels.add_norm, hidden, residual, norm, eps)

    def _run_fused(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        pool, kernels, weights, eps = self._pool, self._kernels, self._weights, self._eps
        rows, size = hidden.shape
        other = pool.take("residual_next", (rows, size), hidden.dtype)
        normed = pool.take("normed", (rows, size), hidden.dtype)
        # Programs of norm_qkv read the old stream while others write the new one: they take turns.
        for index, layer in enumerate(weights.layers):
            assert isinstance(layer, LayerWeights)  # no hybrid, see `fused_layers`
            delta, total = (None, None) if index == 0 else (hidden, other)
            qkv = self._take_qkv(hidden)
            norm = (layer.input_norm, eps)
            pool.run(
                kernels.norm_qkv, residual, delta, *norm, layer.qkv, layer.qkv_bias, qkv, total
            )
            if total is not None:
                residual, other = other, residual
            attended = self._attend(index, layer, qkv, inputs)
            flat = attended.view(rows, -1)
            pool.run(kernels.output_residual, flat, layer.output, layer.output_bias, residual)
            pool.release("attended")
            experts = self._experts[index]
            if experts is None:
                self._dense(layer, residual, hidden)
                continue
            experts.after_norm(
                kernels.norm_router,
                (residual, layer.post_norm, eps, experts.router, normed),
                normed,
                inputs["slot_mapping"],
                out=hidden,
            )
        pool.run(kernels.decode.fused_add_rms_norm, hidden, residual, weights.final_norm, eps)
        pool.release("residual_next", "normed")

    @property
    def _eps(self) -> float:
        return self._weights.shape.rms_norm_eps

    def _take_qkv(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = self._weights.shape
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        return self._pool.take("qkv", (hidden.shape[0], width), hidden.dtype)

    def _attend(
        self, index: int, layer: LayerWeights, qkv: torch.Tensor, inputs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """What the heads read (M, Hq, D), taken as "attended"; `qkv` is released."""
        pool, shape = self._pool, self._weights.shape
        dim = shape.head_dim
        attended = pool.take("attended", (qkv.shape[0], shape.num_heads, dim), qkv.dtype)
        pool.run(
            self._kernels.attend,
            qkv,
            layer.q_norm,
            layer.k_norm,
            self._cos_sin,
            inputs["positions"],
            inputs["slot_mapping"],
            inputs["block_tables"],
            inputs["seq_lens"],
            self._cache.keys[index],
            self._cache.values[index],
            attended,
            self._eps,
            dim**-0.5,
        )
        pool.release("qkv")
        return attended

    def _dense(self, layer: LayerWeights, residual: torch.Tensor, out: torch.Tensor) -> None:
        """out = the dense MLP of the normed residual."""
        pool, dense = self._pool, layer.mlp
        assert isinstance(dense, DenseWeights)
        gate_up = self._take_gate_up(dense, residual)
        norm = (layer.post_norm, self._eps)
        pool.run(self._norm_gate_up, residual, None, *norm, dense.gate_up, None, gate_up, None)
        self._dense_down(dense, gate_up, out)

    def _dense_normed(self, layer: LayerWeights, hidden: torch.Tensor) -> None:
        """hidden = the dense MLP of hidden, which is normed."""
        dense = layer.mlp
        assert isinstance(dense, DenseWeights)
        gate_up = self._take_gate_up(dense, hidden)
        self._pool.run(self._kernels.decode.linear, hidden, dense.gate_up, None, gate_up)
        self._dense_down(dense, gate_up, hidden)

    def _take_gate_up(self, dense: DenseWeights, hidden: torch.Tensor) -> torch.Tensor:
        return self._pool.take("gate_up", (hidden.shape[0], dense.gate_up.shape[0]), hidden.dtype)

    def _dense_down(self, dense: DenseWeights, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """Releases `gate_up`."""
        pool, decode = self._pool, self._kernels.decode
        gated = pool.take("gated", (out.shape[0], dense.down.shape[1]), out.dtype)
        pool.run(decode.experts.silu_and_mul, gate_up, gated)
        pool.release("gate_up")
        pool.run(decode.linear, gated, dense.down, None, out)
        pool.release("gated")
