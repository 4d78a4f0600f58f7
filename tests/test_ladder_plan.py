"""The planned ladder is the best one: brute force says so, and so do the bounds."""

from __future__ import annotations

import itertools
import random
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcap.cost_model import CostModel, isotonic
from graphcap.default_ladders import powers_of_two, sglang_ladder, vllm_ladder
from graphcap.errors import InputError, LadderError
from graphcap.ladder_plan import expected_cost, lower_bound, plan_ladder

COUNTS = st.dictionaries(st.integers(1, 11), st.integers(0, 6), min_size=1, max_size=8)
TIMES = st.dictionaries(
    st.integers(1, 12), st.floats(0.01, 100, allow_subnormal=False), min_size=0, max_size=5
)


def independent_cost(times: Mapping[int, float], rows: int) -> float:
    """`CostModel` once more, one number at a time, isotonic regression by its min-max formula."""
    sizes = sorted(times)
    if len(sizes) < 2:
        return float(rows)
    raw = [times[size] for size in sizes]
    count = len(raw)

    def mean(first: int, last: int) -> float:
        return sum(raw[first : last + 1]) / (last + 1 - first)

    fitted = [
        max(min(mean(a, b) for b in range(i, count)) for a in range(i + 1)) for i in range(count)
    ]
    if rows <= sizes[0]:
        return fitted[0]
    if rows >= sizes[-1]:
        slope = (fitted[-1] - fitted[0]) / (sizes[-1] - sizes[0])
        return fitted[-1] + slope * (rows - sizes[-1])
    after = bisect_left(sizes, rows)
    left, right = sizes[after - 1], sizes[after]
    part = (rows - left) / (right - left)
    return fitted[after - 1] * (1 - part) + fitted[after] * part


def mean_cost(
    ladder: Sequence[int], counts: Mapping[int, int], times: Mapping[int, float]
) -> float:
    served = {size: n for size, n in counts.items() if size <= ladder[-1]}
    total = sum(
        n * independent_cost(times, min(b for b in ladder if b >= size))
        for size, n in served.items()
    )
    return total / sum(served.values())


def brute_force(
    counts: Mapping[int, int], times: Mapping[int, float], max_batch: int, max_graphs: int
) -> tuple[float, int]:
    """(least cost, fewest buckets that reach it) of every ladder there is, sizes unseen included."""
    found = [
        (mean_cost((*others, max_batch), counts, times), number + 1)
        for number in range(max_graphs)
        for others in itertools.combinations(range(1, max_batch), number)
    ]
    least = min(cost for cost, _ in found)
    return least, min(number for cost, number in found if cost <= least * (1 + 1e-9))


@settings(deadline=None, max_examples=300)
@given(counts=COUNTS, times=TIMES, max_batch=st.integers(1, 9), max_graphs=st.integers(1, 5))
def test_no_ladder_is_better(
    counts: dict[int, int], times: dict[int, float], max_batch: int, max_graphs: int
):
    counts[max(1, max_batch - 1)] = 2
    planned = plan_ladder(
        counts, max_batch=max_batch, max_graphs=max_graphs, cost=CostModel.of_times(times)
    )
    least, fewest = brute_force(counts, times, max_batch, max_graphs)
    assert planned.expected_cost == pytest.approx(least, rel=1e-9)
    assert len(planned.buckets) == fewest <= max_graphs
    assert planned.buckets[-1] == max_batch
    assert list(planned.buckets) == sorted(set(planned.buckets))
    assert mean_cost(planned.buckets, counts, times) == pytest.approx(least, rel=1e-9)
    served = {size: n for size, n in counts.items() if size <= max_batch}
    assert planned.steps == sum(served.values())
    assert planned.above_max == sum(counts.values()) - planned.steps
    padding = sum(
        n * (min(b for b in planned.buckets if b >= size) - size) for size, n in served.items()
    )
    assert planned.padding_rows == pytest.approx(padding / planned.steps, abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32))
def test_more_graphs_never_cost_more_and_end_at_the_bound(seed: int):
    draw = random.Random(seed)
    counts = {draw.randint(1, 300): draw.randint(1, 1000) for _ in range(draw.randint(1, 40))}
    cost = CostModel.of_times({draw.randint(1, 300): draw.random() + 0.1 for _ in range(6)})
    distinct = len(counts) + 1
    planned = [
        plan_ladder(counts, max_batch=300, max_graphs=n, cost=cost)
        for n in (*range(1, min(distinct, 8)), distinct)
    ]
    costs = [plan.expected_cost for plan in planned]
    assert costs == sorted(costs, reverse=True)
    assert min(costs) >= planned[0].lower_bound * (1 - 1e-12)
    assert planned[-1].expected_cost == pytest.approx(planned[-1].lower_bound, rel=1e-12)


