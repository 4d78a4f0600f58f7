"""The weights of gated delta nets and shared experts, and where a checkpoint has them.

Shapes: H hidden, C channels of the convolution and W its width, Gk and Gv key and value heads, Dk and Dv
their sizes, see `DeltaShape`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from graphcap.decode.delta_shape import DeltaShape


# eq=False: comparing tensors has no single answer, so two weights are equal only if they are one.
@dataclass(eq=False)
class DeltaWeights:
    """One gated delta net. `projection` stacks queries (Gk*Dk rows), keys, values (Gv*Dv), z (Gv*Dv),
    b (Gv) and a (Gv).

    projection (2*Gk*Dk + 2*Gv*Dv + 2*Gv, H), conv (C, W), oldest token first, decay_log (Gv,), the
    checkpoint's ``A_log``, time_bias (Gv,), its ``dt_bias``, norm (Dv,), output (H, Gv*Dv).
    """

    projection: torch.Tensor
    conv: torch.Tensor
    decay_log: torch.Tensor
    time_bias: torch.Tensor
    norm: torch.Tensor
    output: torch.Tensor


@dataclass(eq=False)
class SharedWeights:
    """A layer's shared expert. gate_up (2I, H), gate first; down (H, I); gate (1, H)."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate: torch.Tensor


class Grouped:
    """A checkpoint's tensor (G * sum of N, H) whose rows are parts of weights, taken in turn by group.

    Args:
        parts: views (G, N, H) into the weights: of each group the first N rows are those of the first
            part, the next those of the second.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.parts = tuple(parts)
        groups, _, width = self.parts[0].shape
        self._rows = [part.shape[1] for part in self.parts]
        self.shape = (groups * sum(self._rows), width)
        self.dtype = self.parts[0].dtype
        self.nbytes = sum(part.nbytes for part in self.parts)

    def copy_(self, values: torch.Tensor) -> None:
        """Write `values`, of this shape, to their places."""
        groups = values.view(self.parts[0].shape[0], -1, values.shape[1])
        for part, rows in zip(self.parts, groups.split(self._rows, 1), strict=True):
            part.copy_(rows)

    def assembled(self) -> torch.Tensor:
        """A copy as the checkpoint has it."""
        return torch.cat(self.parts, 1).flatten(0, 1)


def empty_delta(new: Callable[..., torch.Tensor], delta: DeltaShape, hidden: int) -> DeltaWeights:
    """A gated delta net of tensors that `new` makes from sizes."""
    return DeltaWeights(
        projection=new(delta.projection_rows, hidden),
        conv=new(delta.channels, delta.conv_width),
        decay_log=new(delta.num_value_heads),
        time_bias=new(delta.num_value_heads),
        norm=new(delta.value_dim),
        output=new(hidden, delta.values),
    )


def delta_views(
    prefix: str, weights: DeltaWeights, delta: DeltaShape, interleaved: bool
) -> Iterator[tuple[str, torch.Tensor | Grouped]]:
    """The tensors of a gated delta net by their names in a checkpoint, as views into `weights`.

    Args:
        interleaved: the projections are two, ordered by key head (Qwen3-Next): of each its query, key,
            and the values and z of its value heads; and their b and a. Otherwise there are four, qkv,
            z, b and a (Qwen3.5).
    """
    heads = delta.num_value_heads
    sizes = (delta.keys, delta.keys, delta.values, delta.values, heads, heads)
    q, k, v, z, b, a = weights.projection.split(sizes)
    if interleaved:
        groups = delta.num_key_heads
        by_head = [part.unflatten(0, (groups, -1)) for part in (q, k, v, z, b, a)]
        yield f"{prefix}in_proj_qkvz.weight", Grouped(by_head[:4])
        yield f"{prefix}in_proj_ba.weight", Grouped(by_head[4:])
    else:
        yield f"{prefix}in_proj_qkv.weight", weights.projection[: delta.channels]
        yield f"{prefix}in_proj_z.weight", z
        yield f"{prefix}in_proj_b.weight", b
        yield f"{prefix}in_proj_a.weight", a
    yield f"{prefix}conv1d.weight", weights.conv[:, None]
    yield f"{prefix}A_log", weights.decay_log
    yield f"{prefix}dt_bias", weights.time_bias
    yield f"{prefix}norm.weight", weights.norm
    yield f"{prefix}out_proj.weight", weights.output
