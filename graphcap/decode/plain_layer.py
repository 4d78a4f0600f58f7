"""The layers of a decode step by the plain schedule: operation by operation, for every model, backend and
batch. It is the oracle of the schedules with fewer kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from graphcap.decode.cache import PagedCache
from graphcap.decode.delta_net import DeltaNet
from graphcap.decode.fused_layer import MakeExperts
from graphcap.decode.kernels import DecodeKernels
from graphcap.decode.kernels.hybrid import HybridKernels
from graphcap.decode.shared_expert import SharedExpert
from graphcap.decode.weights import (
    DeltaLayerWeights,
    DenseWeights,
    ExpertWeights,
    LayerWeights,
    ModelWeights,
)
from graphcap.moe.experts import RoutedExperts
from graphcap.moe.kernels import ExpertKernels
from graphcap.operations import Operation
from graphcap.pool import BufferPool

RunExperts = Callable[[int, BufferPool, Callable[[ExpertKernels], None]], None]
"""Given rows, the pool and what launches the experts of a layer on kernels: launches them on those of the
batch's plan; see `Schedule.run_experts`."""


class PlainLayers:
    """All layers of a model and its final norm.

    Args:
        hybrid: what a hybrid needs beyond `kernels`; None: the model is none.
        make_experts: see `MakeExperts`.
        run_experts: see `RunExperts`.
        cos_sin: the rotary table.
    """

    def __init__(
        self,
        weights: ModelWeights,
        cache: PagedCache,
        kernels: DecodeKernels,
        hybrid: HybridKernels | None,
        pool: BufferPool,
        make_experts: MakeExperts,
        run_experts: RunExperts,
        cos_sin: torch.Tensor,
    ) -> None:
        shape = weights.shape
        self._weights = weights
        self._cache = cache
        self._kernels = kernels
        self._hybrid = hybrid
        self._pool = pool
        self._make_experts = make_experts
        self._run_experts = run_experts
        self._cos_sin = cos_sin
        norms = kernels if hybrid is None else hybrid
        self._norm, self._add_norm = norms.rms_norm, norms.fused_add_rms_norm
        self._scale = shape.head_dim**-0.5
        linear = [shape.is_linear(layer) for layer in range(shape.num_layers)]
        # Where a layer's keys and values, or its states, lie among those of its kind.
        self._place = [linear[:layer].count(linear[layer]) for layer in range(shape.num_layers)]
        self._deltas = [self._delta_net(i, layer) for i, layer in enumerate(weights.layers)]
        self._shared = [
            SharedExpert(layer.mlp.shared, kernels, hybrid, pool)
            if hybrid and isinstance(layer.mlp, ExpertWeights) and layer.mlp.shared
            else None
            for layer in weights.layers
        ]
        self._experts = make_experts(kernels.experts)
        self._planned_experts: dict[int, Sequence[RoutedExperts | None]] = {}

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor, inputs: Mapping[str, torch.Tensor]
    ) -> None:
        """residual (M, H), the embedded tokens -> hidden (M, H), the normed output of the last layer."""
        pool, weights, eps = self._pool, self._weights, self._weights.shape.rms_norm_eps
        slots, lengths = self._bounded(inputs)
        first = weights.layers[0].input_norm
        pool.run(self._norm, residual, first, hidden, eps)
        for index, layer in enumerate(weights.layers):
            delta = self._deltas[index]
            if delta is not None:
                state_slots, row_ids = inputs["state_slots"], inputs["slot_mapping"]
                delta(hidden, state_slots, row_ids, inputs["positions"])
            else:
                self._attention(index, layer, hidden, inputs, slots, lengths)
            pool.run(self._add_norm, hidden, residual, layer.post_norm, eps)
            self._mlp(index, layer, hidden, inputs["slot_mapping"])
            last = index + 1 == len(weights.layers)
            norm = weights.final_norm if last else weights.layers[index + 1].input_norm
            pool.run(self._add_norm, hidden, residual, norm, eps)

    def _experts_on(self, kernels: ExpertKernels, rows: int) -> Sequence[RoutedExperts | None]:
        """Those of a plain bucket of `rows`, on `kernels`."""
        if kernels is self._kernels.experts:
            return self._experts
        if rows not in self._planned_experts:
            self._planned_experts[rows] = self._make_experts(kernels)
        return self._planned_experts[rows]

    def _delta_net(self, index: int, layer: LayerWeights | DeltaLayerWeights) -> DeltaNet | None:
        shape, states, place = self._weights.shape, self._cache.states, self._place[index]
        if isinstance(layer, LayerWeights):
            return None
        assert self._hybrid is not None
        assert shape.delta is not None
        assert states is not None
        return DeltaNet(
            layer.delta,
            shape.delta,
            states.conv[place],
            states.recurrent[place],
            self._kernels,
            self._hybrid,
            self._pool,
            shape.rms_norm_eps,
        )

    def _attention(
        self,
        index: int,
        layer: LayerWeights | DeltaLayerWeights,
        hidden: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        slots: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        """hidden (M, H), normed -> what attention adds to the residual."""
        assert isinstance(layer, LayerWeights)
        pool, kernels, shape = self._pool, self._kernels, self._weights.shape
        rows, dim = hidden.shape[0], shape.head_dim
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        place = self._place[index]
        keys, values = self._cache.keys[place], self._cache.values[place]

        width = shape.query_rows + 2 * kv_heads * dim
        qkv = pool.take("qkv", (rows, width), hidden.dtype)
        pool.run(kernels.linear, hidden, layer.qkv, layer.qkv_bias, qkv)
        queries = shape.query_rows // dim
        q, k, v = qkv.view(rows, -1, dim).split((queries, kv_heads, kv_heads), 1)
        gate = None
        if self._hybrid is not None:  # of each head its query, then its gate
            q, gate = q.unflatten(1, (heads, 2)).unbind(2)
        if kernels.takes_views:
            pool.run(self._norm, q, layer.q_norm, q, shape.rms_norm_eps)
            pool.run(self._norm, k, layer.k_norm, k, shape.rms_norm_eps)
        else:
            q = self._normed_copy("q", q, layer.q_norm)
            k = self._normed_copy("k", k, layer.k_norm)
        turned = (q[..., : shape.rotated], k[..., : shape.rotated])
        pool.run(kernels.rotary_embedding, inputs["positions"], *turned, self._cos_sin)
        pool.run(kernels.cache_write, k, v, keys, values, slots)
        attended = pool.take("attended", (rows, heads, dim), hidden.dtype)
        pool.run(
            kernels.attention,
            q,
            keys,
            values,
            inputs["block_tables"],
            lengths,
            attended,
            self._scale,
        )
        if self._hybrid is not None:
            pool.run(self._hybrid.output_gate, attended, gate)
        pool.release("qkv")
        if not kernels.takes_views:
            pool.release("q", "k")
        pool.run(kernels.linear, attended.view(rows, -1), layer.output, layer.output_bias, hidden)
        pool.release("attended")

    def _normed_copy(self, name: str, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The norm of a view of a fused buffer, without gaps between rows; stays taken as `name`."""
        pool, shape, eps = self._pool, tuple(heads.shape), self._weights.shape.rms_norm_eps
        norm = self._kernels.rms_norm
        if heads.is_contiguous():  # one row has no gaps
            out = pool.take(name, shape, heads.dtype)
            pool.run(norm, heads, weight, out, eps)
            return out
        packed = pool.take(f"{name}_packed", shape, heads.dtype)
        pool.run(_COPY, heads, packed)
        out = pool.take(name, shape, heads.dtype)
        pool.run(norm, packed, weight, out, eps)
        pool.release(f"{name}_packed")
        return out

    def _bounded(self, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots for the cache write and lengths for attention."""
        slots, lengths = inputs["slot_mapping"], inputs["seq_lens"]
        bound, pool = self._kernels.bound, self._pool
        if bound is None:
            return slots, lengths
        write_to = pool.take("bounded_slots", tuple(slots.shape), slots.dtype)
        reach = pool.take("bounded_lengths", tuple(lengths.shape), lengths.dtype)
        pool.run(bound, slots, lengths, write_to, reach, self._cache.max_context)
        return write_to, reach

    def _mlp(
        self,
        index: int,
        layer: LayerWeights | DeltaLayerWeights,
        hidden: torch.Tensor,
        row_ids: torch.Tensor,
    ) -> None:
        """hidden (M, H), normed -> what the MLP adds to the residual."""
        pool, kernels = self._pool, self._kernels
        if self._experts[index] is not None:
            self._routed(index, hidden, row_ids)
            return
        dense = layer.mlp
        assert isinstance(dense, DenseWeights)
        rows, inner = hidden.shape[0], dense.down.shape[1]
        gate_up = pool.take("gate_up", (rows, 2 * inner), hidden.dtype)
        pool.run(kernels.linear, hidden, dense.gate_up, None, gate_up)
        gated = pool.take("gated", (rows, inner), hidden.dtype)
        pool.run(kernels.experts.silu_and_mul, gate_up, gated)
        pool.release("gate_up")
        pool.run(kernels.linear, gated, dense.down, None, hidden)
        pool.release("gated")

    def _routed(self, index: int, hidden: torch.Tensor, row_ids: torch.Tensor) -> None:
        """`_mlp` of a layer with routed experts."""
        pool, rows, shared = self._pool, hidden.shape[0], self._shared[index]
        residual = None if shared is None else shared(hidden)

        def launch(kernels: ExpertKernels) -> None:
            experts = self._experts_on(kernels, rows)[index]
            assert experts is not None
            experts(hidden, row_ids, out=hidden, residual=residual)

        self._run_experts(rows, pool, launch)
        if shared is not None:
            pool.release("shared_expert")


def _copy(source: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(source)


_COPY = Operation("copies", "torch", _copy)
