"""The plan: buffers in conflict never overlap, and decode-like plans are as small as can be."""

from __future__ import annotations

from itertools import permutations

from hypothesis import assume, given
from hypothesis import strategies as st

from graphcap.plan import ALIGNMENT, Plan, aligned, plan_arena

Life = tuple[int, int, int]
"""First moment, moment after the last, bytes."""


def lives(most: int, longest: int = 8) -> st.SearchStrategy[list[Life]]:
    size = st.one_of(st.integers(0, 5000), st.sampled_from([256, 1024, 65536, 1 << 20]))
    one = st.tuples(st.integers(0, 24), st.integers(1, longest), size)
    return st.lists(one.map(lambda t: (t[0], t[0] + t[1], t[2])), min_size=1, max_size=most)


def planned(found: list[Life]) -> tuple[Plan, dict[str, set[str]]]:
    names = {f"b{index}": life for index, life in enumerate(found)}
    conflicts = {
        name: {
            other
            for other, (low, high, _) in names.items()
            if other != name and low < life[1] and life[0] < high
        }
        for name, life in names.items()
    }
    end = max(life[1] for life in found)
    peak = max(sum(aligned(s) for a, b, s in found if a <= t < b) for t in range(end))
    return plan_arena({n: life[2] for n, life in names.items()}, conflicts, peak), conflicts


def optimum(plan: Plan, conflicts: dict[str, set[str]]) -> int:
    """The smallest total of first fit over every order; one order always gives the true optimum."""
    best = sum(plan.sizes.values())
    for order in permutations(plan.sizes):
        offsets: dict[str, int] = {}
        for name in order:
            placed = conflicts[name] & offsets.keys()
            spans = sorted((offsets[c], offsets[c] + plan.sizes[c]) for c in placed)
            start = 0
            for low, high in spans:
                if start + plan.sizes[name] <= low:
                    break
                start = max(start, high)
            offsets[name] = start
        best = min(best, max(offsets[n] + plan.sizes[n] for n in order))
    return best


def check(plan: Plan, conflicts: dict[str, set[str]]) -> None:
    for name, offset in plan.offsets.items():
        assert offset % ALIGNMENT == 0
        assert offset >= 0
        assert offset + plan.sizes[name] <= plan.total
        for other in conflicts[name]:
            start = plan.offsets[other]
            assert offset + plan.sizes[name] <= start or start + plan.sizes[other] <= offset
        assert plan.overlapping(name).isdisjoint(conflicts[name])


@given(lives(most=20))
def test_buffers_that_live_together_never_overlap(found: list[Life]):
    plan, conflicts = planned(found)
    check(plan, conflicts)
    assert plan.total >= plan.lower_bound
    assert plan.total <= sum(plan.sizes.values())


@given(lives(most=20, longest=6))
def test_decode_like_plans_are_within_5_percent_of_the_lower_bound(found: list[Life]):
    plan, _ = planned(found)
    assert plan.total <= 1.05 * plan.lower_bound


@given(lives(most=5, longest=16))
def test_small_plans_are_optimal(found: list[Life]):
    plan, conflicts = planned(found)
    assert plan.total == optimum(plan, conflicts)


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 10_000), min_size=2),
    st.sets(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh"))),
)
def test_any_conflict_graph_given_from_one_side_is_kept(
    nbytes: dict[str, int], pairs: set[tuple[str, str]]
):
    pairs = {(a, b) for a, b in pairs if a != b and a in nbytes and b in nbytes}
    assume(pairs)
    one_sided: dict[str, set[str]] = {}
    both: dict[str, set[str]] = {name: set() for name in nbytes}
    for a, b in pairs:
        one_sided.setdefault(a, set()).add(b)
        both[a].add(b)
        both[b].add(a)
    check(plan_arena(nbytes, one_sided, 0), both)


def test_buffers_that_never_meet_share_all_bytes():
    plan = plan_arena({"a": 5000, "b": 4000, "c": 1}, {}, aligned(5000))
    assert plan.total == aligned(5000)
    assert plan.overlapping("c") == {"a", "b"}


def test_the_same_step_is_planned_the_same_way():
    found = [(i % 7, i % 7 + 3, 300 * i) for i in range(15)]
    assert planned(found)[0] == planned(found)[0]


def test_where_no_simple_order_fits_another_is_found():
    """By size, by weight and by degree, first fit needs 2048 bytes here."""
    found = [(0, 1, 512), (3, 4, 256), (2, 5, 512), (1, 4, 1024), (5, 8, 1024), (4, 7, 512)]
    plan, conflicts = planned(found)
    assert plan.total == plan.lower_bound == 1792
    check(plan, conflicts)


def test_a_large_buffer_after_a_small_one_where_that_is_what_fits():
    found = [(0, 1, 513), (0, 2, 0), (1, 3, 0), (2, 3, 513)]
    plan, _ = planned(found)
    assert plan.total == plan.lower_bound == 1024


def test_nothing_to_place():
    assert plan_arena({}, {}, 0).total == 0
