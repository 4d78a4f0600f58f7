"""The shared expert of one layer, on the pool: an MLP that every token passes, weighed by a gate."""

from __future__ import annotations

import torch

from graphcap.decode.delta_weights import SharedWeights
from graphcap.decode.kernels import DecodeKernels
from graphcap.decode.kernels.hybrid import HybridKernels
from graphcap.pool import BufferPool


class SharedExpert:
    """Owns no memory: weights are the model's, intermediates the pool's."""

    def __init__(
        self,
        weights: SharedWeights,
        kernels: DecodeKernels,
        hybrid: HybridKernels,
        pool: BufferPool,
    ) -> None:
        self.weights = weights
        self._kernels = kernels
        self._hybrid = hybrid
        self._pool = pool

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the expert makes of hidden (M, H), times sigmoid of its gate; stays taken as
        ``shared_expert`` until the caller releases it."""
        pool, kernels, weights = self._pool, self._kernels, self.weights
        rows, inner = hidden.shape[0], weights.down.shape[1]
        gate_up = pool.take("shared_gate_up", (rows, 2 * inner), hidden.dtype)
        pool.run(kernels.linear, hidden, weights.gate_up, None, gate_up)
        gated = pool.take("shared_gated", (rows, inner), hidden.dtype)
        pool.run(kernels.experts.silu_and_mul, gate_up, gated)
        pool.release("shared_gate_up")
        out = pool.take("shared_expert", tuple(hidden.shape), hidden.dtype)
        pool.run(kernels.linear, gated, weights.down, None, out)
        pool.release("shared_gated")
        pool.run(self._hybrid.shared_gate, hidden, weights.gate, out)
        return out
