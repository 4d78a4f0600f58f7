"""What verification notes about padding: signs of a fault that do not prove one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from graphcap.inputs import NUM_ROWS

_FAR = 0.2
"""Relative difference of a row that no rounding explains."""


def row_count_notes(
    declared: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """Say that all rows are far from those of the unpadded step although they do not feel what padding
    holds. Kernels and near-ties of a router that depend on shapes do not reach all rows; ``x.shape[0]``
    as a number does.

    Args:
        declared: outputs of the padded step, real rows alone.
        exact: of the unpadded step.
    """
    for name, ours in declared.items():
        other = exact.get(name)
        if other is None or not ours.is_floating_point() or ours.shape != other.shape:
            continue
        if not ours.numel():
            continue
        a, b = (
            t.double().flatten(1) if t.dim() > 1 else t.double()[:, None] for t in (ours, other)
        )
        gaps = (a - b).abs().amax(1) / b.abs().amax(1).clamp(min=1e-30)
        if bool((gaps > _FAR).all()):
            yield (
                f"output {name!r} of every row is far from that of the step without padding, whatever "
                f"padding holds; if the step uses the number of rows of a slot (x.shape[0]) as a "
                f"value, that is the bucket's: use inputs['{NUM_ROWS}']"
            )


def pads_notes(outputs: Mapping[str, torch.Tensor], rows: int) -> Iterator[str]:
    """Say that `outputs` of padding rows, from `rows` on, are NaN where those of real rows are not."""
    for name, output in outputs.items():
        is_float = output.is_floating_point() and output.element_size() > 1
        if is_float and output[rows:].isnan().any() and not output[:rows].isnan().any():
            yield (
                f"padding rows give NaN in output {name!r}, which is not returned but meets whatever "
                f"reads whole buffers; look at the pad values of the slots (a length wants 1)"
            )
