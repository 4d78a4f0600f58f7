"""The ladder always holds the maximum, and every batch up to it has the smallest fitting bucket."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcap.buckets import BucketLadder
from graphcap.errors import LadderError


@given(st.integers(1, 5000))
def test_up_to_holds_the_maximum_and_pads_little(limit: int):
    sizes = list(BucketLadder.up_to(limit))
    assert sizes[-1] == limit
    assert sizes == sorted(set(sizes))
    assert len(sizes) <= 4 + limit / 8
    for smaller, larger in pairwise(sizes):
        if larger > 8:
            # Worst batch of this bucket: one above the bucket below.
            assert larger - (smaller + 1) <= max(8, (smaller + 1) / 8)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (5, [1, 2, 4, 5]),
        (42, [1, 2, 4, 8, 16, 24, 32, 40, 42]),
    ],
)
def test_up_to_small(limit: int, expected: list[int]):
    assert list(BucketLadder.up_to(limit)) == expected


def test_up_to_512_is_what_vllm_captures():
    expected = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert list(BucketLadder.up_to(512)) == expected


@given(st.lists(st.integers(1, 300), min_size=1), st.integers(1, 300))
def test_bucket_is_the_smallest_that_fits(sizes: list[int], limit: int):
    ladder = BucketLadder(sizes, limit)
    assert ladder.max_batch == limit
    for batch in range(1, limit + 1):
        bucket = ladder.bucket_for(batch)
        assert bucket is not None
        assert bucket >= batch
        assert not any(batch <= other < bucket for other in ladder)
    assert ladder.bucket_for(limit + 1) is None


def test_user_list_is_sorted_unique_and_clipped():
    assert list(BucketLadder.parse("8,4,4,64", 48)) == [4, 8, 48]
    assert list(BucketLadder.parse(" AUTO ", 5)) == [1, 2, 4, 5]


@pytest.mark.parametrize(
    "text", ["0", "-1", "four", "", "1,,2", "1.5", "²", "1 2", "+3", "9" * 5000, "\u0661"]
)
def test_bad_entry_is_named(text: str):
    word = text.split(",")[1] if "," in text else text
    with pytest.raises(LadderError) as caught:
        BucketLadder.parse(text, 8)
    assert repr(word) in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, True, 1.0, "4", None])
def test_bad_sizes_are_named(size: object):
    for call in (
        lambda: BucketLadder([size]),  # type: ignore[list-item]
        lambda: BucketLadder([1], size) if size is not None else BucketLadder([None]),  # type: ignore
        lambda: BucketLadder.up_to(size),  # type: ignore[arg-type]
        lambda: BucketLadder([1]).bucket_for(size),  # type: ignore[arg-type]
    ):
        with pytest.raises(LadderError) as caught:
            call()
        assert repr(size) in str(caught.value)


def test_empty_ladder_is_refused():
    with pytest.raises(LadderError, match="at least one"):
        BucketLadder([])


def test_equal_ladders_compare_and_hash_equal():
    one, other = BucketLadder([4, 2], 8), BucketLadder([8, 2, 4, 2])
    assert one == other
    assert hash(one) == hash(other)
    assert one != BucketLadder([2, 8])
    assert 4 in one
    assert 3 not in one
    assert len(one) == 3