def test_ten_thousand_sizes_and_64_graphs_in_time():
    draw = random.Random(3)
    counts = {size: draw.randint(1, 10**6) for size in range(1, 10_001)}
    cost = CostModel.of_times({1: 5.0, 64: 5.4, 256: 7.0, 250: 7.2, 4096: 30.0, 10_000: 90.0})
    started = time.perf_counter()
    planned = plan_ladder(counts, max_batch=10_000, max_graphs=64, cost=cost)
    assert time.perf_counter() - started < 5
    assert len(planned.buckets) == 64
    # Moving any one bucket by one size is no improvement.
    for index in range(63):
        for moved in (planned.buckets[index] - 1, planned.buckets[index] + 1):
            ladder = {*planned.buckets[:index], moved, *planned.buckets[index + 1 :]}
            assert expected_cost(ladder, counts, cost) >= planned.expected_cost * (1 - 1e-12)


def test_large_counts_stay_exact():
    counts = {1: 10**15, 2: 1, 3: 10**15, 4: 1}
    assert plan_ladder(counts, max_batch=4, max_graphs=3).buckets == (1, 3, 4)


def test_sizes_that_cost_the_same_share_a_bucket():
    flat = CostModel.of_times({1: 5.0, 16: 5.0, 32: 8.0})
    counts = dict.fromkeys(range(1, 17), 10) | {32: 1}
    assert plan_ladder(counts, max_batch=32, max_graphs=20, cost=flat).buckets == (16, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_batch": 0}, "max_batch: expected an integer of at least 1, found 0"),
        ({"max_graphs": True}, "max_graphs: expected an integer of at least 1, found True"),
    ],
)
def test_limits_that_are_none(arguments: dict[str, int], message: str):
    with pytest.raises(LadderError, match=message):
        plan_ladder({1: 1}, **{"max_batch": 4, "max_graphs": 2, **arguments})


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({}, "expected steps of 1 to 4 rows to plan for, found none among 0 steps"),
        ({1: 0, 8: 5}, "found none among 5 steps; serve some traffic first"),
        ({0: 1}, "batch size: expected an integer of at least 1, found 0"),
        ({2: -1}, "steps of 2 rows: expected an integer of at least 0, found -1"),
        ({2: 0.5}, "steps of 2 rows: expected an integer of at least 0, found 0.5"),
        ({2**31: 1}, r"expected less than 2\*\*31"),
    ],
)
def test_counts_that_are_none(counts: dict[int, int], message: str):
    with pytest.raises(InputError, match=message):
        plan_ladder(counts, max_batch=4, max_graphs=2)


# -- the cost model ------------------------------------------------------------------------------


def test_fit_of_measured_times():
    model = CostModel.of_times({1: 4.0, 2: 5.0, 4: 3.0, 8: 10.0})
    assert model.unit == "ms"
    assert model.measured == (4.0, 5.0, 3.0, 10.0)
    assert model.fitted == (4.0, 4.0, 4.0, 10.0)
    assert [round(float(c), 9) for c in model([1, 3, 6, 8, 15])] == [4.0, 4.0, 7.0, 10.0, 16.0]


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=8))
def test_isotonic_regression_is_the_nearest_nondecreasing_sequence(values: list[float]):
    fitted = isotonic(tuple(values))
    assert all(a <= b for a, b in itertools.pairwise(fitted))
    count = len(values)
    for i in range(count):
        by_formula = max(
            min(sum(values[a : b + 1]) / (b + 1 - a) for b in range(i, count)) for a in range(i + 1)
        )
        assert fitted[i] == pytest.approx(by_formula, rel=1e-9)


@pytest.mark.parametrize("times", [{}, {8: 2.0}])
def test_without_two_times_a_bucket_costs_its_rows(times: dict[int, float]):
    model = CostModel.of_times(times)
    assert model.unit == "rows"
    assert list(model([1, 7])) == [1, 7]


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none(ms: float):
    with pytest.raises(InputError, match="ms of bucket 8: expected a positive number"):
        CostModel.of_times({1: 1.0, 8: ms})


# -- what engines record -------------------------------------------------------------------------


def test_vllm_ladder():
    assert vllm_ladder(30) == (1, 2, 4, 8, 16, 24, 30)
    assert vllm_ladder(3) == (1, 2, 3)
    assert vllm_ladder(512)[-18:-15] == (248, 256, 272)
    assert len(vllm_ladder(512)) == 51
    assert vllm_ladder(1024) == vllm_ladder(512)


def test_sglang_ladder():
    assert sglang_ladder(30) == (1, 2, 4, 8, 12, 16, 24, 30)
    assert len(sglang_ladder(256)) == 36  # as SGLang logs at start-up
    assert len(sglang_ladder(512)) == 52
    assert sglang_ladder(600)[-4:] == (512, 544, 576, 600)


def test_powers_of_two():
    assert [powers_of_two(n) for n in (1, 2, 3, 8, 9)] == [
        (1,), (1, 2), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4, 8, 9),
    ]  # fmt: skip


def test_steps_above_a_default_ladder_are_charged_without_padding():
    assert expected_cost((2, 4), {3: 1, 9: 1}, CostModel()) == (4 + 9) / 2
    assert lower_bound({3: 1, 9: 3}, CostModel()) == (3 + 27) / 4
