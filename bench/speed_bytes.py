"""What a decode step must read: the numerator of its bandwidth, and with the card's the floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphcap.decode.model_shape import ModelShape


@dataclass(frozen=True)
class Read:
    """Bytes that one step reads at least once.

    Attributes:
        weights: everything but the embedding and experts that no token chose.
        cache: keys and values of the tokens before, and recurrent states.
        experts: distinct experts that the step's tokens chose, mean of the sparse layers.
    """

    weights: float
    cache: float
    experts: float

    @property
    def total(self) -> float:
        return self.weights + self.cache


def bytes_read(
    shape: ModelShape, dtype: torch.dtype, rows: int, context: int, chosen: Sequence[torch.Tensor]
) -> Read:
    """What one step of `rows` sequences of `context` tokens reads, by the routing seen.

    Args:
        chosen: expert ids (rows, K) of every sparse layer of one or more steps, step by step; several
            steps are averaged.
    """
    sparse = shape.num_sparse_layers
    if len(chosen) % max(sparse, 1) or (sparse and not chosen):
        raise ValueError(f"expected ids of {sparse} sparse layers a step, found {len(chosen)}")
    hit = [int(ids.unique().numel()) for ids in chosen]
    mean = sum(hit) / len(hit) if hit else 0.0
    one = 3 * shape.hidden_size * shape.moe_intermediate_size * dtype.itemsize
    # Counted with one expert in each layer, then with as many as were hit.
    weights = shape.bytes_read_per_step(dtype, rows, experts=1 if sparse else 0)
    attention = shape.num_layers - shape.num_linear_layers
    token = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    cache = rows * attention * context * token
    if shape.delta is not None:
        cache += rows * shape.num_linear_layers * shape.delta.state_bytes(dtype)
    return Read(weights + sparse * (mean - 1) * one if sparse else weights, cache, mean)


def routing_of_steps(step, start, steps: int) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """Expert ids of the first `steps` tokens of a plain torch step after `start` has put it there."""
    start()
    with torch.no_grad():
        step()  # as in the measurement, the first token is not timed
        step.chosen = []
        for _ in range(steps):
            step()
    chosen, step.chosen = step.chosen, None
    return chosen
