"""Ranges of addresses, and what a snapshot of torch's allocator says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcap.live_memory import AllocatorState, Range, RangeMap

LIMIT = 300
ranges = st.lists(
    st.builds(
        lambda start, length, name: Range(start, start + length, name, name.upper()),
        st.integers(0, LIMIT),
        st.integers(0, 40),
        st.sampled_from("abc"),
    ),
    max_size=12,
)


@given(ranges, st.integers(-5, LIMIT + 50))
def test_an_address_is_found_where_any_range_has_it(found, address):
    holding = [r for r in found if r.start <= address < r.end]
    hit = RangeMap(found).find(address)
    assert (hit is None) == (not holding)
    if hit is not None:
        assert hit.start <= address < hit.end
        assert (hit.name, hit.owner) in {(r.name, r.owner) for r in holding}


@given(ranges, st.integers(-5, LIMIT + 50))
def test_the_nearest_is_the_fewest_bytes_away(found, address):
    real = [r for r in found if r.end > r.start]
    near = RangeMap(found).nearest(address)
    assert (near is None) == (not real)
    if near is not None:
        each = [min(abs(address - byte) for byte in range(r.start, r.end)) for r in real]
        assert near.distance(address) == min(each)


@given(ranges, ranges, st.integers(-5, LIMIT + 50))
def test_joined_has_the_addresses_of_both_in_as_few_ranges_as_can_be(one, other, address):
    joined = RangeMap(one).joined(other)
    inside = any(r.start <= address < r.end for r in (*one, *other))
    assert (joined.find(address) is not None) == inside
    bytes_ = {byte for r in (*one, *other) for byte in range(r.start, r.end)}
    assert len(joined) == sum(byte - 1 not in bytes_ for byte in bytes_)
    assert joined.spans(address) == (bool(bytes_) and min(bytes_) <= address <= max(bytes_))


def test_the_first_named_keeps_the_bytes_that_two_claim():
    tied, child = Range(0, 100, "weight"), Range(50, 80, "a view of it")
    assert RangeMap([child, tied]).find(60) == tied
    assert RangeMap([tied, Range(0, 100, "the same")]).find(0) == tied
    behind = RangeMap([tied, Range(90, 120, "beyond")]).find(110)
    assert behind == Range(100, 120, "beyond")


def segment(address, pool, *blocks):
    return {
        "address": address,
        "total_size": sum(size for size, _ in blocks),
        "segment_pool_id": pool,
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }


def test_a_snapshot_says_which_blocks_are_in_use_and_of_which_pool():
    state = AllocatorState(
        [
            segment(5000, (0, 7), (512, "inactive")),
            segment(1000, (0, 0), (512, "active_allocated"), (1024, "inactive"), (512, "active_x")),
        ]
    )
    found = [state.block_of(a) for a in (999, 1000, 1511, 1512, 2536, 3047, 3048, 5000)]
    assert [b and (b.start, b.end, b.live, b.pool) for b in found] == [
        None,
        (1000, 1512, True, (0, 0)),
        (1000, 1512, True, (0, 0)),
        (1512, 2536, False, (0, 0)),
        (2536, 3048, False, (0, 0)),  # given up, the device may still be at it
        (2536, 3048, False, (0, 0)),
        None,
        (5000, 5512, False, (0, 7)),
    ]
    assert state.segments == [Range(1000, 3048), Range(5000, 5512)]


def test_a_snapshot_without_pools_is_of_no_use():
    bare = segment(1000, (0, 0), (512, "inactive"))
    del bare["segment_pool_id"]
    with pytest.raises(KeyError, match="segment_pool_id"):
        AllocatorState([bare])


@given(st.lists(st.tuples(st.integers(0, 400), st.lists(st.booleans(), max_size=6)), max_size=6))
def test_every_address_of_a_segment_is_in_the_block_that_covers_it(made):
    snapshot, truth, free = [], {}, 0
    for gap, states in made:
        start = free + gap
        blocks = [
            (8 * (i + 1), "active_allocated" if s else "inactive") for i, s in enumerate(states)
        ]
        snapshot.append(segment(start, (0, 0), *blocks))
        for size, kind in blocks:
            truth.update(dict.fromkeys(range(start, start + size), kind == "active_allocated"))
            start += size
        free = start
    state = AllocatorState(snapshot[::-1])
    for address in range(free + 3):
        block = state.block_of(address)
        assert (None if block is None else block.live) == truth.get(address)
