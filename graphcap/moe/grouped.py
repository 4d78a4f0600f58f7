"""Experts of a batch whose routing is known: align → GEMM 1 → SiLU·mul → GEMM 2 → merge, on the pool.

The pairs (token, expert) are grouped, so that the tokens of an expert share the reading of its weights.
A backend with a `FusedGemm` goes the same way with the buffer sizes and block sizes of vLLM's fused-MoE
interface, and keeps padding rows in (see `ixformer`).
"""

from __future__ import annotations

import torch

from graphcap.moe.kernels import ExpertKernels, FusedGemm
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
        gemm = kernels.expert_gemm if kernels.fused is None else kernels.fused.gemm
        self._gemm1 = gemm.named("fused_moe w1")
        self._gemm2 = gemm.named("fused_moe w2")

    @property
    def drops(self) -> bool:
        """Whether a pair may have the id -1; otherwise every id must be an expert's."""
        return self._kernels.fused is None

    def __call__(
        self,
        hidden: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        """out (M, H) = the sum over k of weights[m, k] times expert ids[m, k] of token m.

        Args:
            hidden: (M, H), model dtype.
            gate_up: (E, 2I, H): gate rows, then up rows.
            down: (E, H, I).
            weights: (M, K) float32, contiguous.
            ids: (M, K) int32, contiguous; where `drops`, a pair with id -1 reaches no expert and adds
                nothing.
            out: (M, H), model dtype; may be `hidden`, which is read for the last time before `out` is
                written.
            residual: (M, H), model dtype, neither `hidden` nor `out`: added to every row, in the merge
                itself where the backend can (a shared expert's output).
        """
        fused = self._kernels.fused
        if fused is not None:
            self._by_fused_gemm(fused, hidden, gate_up, down, weights, ids, out, residual)
            return
        pool, kernels = self._pool, self._kernels
        tokens, top_k = ids.shape
        num_experts, width, inner = down.shape
        pairs = tokens * top_k
        block = block_size_m(tokens) if kernels.block is None else kernels.block
        length = sorted_length(pairs, num_experts, block)
        routing = self._aligned(ids, num_experts, length, -(-length // block), block)

        if kernels.gated_gemm is not None:
            cache2 = pool.take("cache2", (pairs, inner), hidden.dtype)
            pool.run(kernels.gated_gemm, hidden, gate_up, *routing, cache2, top_k, block)
        else:
            cache1 = pool.take("cache1", (pairs, 2 * inner), hidden.dtype)
            pool.run(self._gemm1, hidden, gate_up, *routing, cache1, top_k, block)
            cache2 = pool.take("cache2", (pairs, inner), hidden.dtype)
            pool.run(kernels.silu_and_mul, cache1, cache2)
            pool.release("cache1")
        cache3 = pool.take("cache3", (tokens, top_k, width), hidden.dtype)
        pool.run(self._gemm2, cache2, down, *routing, cache3.view(pairs, -1), 1, block)
        pool.release("cache2", *_ROUTING)
        pool.run(kernels.merge, cache3, weights, ids, out)
        pool.release("cache3")
        if residual is not None:
            pool.run(ADD, out, residual)

    def _by_fused_gemm(
        self,
        fused: FusedGemm,
        hidden: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> None:
        pool, kernels = self._pool, self._kernels
        tokens, top_k = ids.shape
        num_experts, width, inner = down.shape
        pairs = tokens * top_k
        block = fused_block_size(pairs)
        length = pairs + num_experts * (block - 1)
        lists = self._aligned(ids, num_experts, length, pairs + num_experts, block)
        routing = (weights, ids, *lists)

        cache1 = pool.take("cache1", (tokens, top_k, 2 * inner), hidden.dtype)
        pool.run(self._gemm1, hidden, gate_up, cache1, *routing, False, top_k, block)
        cache2 = pool.take("cache2", (pairs, inner), hidden.dtype)
        pool.run(kernels.silu_and_mul, cache1.view(pairs, -1), cache2)
        pool.release("cache1")
        cache3 = pool.take("cache3", (tokens, top_k, width), hidden.dtype)
        pool.run(self._gemm2, cache2, down, cache3, *routing, fused.weighs, 1, block)
        pool.release("cache2", *_ROUTING)
        pool.run(kernels.merge, cache3, weights, ids, out, residual)
        pool.release("cache3")

    def _aligned(
        self, ids: torch.Tensor, num_experts: int, length: int, blocks: int, block: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The pairs grouped by expert, in the buffers of `_ROUTING`, which stay taken."""
        pool = self._pool
        sorted_ids = pool.take("sorted_token_ids", (length,), torch.int32)
        expert_ids = pool.take("expert_ids", (blocks,), torch.int32)
        padded_count = pool.take("padded_token_count", (1,), torch.int32)
        lists = (sorted_ids, expert_ids, padded_count)
        pool.run(self._kernels.align, ids, *lists, num_experts, block)
        return lists


_ROUTING = ("sorted_token_ids", "expert_ids", "padded_token_count")


def _add(out: torch.Tensor, residual: torch.Tensor) -> None:
    out.add_(residual)


ADD = Operation("merge", "torch: add", _add)
