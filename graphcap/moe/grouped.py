"""Experts of a batch whose routing is known: align → GEMM 1 → SiLU·mul → GEMM 2 → merge, on the pool.

The pairs (token, expert) are grouped, so that the tokens of an expert share the reading of its weights.
"""

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


class GroupedExperts:
    """The schedule, for every layer that shares its kernels and its pool. Owns no memory.

    There is no chunk loop: decode batches are far below the sizes that need one, and a loop would
    multiply the launches.

    Args:
        kernels: the kernel backend.
        pool: shared by all layers and buckets.
    """

    def __init__(self, kernels: ExpertKernels, pool: BufferPool) -> None:
        self._pool = pool
        self._kernels = kernels
        self._gemm1 = kernels.expert_gemm.named("fused_moe w1")
        self._gemm2 = kernels.expert_gemm.named("fused_moe w2")

    def __call__(
        self,
        hidden: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """out (M, H) = the sum over k of weights[m, k] times expert ids[m, k] of token m.

        Args:
            hidden: (M, H), model dtype.
            gate_up: (E, 2I, H): gate rows, then up rows.
            down: (E, H, I).
            weights: (M, K) float32.
            ids: (M, K) int32; a pair with id -1 reaches no expert and adds nothing.
            out: (M, H), model dtype; may be `hidden`, which is read for the last time before `out` is
                written.
        """
        pool, kernels = self._pool, self._kernels
        tokens, top_k = ids.shape
        num_experts, width, inner = down.shape
        pairs = tokens * top_k
        block = block_size_m(tokens)
        length = sorted_length(pairs, num_experts, block)
        sorted_ids = pool.take("sorted_token_ids", (length,), torch.int32)
        expert_ids = pool.take("expert_ids", (-(-length // block),), torch.int32)
        padded_count = pool.take("padded_token_count", (1,), torch.int32)
        pool.run(kernels.align, ids, sorted_ids, expert_ids, padded_count, num_experts, block)
        routing = (sorted_ids, expert_ids, padded_count)

        cache1 = pool.take("cache1", (pairs, 2 * inner), hidden.dtype)
        pool.run(self._gemm1, hidden, gate_up, *routing, cache1, top_k, block)
        cache2 = pool.take("cache2", (pairs, inner), hidden.dtype)
        pool.run(kernels.silu_and_mul, cache1, cache2)
        pool.release("cache1")
        cache3 = pool.take("cache3", (tokens, top_k, width), hidden.dtype)
        pool.run(self._gemm2, cache2, down, *routing, cache3.view(pairs, -1), 1, block)
        pool.release("cache2", "sorted_token_ids", "expert_ids", "padded_token_count")
        pool.run(kernels.merge, cache3, weights, ids, out)
        pool.release("cache3")
