"""One gated delta net of a decode step, on the pool."""

from __future__ import annotations

import torch

from graphcap.decode.delta_shape import DeltaShape
from graphcap.decode.delta_weights import DeltaWeights
from graphcap.decode.kernels import DecodeKernels
from graphcap.decode.kernels.hybrid import HybridKernels
from graphcap.pool import BufferPool


class DeltaNet:
    """Projection → convolution → delta rule → gated norm → output projection, for one token a row.

    Owns no memory: weights are the model's, states the cache's, intermediates the pool's.

    Args:
        conv, recurrent: this layer's states in a `StateCache`.
        eps: added to the mean square in the gated norm.
    """

    def __init__(
        self,
        weights: DeltaWeights,
        shape: DeltaShape,
        conv: torch.Tensor,
        recurrent: torch.Tensor,
        kernels: DecodeKernels,
        hybrid: HybridKernels,
        pool: BufferPool,
        eps: float,
    ) -> None:
        self.weights = weights
        self.conv = conv
        self.recurrent = recurrent
        self._shape = shape
        self._kernels = kernels
        self._hybrid = hybrid
        self._pool = pool
        self._eps = eps

    def __call__(
        self,
        hidden: torch.Tensor,
        slots: torch.Tensor,
        row_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """hidden (M, H), normed -> what the layer adds to the residual, in place.

        Args:
            slots: (M,) int64, where the row's state is.
            row_ids: (M,) int64 or int32; a row with a negative value is padding and changes no state.
            positions: (M,) int64; at 0 a sequence starts.
        """
        pool, weights, shape, rows = self._pool, self.weights, self._shape, hidden.shape[0]
        heads, dim = shape.num_value_heads, shape.value_dim
        projected = pool.take("delta_projected", (rows, shape.projection_rows), hidden.dtype)
        pool.run(self._kernels.linear, hidden, weights.projection, None, projected)
        new, z, beta, decay = projected.split((shape.channels, shape.values, heads, heads), 1)
        mixed = pool.take("delta_mixed", (rows, shape.channels), hidden.dtype)
        pool.run(
            self._hybrid.conv_update, new, weights.conv, self.conv, slots, row_ids, positions, mixed
        )
        read = pool.take("delta_read", (rows, heads, dim), hidden.dtype)
        pool.run(
            self._hybrid.delta_rule,
            mixed,
            beta,
            decay,
            weights.decay_log,
            weights.time_bias,
            self.recurrent,
            slots,
            row_ids,
            positions,
            read,
        )
        pool.release("delta_mixed")
        gate = z.unflatten(1, (heads, dim))
        pool.run(self._hybrid.gated_rms_norm, read, gate, weights.norm, read, self._eps)
        pool.release("delta_projected")
        pool.run(self._kernels.linear, read.view(rows, -1), weights.output, None, hidden)
        pool.release("delta_read")
