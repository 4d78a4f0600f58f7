"""DecodeStep: one new token for each sequence, from embedding to sampled token, for Qwen3-MoE and for
the hybrids Qwen3-Next and Qwen3.5-MoE.

The step also writes the slots of the next token (token id, position, cache slot, length), so that
consecutive tokens need nothing from the host but one launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from graphcap.decode.cache import PagedCache
from graphcap.decode.delta_net import DeltaNet
from graphcap.decode.first_run import first_run
from graphcap.decode.fused_layer import FusedLayers, fused_layers
from graphcap.decode.kernels import DecodeKernels
from graphcap.decode.rotary import rotary_table
from graphcap.decode.schedule import PlanChoice, Plans, Schedule
from graphcap.decode.shared_expert import SharedExpert
from graphcap.decode.weights import (
    DeltaLayerWeights,
    DenseWeights,
    ExpertWeights,
    LayerWeights,
    ModelWeights,
)
from graphcap.errors import InputError
from graphcap.inputs import PadPolicy, Slot
from graphcap.moe.experts import RoutedExperts
from graphcap.moe.kernels import ExpertKernels
from graphcap.moe.ranges import Ranges
from graphcap.operations import Operation, kernel_choices
from graphcap.pool import BufferPool


def decode_slots(
    blocks_per_sequence: int, slot_dtype: torch.dtype = torch.int64, states: bool = False
) -> dict[str, Slot]:
    """The slots of a decode step; `slot_dtype` is that of the cache's format, `states` says whether it
    has recurrent states.

    A padding row has token 0 at position 0 of a sequence of length 1 whose only block is the null
    block (an attention over no token would divide 0 by 0), and the cache slot -1: it writes nothing
    to the cache and reaches no expert. It changes no recurrent state; its
    state slot is the null slot.
    """
    slots = {
        "token_ids": Slot((), torch.int32, PadPolicy.ZERO),
        "positions": Slot((), torch.int64, PadPolicy.ZERO),
        "seq_lens": Slot((), torch.int32, PadPolicy.ONE),
        "slot_mapping": Slot((), slot_dtype, PadPolicy.fill(-1)),
        "block_tables": Slot((blocks_per_sequence,), torch.int32, PadPolicy.ZERO),
    }
    if states:
        slots["state_slots"] = Slot((), torch.int64, PadPolicy.ZERO)
    return slots


class DecodeStep:
    """A step over the slots of `decode_slots`.

    Returns ``token_ids`` (M,) int32, the greedily sampled tokens, and ``logits`` (M, V) in the
    model's dtype. Both lie in the pool.

    Args:
        weights: the model; shared, not owned.
        cache: keys and values; shared, not owned. Writing a token twice is the same as once. Not so
            its recurrent states: whoever runs a step twice restores `StateCache.tensors` between.
        kernels: the kernel backend.
        pool: where every intermediate comes from.
        ranges: marks the parts of MoE layers for a profiler; None: nothing is called.
        schedule: how layers run: "plain", operation by operation; "fused" (see `fused_layer`), each
            bucket by `plans`; or "auto", each by what was measured for it, here or for a packaged
            table, else by rule (see `schedule`).
        plans: of the fused schedule: the plan of a bucket; None: `default_plan`.
        tune_cache: the folder of plans tuned here; None: see `cache_folder`.

    Raises:
        InputError: the cache is not of the kernels' format, or the kernels cannot run a hybrid, or the
            schedule not this model.
    """

    def __init__(
        self,
        weights: ModelWeights,
        cache: PagedCache,
        kernels: DecodeKernels,
        pool: BufferPool,
        ranges: Ranges | None = None,
        schedule: str = "auto",
        plans: Plans | None = None,
        tune_cache: Path | None = None,
    ) -> None:
        shape = weights.shape
        if cache.format != kernels.cache_format:
            raise InputError(
                f"the cache is of format {cache.format}, the kernels want {kernels.cache_format}; "
                f"make it with PagedCache(..., format=kernels.cache_format)"
            )
        hybrid = kernels.hybrid if shape.is_hybrid else None
        if shape.is_hybrid and hybrid is None:
            raise InputError(
                f"the kernels have no operations for {shape.name}, a model with gated delta nets and "
                f"gated attention ({shape.model_type}); use GRAPHCAP_KERNELS=triton or reference"
            )
        self.kernel_choices = kernels.choices()
        if hybrid is not None:  # its norms stand in for the others
            own = hybrid.choices()
            taken = {choice.operation for choice in own}
            self.kernel_choices = (
                *(choice for choice in self.kernel_choices if choice.operation not in taken),
                *own,
            )
        self.weights = weights
        self.cache = cache
        self.cos_sin = rotary_table(
            shape.rotated,
            shape.rope_theta,
            cache.max_context + 1,  # a sequence that just filled its blocks stands one beyond
            device=weights.device,
            dtype=weights.dtype,
        )
        self._kernels = kernels
        self._pool = pool
        self._hybrid = hybrid
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
        self._ranges = ranges
        self._experts = self._make_experts(kernels.experts)
        self._planned_experts: dict[int, list[RoutedExperts | None]] = {}
        self._ran: set[int] = set()
        self._schedule = Schedule(schedule, weights, cache, kernels, plans, tune_cache)
        self._fused = fused_layers(
            self._schedule, weights, cache, kernels, pool, self._make_experts, self.cos_sin
        )
        if self._schedule.may_fuse:
            self.kernel_choices += kernel_choices(kernels.fused, {})

    def bucket_choice(self, rows: int) -> PlanChoice:
        """By which plan a bucket of `rows` runs, and why."""
        return self._schedule.choice(rows)

    def _experts_on(self, kernels: ExpertKernels, rows: int) -> list[RoutedExperts | None]:
        """Those of a plain bucket of `rows`, on `kernels`."""
        if kernels is self._kernels.experts:
            return self._experts
        if rows not in self._planned_experts:
            self._planned_experts[rows] = self._make_experts(kernels)
        return self._planned_experts[rows]

    def _make_experts(self, kernels: ExpertKernels) -> list[RoutedExperts | None]:
        """The experts of every layer; None where it is dense."""
        shape = self.weights.shape
        return [
            RoutedExperts(
                kernels,
                self._pool,
                layer.mlp.router,
                layer.mlp.gate_up,
                layer.mlp.down,
                top_k=shape.top_k,
                renormalize=shape.norm_topk_prob,
                ranges=self._ranges,
            )
            if isinstance(layer.mlp, ExpertWeights)
            else None
            for layer in self.weights.layers
        ]

    def _delta_net(self, index: int, layer: LayerWeights | DeltaLayerWeights) -> DeltaNet | None:
        shape, states, place = self.weights.shape, self.cache.states, self._place[index]
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

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        pool, kernels, weights, shape = self._pool, self._kernels, self.weights, self.weights.shape
        token_ids = inputs["token_ids"]
        rows = token_ids.shape[0]
        with pool.step():
            hidden = pool.take("hidden", (rows, shape.hidden_size), weights.dtype)
            residual = pool.take("residual", (rows, shape.hidden_size), weights.dtype)
            pool.run(kernels.embedding, token_ids, weights.embedding, residual)
            fused = self._fused(rows)
            if fused is None:
                self._plain(hidden, residual, inputs)
            else:
                self._by_plan(fused, hidden, residual, inputs)
            return self._sample(hidden, inputs)

    def _by_plan(
        self,
        fused: FusedLayers,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """`fused`, or `_plain` from here on where that cannot run and nobody has asked for it."""
        rows = hidden.shape[0]
        choice = self._schedule.choice(rows)
        if choice.source == "asked for" or rows in self._ran:
            fused(hidden, residual, inputs)
            return

        def without() -> None:
            embedding = self._kernels.embedding
            self._pool.run(embedding, inputs["token_ids"], self.weights.embedding, residual)
            self._plain(hidden, residual, inputs)

        failed = first_run(
            self._pool,
            lambda: fused(hidden, residual, inputs),
            without,
            "layers",
            rows,
            f"{choice.source} {choice.file}".strip(),
        )
        if failed is None:
            self._ran.add(rows)
        else:
            self._schedule.give_up(rows, failed)

    def _plain(
        self, hidden: torch.Tensor, residual: torch.Tensor, inputs: Mapping[str, torch.Tensor]
    ) -> None:
        """residual (M, H), the embedded tokens -> hidden (M, H), the normed output of the last layer."""
        pool, weights, eps = self._pool, self.weights, self.weights.shape.rms_norm_eps
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

    def _sample(
        self, hidden: torch.Tensor, inputs: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """hidden (M, H), normed -> the step's outputs; the slots become those of the next token."""
        pool, kernels, weights = self._pool, self._kernels, self.weights
        rows = hidden.shape[0]
        pool.release("residual")
        logits = pool.take("logits", (rows, weights.shape.vocab_size), weights.dtype)
        pool.run(kernels.linear, hidden, weights.lm_head, None, logits)
        sampled = pool.take("sampled_token_ids", (rows,), torch.int32)
        pool.run(kernels.argmax, logits, sampled)
        pool.run(
            kernels.advance,
            sampled,
            inputs["token_ids"],
            inputs["positions"],
            inputs["seq_lens"],
            inputs["slot_mapping"],
            inputs["block_tables"],
            self.cache.block_size,
        )
        return {"token_ids": sampled, "logits": logits}

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
        pool, kernels, shape = self._pool, self._kernels, self.weights.shape
        rows, dim = hidden.shape[0], shape.head_dim
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        place = self._place[index]
        keys, values = self.cache.keys[place], self.cache.values[place]

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
        pool.run(kernels.rotary_embedding, inputs["positions"], *turned, self.cos_sin)
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
        pool, shape, eps = self._pool, tuple(heads.shape), self.weights.shape.rms_norm_eps
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
        pool.run(bound, slots, lengths, write_to, reach, self.cache.max_context)
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

        self._schedule.run_experts(rows, pool, launch)
        if shared is not None:
            pool.release("shared_expert")


def _copy(source: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(source)


_COPY = Operation("copies", "torch", _copy)
