"""CostModel: what one replay of a bucket costs, from measured times where there are any, else in rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphcap.errors import InputError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CostModel:
    """The cost of a bucket of n rows: never falls as n grows, so a smaller bucket never costs more.

    Measured times are made monotone by isotonic regression (least squares, every bucket counts the
    same): what falls from one bucket to the next larger is noise of the measurement, or a kernel that
    a plan should not pad up to. Between measured buckets the cost is linear. Below the smallest one it
    is that of the smallest; above the largest it goes on at the slope between the smallest and the
    largest. Without two measured buckets the cost is n.

    Attributes:
        unit: ``ms`` of one replay, or ``rows`` computed by it.
        sizes: measured buckets, ascending; empty where the cost is n.
        measured: their times as measured, ms.
        fitted: their times as fitted, ms.
    """

    unit: str = "rows"
    sizes: tuple[int, ...] = ()
    measured: tuple[float, ...] = ()
    fitted: tuple[float, ...] = ()

    @classmethod
    def of_times(cls, times: Mapping[int, float]) -> CostModel:
        """Fit to `times`: bucket -> ms of a replay.

        Raises:
            InputError: a time is not a positive number.
        """
        for size, ms in times.items():
            if not 0 < ms < float("inf"):
                raise InputError(
                    f"ms of bucket {size}: expected a positive number, found {ms!r}; "
                    f"measure the bucket again or leave it out"
                )
        if len(times) < 2:
            return cls()
        sizes = tuple(sorted(times))
        measured = tuple(float(times[size]) for size in sizes)
        return cls("ms", sizes, measured, tuple(isotonic(measured)))

    def __call__(self, rows: Floats) -> Floats:
        """The cost of buckets of `rows` rows, elementwise."""
        if not self.sizes:
            return np.asarray(rows, dtype=np.float64)
        cost = np.interp(rows, self.sizes, self.fitted)
        slope = (self.fitted[-1] - self.fitted[0]) / (self.sizes[-1] - self.sizes[0])
        beyond = np.maximum(np.asarray(rows, dtype=np.float64) - self.sizes[-1], 0.0)
        return np.asarray(cost + slope * beyond, dtype=np.float64)

    @property
    def text(self) -> str:
        if not self.sizes:
            return "rows computed"
        return f"ms of a replay, fitted to {len(self.sizes)} measured buckets"


def isotonic(values: tuple[float, ...]) -> list[float]:
    """The nondecreasing values nearest to `values` by squares (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []  # (mean, length), means ascending
    for value in values:
        mean, length = value, 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean = (before * count + mean * length) / (count + length)
            length += count
        blocks.append((mean, length))
    return [mean for mean, length in blocks for _ in range(length)]
