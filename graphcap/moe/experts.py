"""Routed experts on the pool, by one of two schedules.

- By expert: router logits → top-k → align → GEMM 1 → SiLU·mul → GEMM 2 → merge. The pairs (token,
  expert) are grouped, so that the tokens of an expert share the reading of its weights.
  A backend with a `FusedGemm` goes the same way with the buffer sizes and block sizes of vLLM's
  fused-MoE interface, and keeps padding rows in (see `ixformer`).
- By pair, where a backend has it and few pairs share an expert: router logits → gate and up → down.
"""

from __future__ import annotations

import torch

from graphcap.moe.kernels import ExpertKernels, FusedGemm, PairKernels
from graphcap.operations import Operation
from graphcap.pool import BufferPool


def block_size_m(tokens: int) -> int:
    """Rows of a GEMM block for a batch: 16 up to 16 tokens, 32 up to 64, 64 above.

    Source: the analysis of Qwen3.6-35B-A3B under vLLM with ixformer, whose fused MoE kernel takes
    only this parameter.
    """
    if tokens <= 16:
        return 16
    return 32 if tokens <= 64 else 64


def fused_block_size(pairs: int) -> int:
    """Rows of a block of a `FusedGemm`: 32 up to 64 pairs, 64 up to 1024, else 256.

    Source: the choice of the vLLM fork for CoreX cards, which goes by ``topk_ids.numel()``.
    """
    if pairs <= 64:
        return 32
    return 64 if pairs <= 1024 else 256


def sorted_length(pairs: int, num_experts: int, block: int) -> int:
    """Room for `pairs` (token, expert) pairs grouped by expert, each group padded to whole blocks.

    Each group wastes at most block - 1 entries; with fewer pairs than experts each pair can have a
    block of its own at the most.
    """
    return min(pairs + num_experts * (block - 1), pairs * block)


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

    There is no chunk loop: decode batches are far below the sizes that need one, and a loop would
    multiply the launches.

    Args:
        kernels: the kernel backend.
        pool: shared by all layers and buckets.
        router: (E, H) router weight.
        gate_up: (E, 2I, H): gate rows, then up rows.
        down: (E, H, I).
        top_k: experts of each token.
        renormalize: make the top-k weights of a token sum to 1.
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
    ) -> None:
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.top_k = top_k
        self.renormalize = renormalize
        self.num_experts, self.hidden_size, self.intermediate_size = down.shape
        self._pool = pool
        self._kernels = kernels
        gemm = kernels.expert_gemm if kernels.fused is None else kernels.fused.gemm
        self._gemm1 = gemm.named("fused_moe w1")
        self._gemm2 = gemm.named("fused_moe w2")

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
        pool, kernels = self._pool, self._kernels
        tokens, top_k = hidden.shape[0], self.top_k
        logits = pool.take("router_logits", (tokens, self.num_experts), torch.float32)
        pool.run(kernels.router_gemm, hidden, self.router, logits)
        weights = pool.take("topk_weights", (tokens, top_k), torch.float32)
        ids = pool.take("topk_ids", (tokens, top_k), torch.int32)
        if kernels.pairs is not None and few_pairs(tokens, top_k, self.num_experts):
            self._by_pair(kernels.pairs, hidden, row_ids, logits, weights, ids, out)
        else:
            pool.run(kernels.topk_softmax, logits, row_ids, weights, ids, self.renormalize)
            pool.release("router_logits")
            self.routed(hidden, weights, ids, out, residual)
            residual = None
        if residual is not None:
            pool.run(_ADD, out, residual)
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
        """The same by expert, for a routing that is known: weights (M, K) float32, ids (M, K) int32,
        both contiguous. With a `FusedGemm` every id is an expert's; otherwise -1 drops a pair."""
        fused = self._kernels.fused
        if fused is not None:
            self._by_fused_gemm(fused, hidden, weights, ids, out, residual)
            return
        self._by_expert(hidden, weights, ids, out)
        if residual is not None:
            self._pool.run(_ADD, out, residual)

    def _by_expert(
        self, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor
    ) -> None:
        pool, kernels = self._pool, self._kernels
        tokens, top_k = ids.shape
        pairs = tokens * top_k
        block = block_size_m(tokens)
        length = sorted_length(pairs, self.num_experts, block)
        routing = self._aligned(ids, length, -(-length // block), block)

        inner = self.intermediate_size
        cache1 = pool.take("cache1", (pairs, 2 * inner), hidden.dtype)
        pool.run(self._gemm1, hidden, self.gate_up, *routing, cache1, top_k, block)
        cache2 = pool.take("cache2", (pairs, inner), hidden.dtype)
        pool.run(kernels.silu_and_mul, cache1, cache2)
        pool.release("cache1")
        cache3 = pool.take("cache3", (tokens, top_k, self.hidden_size), hidden.dtype)
        pool.run(self._gemm2, cache2, self.down, *routing, cache3.view(pairs, -1), 1, block)
        pool.release("cache2", *_ROUTING)
        pool.run(kernels.merge, cache3, weights, ids, out)
        pool.release("cache3")

    def _by_fused_gemm(
        self,
        fused: FusedGemm,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> None:
        pool, kernels = self._pool, self._kernels
        tokens, top_k = ids.shape
        pairs, experts = tokens * top_k, self.num_experts
        block = fused_block_size(pairs)
        lists = self._aligned(ids, pairs + experts * (block - 1), pairs + experts, block)
        routing = (weights, ids, *lists)

        inner = self.intermediate_size
        cache1 = pool.take("cache1", (tokens, top_k, 2 * inner), hidden.dtype)
        pool.run(self._gemm1, hidden, self.gate_up, cache1, *routing, False, top_k, block)
        cache2 = pool.take("cache2", (pairs, inner), hidden.dtype)
        pool.run(kernels.silu_and_mul, cache1.view(pairs, -1), cache2)
        pool.release("cache1")
        cache3 = pool.take("cache3", (tokens, top_k, self.hidden_size), hidden.dtype)
        pool.run(self._gemm2, cache2, self.down, cache3, *routing, fused.weighs, 1, block)
        pool.release("cache2", *_ROUTING)
        pool.run(kernels.merge, cache3, weights, ids, out, residual)
        pool.release("cache3")

    def _aligned(
        self, ids: torch.Tensor, length: int, blocks: int, block: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The pairs grouped by expert, in the buffers of `_ROUTING`, which stay taken."""
        pool = self._pool
        sorted_ids = pool.take("sorted_token_ids", (length,), torch.int32)
        expert_ids = pool.take("expert_ids", (blocks,), torch.int32)
        padded_count = pool.take("padded_token_count", (1,), torch.int32)
        lists = (sorted_ids, expert_ids, padded_count)
        pool.run(self._kernels.align, ids, *lists, self.num_experts, block)
        return lists


_ROUTING = ("sorted_token_ids", "expert_ids", "padded_token_count")


def _add(out: torch.Tensor, residual: torch.Tensor) -> None:
    out.add_(residual)


_ADD = Operation("merge", "torch: add", _add)
