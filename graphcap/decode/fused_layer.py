"""The layers of a decode step by the fused schedule: few kernels a layer, for few rows.

norm_qkv → attend → output_residual → norm_router → gate_up → down. The MLP's result stays apart from the
residual stream until the next layer's norm_qkv adds it. At batch 1 that is six kernels a layer, seven
where attention joins many splits by a launch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graphcap.decode.cache import PagedCache
from graphcap.decode.cache_format import CacheFormat
from graphcap.decode.kernels import DecodeKernels, FusedLayerKernels
from graphcap.decode.weights import DenseWeights, LayerWeights, ModelWeights
from graphcap.errors import InputError
from graphcap.moe.experts import RoutedExperts
from graphcap.pool import BufferPool

SCHEDULES = ("plain", "fused")

FUSED_ROWS = 32
"""Batches of up to so many rows run by the fused schedule where it is asked for; larger ones by the
plain one, whose matrix products are made for them. Not measured yet: see bench/fused_layer.py."""


def check_schedule(schedule: str, kernels: DecodeKernels) -> None:
    """Raises InputError where there is no such schedule, or `kernels` cannot run it."""
    if schedule not in SCHEDULES:
        raise InputError(f"schedule: expected one of {', '.join(SCHEDULES)}, found {schedule!r}")
    if schedule == "fused" and kernels.fused is None:
        raise InputError(
            f"schedule 'fused': the {kernels.experts.name} kernels have no fused layer; use the "
            f"triton kernels, or schedule 'plain'"
        )


def fused_layers(
    schedule: str,
    weights: ModelWeights,
    cache: PagedCache,
    kernels: DecodeKernels,
    pool: BufferPool,
    experts: Sequence[RoutedExperts | None],
    cos_sin: torch.Tensor,
) -> FusedLayers | None:
    """What `schedule` asks for; None for the plain one.

    Raises:
        InputError: there is no such schedule, or it cannot run these kernels or this cache.
    """
    check_schedule(schedule, kernels)
    if schedule == "plain" or kernels.fused is None:
        return None
    if weights.shape.is_hybrid:
        raise InputError(
            f"schedule 'fused': expected a model whose layers all have full attention without an output "
            f"gate, found {weights.shape.name}, a hybrid; use schedule 'plain'"
        )
    if cache.format != CacheFormat():
        raise InputError(
            f"schedule 'fused': expected a cache of format {CacheFormat()}, found {cache.format}; use "
            f"schedule 'plain'"
        )
    return FusedLayers(weights, cache, kernels, kernels.fused, pool, experts, cos_sin)


class FusedLayers:
    """All layers of a model and its final norm, by the fused schedule.

    Args:
        kernels: for what is not fused: products of dense layers, the final norm.
        experts: of each layer; None where it is dense.
        cos_sin: the rotary table.
    """

    def __init__(
        self,
        weights: ModelWeights,
        cache: PagedCache,
        kernels: DecodeKernels,
        fused: FusedLayerKernels,
        pool: BufferPool,
        experts: Sequence[RoutedExperts | None],
        cos_sin: torch.Tensor,
    ) -> None:
        self.max_rows = FUSED_ROWS
        self._weights = weights
        self._cache = cache
        self._kernels = kernels
        self._fused = fused
        self._norm_gate_up = fused.norm_qkv.named("norm_gate_up")
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
        pool, fused, weights, eps = self._pool, self._fused, self._weights, self._eps
        rows, size = hidden.shape
        other = pool.take("residual_next", (rows, size), hidden.dtype)
        normed = pool.take("normed", (rows, size), hidden.dtype)
        # Programs of norm_qkv read the old stream while others write the new one: they take turns.
        for index, layer in enumerate(weights.layers):
            first = index == 0
            self._attention(
                index, layer, None if first else hidden, residual, None if first else other, inputs
            )
            if not first:
                residual, other = other, residual
            experts = self._experts[index]
            if experts is None:
                self._dense(layer, residual, hidden)
                continue
            experts.after_norm(
                fused.norm_router,
                (residual, layer.post_norm, eps, experts.router, normed),
                normed,
                inputs["slot_mapping"],
                out=hidden,
            )
        pool.run(self._kernels.fused_add_rms_norm, hidden, residual, weights.final_norm, eps)
        pool.release("residual_next", "normed")

    @property
    def _eps(self) -> float:
        return self._weights.shape.rms_norm_eps

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        delta: torch.Tensor | None,
        residual: torch.Tensor,
        total: torch.Tensor | None,
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """residual + delta goes to `total` (without a delta it stays), and attention is added there."""
        pool, fused, shape, eps = self._pool, self._fused, self._weights.shape, self._eps
        rows, dim = residual.shape[0], shape.head_dim
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        qkv = pool.take("qkv", (rows, (heads + 2 * kv_heads) * dim), residual.dtype)
        counters = pool.take("split_counters", (rows * kv_heads,), torch.int32)
        pool.run(
            fused.norm_qkv,
            residual,
            delta,
            layer.input_norm,
            eps,
            layer.qkv,
            layer.qkv_bias,
            qkv,
            total,
            counters,
        )
        attended = pool.take("attended", (rows, heads, dim), residual.dtype)
        pool.run(
            fused.attend,
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
            counters,
            eps,
            dim**-0.5,
        )
        pool.release("qkv", "split_counters")
        stream = residual if total is None else total
        pool.run(
            fused.output_residual, attended.view(rows, -1), layer.output, layer.output_bias, stream
        )
        pool.release("attended")

    def _dense(self, layer: LayerWeights, residual: torch.Tensor, out: torch.Tensor) -> None:
        """out = the dense MLP of the normed residual."""
        pool, kernels, dense = self._pool, self._kernels, layer.mlp
        assert isinstance(dense, DenseWeights)
        rows, inner = residual.shape[0], dense.down.shape[1]
        gate_up = pool.take("gate_up", (rows, 2 * inner), residual.dtype)
        norm = (layer.post_norm, self._eps)
        pool.run(
            self._norm_gate_up, residual, None, *norm, dense.gate_up, None, gate_up, None, None
        )
        gated = pool.take("gated", (rows, inner), residual.dtype)
        pool.run(kernels.experts.silu_and_mul, gate_up, gated)
        pool.release("gate_up")
        pool.run(kernels.linear, gated, dense.down, None, out)
        pool.release("gated")
