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
from graphcap.decode.first_run import first_run
from graphcap.decode.fused_layer import FusedLayers, fused_layers
from graphcap.decode.kernels import DecodeKernels
from graphcap.decode.plain_layer import PlainLayers
from graphcap.decode.rotary import rotary_table
from graphcap.decode.schedule import PlanChoice, Plans, Schedule
from graphcap.decode.weights import (
    ExpertWeights,
    ModelWeights,
)
from graphcap.errors import InputError
from graphcap.inputs import PadPolicy, Slot
from graphcap.moe.experts import RoutedExperts
from graphcap.moe.kernels import ExpertKernels
from graphcap.moe.ranges import Ranges
from graphcap.operations import kernel_choices
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
        self._ranges = ranges
        self._ran: set[int] = set()
        self._schedule = Schedule(schedule, weights, cache, kernels, plans, tune_cache)
        self._plain = PlainLayers(
            weights,
            cache,
            kernels,
            hybrid,
            pool,
            self._make_experts,
            self._schedule.run_experts,
            self.cos_sin,
        )
        self._fused = fused_layers(
            self._schedule, weights, cache, kernels, pool, self._make_experts, self.cos_sin
        )
        if self._schedule.may_fuse:
            self.kernel_choices += kernel_choices(kernels.fused, {})

    def bucket_choice(self, rows: int) -> PlanChoice:
        """By which plan a bucket of `rows` runs, and why."""
        return self._schedule.choice(rows)

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
