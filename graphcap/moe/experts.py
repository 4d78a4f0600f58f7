"""Routed experts on the pool, by one of two schedules.

- By expert: router logits → top-k → align → GEMM 1 → SiLU·mul → GEMM 2 → merge. The pairs (token,
  expert) are grouped, so that the tokens of an expert share the reading of its weights; see `grouped`.
- By pair, where a backend has it and few pairs share an expert: router logits → gate and up → down.
"""

from __future__ import annotations

from typing import Any

import torch

from graphcap.moe.grouped import (
    ADD,
    GroupedExperts,
    block_size_m,
    fused_block_size,
    sorted_length,
)
from graphcap.moe.kernels import ExpertKernels, PairKernels
from graphcap.moe.ranges import FUSED_MOE, FUSED_MOE_WITH_TOP_K, ROUTER, TOP_K, Ranges
from graphcap.operations import Operation
from graphcap.pool import BufferPool

__all__ = ["RoutedExperts", "block_size_m", "few_pairs", "fused_block_size", "sorted_length"]


def few_pairs(tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether the pairs of a batch are taken one by one: a single token, or at most one pair for every
    two experts.

    The experts of one token differ, so grouping never helps it. With more, experts are shared and by
    pair read several times: 1.3 times at half a pair an expert, if routing is random. Measured (H200,
    E 256, K 8, bfloat16) by pair takes 0.63 of the time at 1 token, 0.88 at 8, 0.92 at 16 (half a pair
    an expert), as much at 20 and 1.04 at 24.
    """
    return tokens == 1 or 2 * tokens * top_k <= num_experts


class RoutedExperts:
    """The experts of one layer. Owns no memory: weights are the model's, intermediates the pool's.

    Args:
        kernels: the kernel backend.
        pool: shared by all layers and buckets.
        router: (E, H) router weight.
        gate_up: (E, 2I, H): gate rows, then up rows.
        down: (E, H, I).
        top_k: experts of each token.
        renormalize: make the top-k weights of a token sum to 1.
        ranges: marks router, top-k and the rest; None: nothing is called.
    """

    def __init__(
        self,
        kernels: ExpertKernels,
        pool: BufferPool,
        router: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        top_k: int,
        renormalize: bool,
        ranges: Ranges | None = None,
    ) -> None:
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.top_k = top_k
        self.renormalize = renormalize
        self.num_experts, self.hidden_size, self.intermediate_size = down.shape
        self._pool = pool
        self._kernels = kernels
        self._grouped = GroupedExperts(kernels, pool)
        self._run_router = self._run_top_k = pool.run
        if ranges is not None:  # decided here, so that a step without ranges asks nothing
            self._run_router = ranges.around(ROUTER, pool.run)
            self._run_top_k = ranges.around(TOP_K, pool.run)
            self.routed = ranges.around(FUSED_MOE, self.routed)  # type: ignore[method-assign]
            self._by_pair = ranges.around(  # type: ignore[method-assign]
                FUSED_MOE_WITH_TOP_K, self._by_pair
            )

    def __call__(
        self,
        hidden: torch.Tensor,
        row_ids: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        """out (M, H) = the weighted sum of each token's experts; zeros for padding rows.

        Args:
            hidden: (M, H), model dtype.
            row_ids: (M,) int64 or int32; a row with a negative value is padding. It reaches no
                expert, or with a `FusedGemm` those of the first row with weight 0, and must then be
                finite for its zeros.
            out: (M, H), model dtype; may be `hidden`, which is read for the last time before `out` is
                written.
            residual: (M, H), model dtype, neither `hidden` nor `out`: added to every row, padding
                too, in the merge itself where the backend can (a shared expert's output).
        """
        logits = self._take_logits(hidden)
        self._run_router(self._kernels.router_gemm, hidden, self.router, logits)
        self._from_logits(hidden, logits, row_ids, out, residual)

    def after_norm(
        self,
        norm_router: Operation,
        arguments: tuple[Any, ...],
        hidden: torch.Tensor,
        row_ids: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """The same with a router that also makes its input: `norm_router`, called with `arguments` and
        the logits (M, E) float32, writes `hidden` and the logits."""
        logits = self._take_logits(hidden)
        self._run_router(norm_router, *arguments, logits)
        self._from_logits(hidden, logits, row_ids, out, None)

    def _take_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = (hidden.shape[0], self.num_experts)
        return self._pool.take("router_logits", shape, torch.float32)

    def _from_logits(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        row_ids: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> None:
        """What follows the router; releases the logits."""
        pool, kernels = self._pool, self._kernels
        tokens, top_k = hidden.shape[0], self.top_k
        weights = pool.take("topk_weights", (tokens, top_k), torch.float32)
        ids = pool.take("topk_ids", (tokens, top_k), torch.int32)
        if kernels.pairs is not None and few_pairs(tokens, top_k, self.num_experts):
            self._by_pair(kernels.pairs, hidden, row_ids, logits, weights, ids, out)
        else:
            self._run_top_k(kernels.topk_softmax, logits, row_ids, weights, ids, self.renormalize)
            pool.release("router_logits")
            self.routed(hidden, weights, ids, out, residual)
            residual = None
        if residual is not None:
            pool.run(ADD, out, residual)
        pool.release("topk_weights", "topk_ids")

    def _by_pair(
        self,
        kernels: PairKernels,
        hidden: torch.Tensor,
        row_ids: torch.Tensor,
        logits: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Writes `weights`, `ids` and `out`; releases the logits."""
        pool, renormalize = self._pool, self.renormalize
        act = pool.take("cache2", (ids.numel(), self.intermediate_size), hidden.dtype)
        routing = (weights, ids)
        pool.run(kernels.gate_up, hidden, logits, row_ids, self.gate_up, act, *routing, renormalize)
        pool.run(kernels.down, act, logits, row_ids, *routing, self.down, out, renormalize)
        pool.release("cache2", "router_logits")

    def routed(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        """The same by expert, for a routing that is known; see `GroupedExperts`."""
        self._grouped(hidden, self.gate_up, self.down, weights, ids, out, residual)
