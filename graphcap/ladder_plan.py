"""The ladder of least expected cost for a distribution of batch sizes, exactly, by dynamic programming.

A batch of n rows runs in the smallest bucket b(n) >= n and costs c(b(n)), where c never falls
(`CostModel`). To be minimised is the mean of c(b(n)) over the steps. What does not depend on the ladder
is the mean of c(n), the lower bound: the rest is padding.

Some optimal ladder holds only sizes that occur, and the maximum: moving a bucket down to the largest
size that it serves raises no cost. So over the sizes s_1 < … < s_m that occur (s_m the maximum, perhaps
with no step), with W_j steps of up to s_j,

    best_k(j) = min over i < j of  best_{k-1}(i) + c(s_j) (W_j − W_i),      best_0(0) = 0,

is the least cost of the steps of up to s_j in k buckets of which s_j is the largest. The last term obeys
the quadrangle inequality, because c and W never fall: (c(s_j') − c(s_j)) (W_i' − W_i) >= 0 for
i <= i' and j <= j'. Hence the minimising i never falls as j grows, and each k takes O(m log m) by divide
and conquer: the middle j of a range bounds the i of both halves. All ranges of one depth are searched
in one vectorised sweep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphcap.cost_model import CostModel, Floats
from graphcap.errors import InputError, LadderError

Integers = NDArray[np.int64]

_LARGEST = 2**31


@dataclass(frozen=True)
class PlannedLadder:
    """The planned ladder and what it promises for the distribution that it was planned for.

    Attributes:
        buckets: ascending; the last one is the maximum. The fewest that reach the least cost.
        expected_cost: mean cost of a step in this ladder, in the unit of the cost model.
        lower_bound: mean cost of a step if every batch had a bucket of its own size: no ladder is
            below.
        padding_rows: mean rows of padding of a step.
        steps: steps of the distribution of up to the maximum.
        above_max: steps of the distribution above the maximum, which no ladder serves: not counted.
    """

    buckets: tuple[int, ...]
    expected_cost: float
    lower_bound: float
    padding_rows: float
    steps: int
    above_max: int


def plan_ladder(
    counts: Mapping[int, int],
    *,
    max_batch: int,
    max_graphs: int,
    cost: CostModel | None = None,
) -> PlannedLadder:
    """The ladder of at most `max_graphs` buckets, the maximum among them, of least expected cost.

    Args:
        counts: batch size -> steps of that size. Zero counts are as good as absent.
        max_batch: the exact maximum batch.
        cost: None: rows.

    Raises:
        LadderError: `max_batch` or `max_graphs` is not a positive integer.
        InputError: a size or a count is not usable, or no step is of up to `max_batch`.
    """
    for what, value in (("max_batch", max_batch), ("max_graphs", max_graphs)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _LARGEST:
            raise LadderError(f"{what}: expected an integer of at least 1, found {value!r}")
    cost = cost or CostModel()
    check_counts(counts)
    seen = sorted(size for size, count in counts.items() if count and size <= max_batch)
    if not seen:
        raise InputError(
            f"expected steps of 1 to {max_batch} rows to plan for, found none among "
            f"{sum(counts.values())} steps; serve some traffic first, or raise the maximum batch"
        )
    sizes = np.array(seen if seen[-1] == max_batch else [*seen, max_batch], dtype=np.int64)
    steps = np.array([counts.get(int(size), 0) for size in sizes], dtype=np.float64)
    chosen = _least(
        cost(sizes.astype(np.float64)), np.concatenate([[0.0], steps.cumsum()]), max_graphs
    )
    buckets = tuple(int(sizes[index]) for index in chosen)
    served = {size: counts[size] for size in seen}
    return PlannedLadder(
        buckets,
        expected_cost(buckets, served, cost),
        lower_bound(served, cost),
        expected_cost(buckets, served, CostModel()) - lower_bound(served, CostModel()),
        sum(served.values()),
        sum(count for size, count in counts.items() if size > max_batch),
    )


def _least(cost: Floats, steps_below: Floats, max_graphs: int) -> list[int]:
    """Indices of the sizes to record, ascending, the last size among them.

    Args:
        cost: (m,) of each size, never falling.
        steps_below: (m + 1,) steps of all sizes before each, and of all.
    """
    count = len(cost)
    # best[j], j = 0 … m: least cost of the first j sizes in so many buckets, the last of them s_j.
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    parents: list[Integers] = []
    totals: list[float] = []
    floor = float((cost * np.diff(steps_below)).sum())
    for _ in range(min(max_graphs, count)):
        best, parent = _one_more(best, cost, steps_below)
        parents.append(parent)
        totals.append(float(best[count]))
        if totals[-1] <= floor * (1 + 1e-12):
            break
    least = min(totals) * (1 + 1e-12)
    last_row = next(row for row, total in enumerate(totals) if total <= least)
    chosen, at = [], count
    for row in range(last_row, -1, -1):
        chosen.append(at - 1)
        at = int(parents[row][at])
    assert at == 0
    return chosen[::-1]


def _one_more(best: Floats, cost: Floats, steps_below: Floats) -> tuple[Floats, Integers]:
    """One more bucket: the new `best` and, for each j, the i that it came from."""
    count = len(cost)
    following = np.full(count + 1, np.inf)
    parent = np.zeros(count + 1, dtype=np.int64)
    # Ranges of j (inclusive) still to be solved, and the bounds of their i (inclusive).
    low_j, high_j = np.array([1]), np.array([count])
    low_i, high_i = np.array([0]), np.array([count - 1])
    while len(low_j):
        middle = (low_j + high_j) // 2
        last_i = np.minimum(high_i, middle - 1)
        lengths = last_i - low_i + 1
        starts = np.concatenate([[0], lengths.cumsum()[:-1]])
        owner = np.repeat(np.arange(len(middle)), lengths)
        i = np.arange(int(lengths.sum())) - starts[owner] + low_i[owner]
        j = middle[owner]
        value = best[i] + cost[j - 1] * (steps_below[j] - steps_below[i])
        least = np.minimum.reduceat(value, starts)
        is_least = np.flatnonzero(value == least[owner])
        # Of equal ones the first: the minimising i then never falls with j.
        _, first = np.unique(owner[is_least], return_index=True)
        found = i[is_least[first]]
        following[middle], parent[middle] = least, found
        left, right = low_j < middle, middle < high_j
        low_j, high_j, low_i, high_i = (
            np.concatenate([low_j[left], middle[right] + 1]),
            np.concatenate([middle[left] - 1, high_j[right]]),
            np.concatenate([low_i[left], found[right]]),
            np.concatenate([found[left], high_i[right]]),
        )
    return following, parent


def expected_cost(ladder: Iterable[int], counts: Mapping[int, int], cost: CostModel) -> float:
    """Mean cost of a step of `counts` in `ladder`. A step above its largest bucket, which runs eagerly
    there, is charged the cost of its own rows: the least that it can be."""
    sizes, steps = _arrays(counts)
    buckets = np.array(sorted(ladder), dtype=np.int64)
    index = np.searchsorted(buckets, sizes)
    ran = np.where(
        index < len(buckets), buckets[np.minimum(index, len(buckets) - 1)], sizes
    ).astype(np.float64)
    return float((cost(ran) * steps).sum() / steps.sum())


def lower_bound(counts: Mapping[int, int], cost: CostModel) -> float:
    """Mean cost of a step of `counts` without any padding."""
    sizes, steps = _arrays(counts)
    return float((cost(sizes.astype(np.float64)) * steps).sum() / steps.sum())


def check_counts(counts: Mapping[int, int]) -> None:
    """Raises `InputError` unless `counts` maps batch sizes to numbers of steps."""
    for size, count in counts.items():
        for what, value, least in (("batch size", size, 1), (f"steps of {size} rows", count, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(
                    f"{what}: expected an integer of at least {least}, found {value!r}"
                )
            if what == "batch size" and value >= _LARGEST:
                raise InputError(f"{what}: expected less than 2**31, found {value}")


def _arrays(counts: Mapping[int, int]) -> tuple[Integers, Floats]:
    sizes = np.array(sorted(counts), dtype=np.int64)
    return sizes, np.array([counts[int(size)] for size in sizes], dtype=np.float64)
