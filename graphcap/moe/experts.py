"""Routed experts: router logits → top-k → align → GEMM 1 → SiLU·mul → GEMM 2 → merge, on the pool."""

from __future__ import annotations

import torch

from graphcap.moe.kernels import ExpertKernels
from graphcap.pool import BufferPool


def block_size_m(tokens: int) -> int:
    """Rows of a GEMM block for a batch: 16 up to 16 tokens, 32 up to 64, 64 above.

    Source: the analysis of Qwen3.6-35B-A3B under vLLM with ixformer, whose fused MoE kernel takes
    only this parameter.
    """
    if tokens <= 16:
        return 16
    return 32 if tokens <= 64 else 64


def sorted_length(pairs: int, num_experts: int, block: int) -> int:
    """Room for `pairs` (token, expert) pairs grouped by expert, each group padded to whole blocks.

    Each group wastes at most block - 1 entries; with fewer pairs than experts each pair can have a
    block of its own at the most.
    """
    return min(pairs + num_experts * (block - 1), pairs * block)


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
        self._gemm1 = kernels.expert_gemm.named("fused_moe w1")
        self._gemm2 = kernels.expert_gemm.named("fused_moe w2")

    def __call__(self, hidden: torch.Tensor, row_ids: torch.Tensor, out: torch.Tensor) -> None:
        """out (M, H) = the weighted sum of each token's experts; zeros for padding rows.

        Args:
            hidden: (M, H), model dtype.
            row_ids: (M,) int64; a row with a negative value is padding and reaches no expert.
            out: (M, H), model dtype; may be `hidden`, which is read for the last time before `out` is
                written.
        """
        pool, kernels = self._pool, self._kernels
        tokens, top_k = hidden.shape[0], self.top_k
        pairs = tokens * top_k
        block = block_size_m(tokens)
        length = sorted_length(pairs, self.num_experts, block)

        logits = pool.take("router_logits", (tokens, self.num_experts), torch.float32)
        pool.run(kernels.router_gemm, hidden, self.router, logits)
        weights = pool.take("topk_weights", (tokens, top_k), torch.float32)
        ids = pool.take("topk_ids", (tokens, top_k), torch.int32)
        pool.run(kernels.topk_softmax, logits, row_ids, weights, ids, self.renormalize)
        pool.release("router_logits")

        sorted_ids = pool.take("sorted_token_ids", (length,), torch.int32)
        expert_ids = pool.take("expert_ids", (-(-length // block),), torch.int32)
        padded_count = pool.take("padded_token_count", (1,), torch.int32)
        pool.run(kernels.align, ids, sorted_ids, expert_ids, padded_count, self.num_experts, block)
        routing = (sorted_ids, expert_ids, padded_count)

        inner = self.intermediate_size
        cache1 = pool.take("cache1", (pairs, 2 * inner), hidden.dtype)
        pool.run(self._gemm1, hidden, self.gate_up, *routing, cache1, top_k, block)
        cache2 = pool.take("cache2", (pairs, inner), hidden.dtype)
        pool.run(kernels.silu_and_mul, cache1, cache2)
        pool.release("cache1")
        cache3 = pool.take("cache3", (tokens, top_k, self.hidden_size), hidden.dtype)
        pool.run(self._gemm2, cache2, self.down, *routing, cache3.view(pairs, -1), 1, block)
        pool.release("cache2", "sorted_token_ids", "expert_ids", "padded_token_count")
        pool.run(kernels.merge, cache3, weights, ids, out)
        pool.release("cache3", "topk_weights", "topk_ids")
