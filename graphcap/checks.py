"""Checks: what a recording pinned is still in place, and a replay equals the eager step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graphcap.errors import VerificationError
from graphcap.fingerprint import Fingerprint

__all__ = [
    "TOLERANCE",
    "Difference",
    "Fingerprint",
    "brought_back",
    "compare",
    "differing_rows",
    "first_difference",
]

_MASK = 1e4

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-9}
"""Largest relative difference (to the largest magnitude) where results are not bitwise equal: the
same kernels give the same bits, but a library may choose another algorithm under capture."""


def compare(
    replayed: Mapping[str, torch.Tensor], eager: Mapping[str, torch.Tensor], what: str
) -> float:
    """Hold the outputs of a replay against those of the eager step.

    Returns:
        The largest relative difference; 0 where everything is bitwise equal.

    Raises:
        VerificationError: names the first differing output, its first differing row, and by how much.
    """
    if replayed.keys() != eager.keys():
        raise VerificationError(
            f"{what}: the replay has outputs {sorted(replayed)}, the eager step {sorted(eager)}; "
            f"a step must return the same names at every run"
        )
    worst, found = first_difference(replayed, eager)
    if found is not None:
        raise VerificationError(
            f"{what}: output {found.output!r} differs from the eager step, first in row {found.row} "
            f"(relative difference {found.size:.3g}, allowed {found.allowed:g}); the step reads "
            f"something that is not a slot (list tensors that it changes in state=), or a kernel is "
            f"not deterministic"
        )
    return worst


@dataclass(frozen=True)
class Difference:
    """Where two sets of outputs differ by more than `allowed`, relative to the largest magnitude."""

    output: str
    row: int
    size: float
    allowed: float


def first_difference(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> tuple[float, Difference | None]:
    """The largest relative difference up to the first one that is too large, and that one."""
    worst = 0.0
    for name, a in ours.items():
        size, rows = _rows_beyond(a, theirs[name])
        worst = max(worst, size)
        if rows is not None:
            first = int(rows.nonzero()[0])
            return worst, Difference(name, first, size, TOLERANCE.get(a.dtype, 0.0))
    return worst, None


def differing_rows(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], *, choices: bool
) -> dict[int, Difference]:
    """Row -> its first difference that is too large.

    Args:
        choices: whether integers count where there are floating-point outputs too. Between steps that
            round otherwise they differ at near-ties (a token, an expert) and nothing is wrong.
    """
    floats = any(tensor.is_floating_point() for tensor in ours.values())
    found: dict[int, Difference] = {}
    for name, a in ours.items():
        if floats and not choices and not a.is_floating_point():
            continue
        size, rows = _rows_beyond(a, theirs[name])
        for row in () if rows is None else rows.nonzero().flatten().tolist():
            found.setdefault(row, Difference(name, row, size, TOLERANCE.get(a.dtype, 0.0)))
    return found


def brought_back(row: torch.Tensor, start: torch.Tensor, to: torch.Tensor) -> bool:
    """Whether next to nothing is left in `row` of what is between `start` and `to`: rounding leaves more."""
    if not row.is_floating_point():
        return torch.equal(row, to)
    left, gap = ((each.double() - to.double()).abs().max() for each in (row, start))
    return bool(left <= 0.1 * gap)


def _rows_beyond(a: torch.Tensor, b: torch.Tensor) -> tuple[float, torch.Tensor | None]:
    """The largest relative difference, and which rows differ by more than is allowed; None: none does."""
    allowed = TOLERANCE.get(a.dtype, 0.0)
    if a.is_floating_point() and a.element_size() == 1:
        a, b = a.float(), b.float()  # exactly; torch 2.1 cannot compare float8
    if torch.equal(a, b):
        return 0.0, None
    size, wrong = _difference(a, b, allowed)
    if size <= allowed:
        return size, None
    return size, wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong.reshape(-1)


def _difference(
    ours: torch.Tensor, theirs: torch.Tensor, allowed: float
) -> tuple[float, torch.Tensor]:
    """Largest difference relative to the largest magnitude, and which elements differ by more than
    `allowed`. What masks write (-1e9, the lowest float) and is equal on both sides does not count as
    magnitude: it would make anything look small."""
    if not ours.is_floating_point():
        return float("inf"), ours != theirs
    a, b = ours.double(), theirs.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).masked_fill(same, 0).abs()
    beside = b.isnan() | b.isinf() | (same & (b.abs() >= _MASK))
    relative = gap / b.masked_fill(beside, 0).abs().max().clamp(min=1e-30)
    wrong = ~(relative <= allowed)
    largest = gap.max()
    return (float(relative.max()) if largest.isfinite() else float("inf")), wrong
