"""When the buffers of a pool are alive: what a report draws."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import moe_manager

from graphcap.errors import StateError
from graphcap.lifetimes import ENDS, PoolLayout
from graphcap.pool import BufferPool


def step(pool: BufferPool, rows: int) -> None:
    """Events 0 to 5: a, b taken; a released; c taken; c, then b left to the end."""
    with pool.step():
        for name in "ab":
            pool.take(name, (rows, 64), torch.float32)
        pool.release("a")
        pool.take("c", (rows, 64), torch.float32)
        pool.release("c")


def spans(layout: PoolLayout) -> dict[str, list[tuple[int, int]]]:
    return {buffer.name: list(buffer.spans) for buffer in layout.buffers}


def test_takes_and_releases_are_the_clock():
    pool = BufferPool("cpu")
    step(pool, 4)
    plan = pool.freeze()
    layout = pool.layout
    assert layout.events == 5
    assert spans(layout) == {"a": [(0, 2)], "b": [(1, 4)], "c": [(3, 4)]}
    for buffer in layout.buffers:
        assert (buffer.offset, buffer.nbytes) == (plan.offsets[buffer.name], 1024)
        assert buffer.lives == 1


def test_the_step_that_held_most_is_kept_and_a_frozen_pool_watches_no_more():
    pool = BufferPool("cpu")
    step(pool, 8)
    with pool.step():
        pool.take("a", (1,), torch.float32)
    with pool.step(), pool.outside():
        pool.take("c", (1000, 64), torch.float32)
    pool.take("b", (1,), torch.float32)  # outside of any step
    pool.release("b")
    pool.freeze()
    before = pool.layout
    assert spans(before) == {"a": [(0, 2)], "b": [(1, 4)], "c": [(3, 4)]}
    step(pool, 8)
    assert pool.layout == before


def test_a_buffer_that_the_kept_step_does_not_take():
    pool = BufferPool("cpu")
    with pool.step():
        pool.take("small", (1,), torch.float32)
    step(pool, 4)
    pool.freeze()
    small = next(buffer for buffer in pool.layout.buffers if buffer.name == "small")
    assert (small.lives, small.spans) == (0, ())


def test_of_a_long_step_both_ends_are_kept():
    pool = BufferPool("cpu")
    with pool.step():
        pool.take("whole", (1,), torch.float32)
        for _ in range(4 * ENDS):
            pool.take("layer", (1,), torch.float32)
            pool.release("layer")
    pool.freeze()
    layout = pool.layout
    assert layout.events == 8 * ENDS + 1
    assert spans(layout)["whole"] == [(0, 8 * ENDS)]
    lives = spans(layout)["layer"]
    assert len(lives) == ENDS  # two events a life: half of them at each end
    assert all(last == first + 1 for first, last in lives)
    assert next(b.lives for b in layout.buffers if b.name == "layer") == 4 * ENDS


def test_there_is_no_layout_before_the_freeze():
    with pytest.raises(StateError, match="freeze"):
        _ = BufferPool("cpu").layout


def held_apart(layout: PoolLayout) -> bool:
    """No two buffers have a byte and an event in common."""
    return all(
        one.offset + one.nbytes <= two.offset
        or two.offset + two.nbytes <= one.offset
        or all(a[1] < b[0] or b[1] < a[0] for a in one.spans for b in two.spans)
        for one, two in combinations(layout.buffers, 2)
    )


def test_the_report_of_a_capture_has_it():
    _, manager = moe_manager()
    with manager:
        report = manager.capture()
    layout = report.pool_layout
    assert layout is not None
    assert {"router_logits", "topk_ids", "cache2", "state", "out"} <= set(spans(layout))
    assert held_apart(layout)
    assert max(b.offset + b.nbytes for b in layout.buffers) == report.pool_bytes
    live = [
        sum(b.nbytes for b in layout.buffers if any(f <= at <= last for f, last in b.spans))
        for at in range(layout.events)
    ]
    assert max(live) == report.pool_lower_bound_bytes
    assert report.to_json()["pool_layout"]["events"] == layout.events


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 4000)), max_size=40))
def test_any_step_is_drawn_without_overlaps(requests):
    pool = BufferPool("cpu")
    held = set()
    with pool.step():
        for name, size in requests:
            if name in held:
                pool.release(name)
                held.remove(name)
            else:
                pool.take(name, (size,), torch.uint8)
                held.add(name)
    pool.freeze()
    assert held_apart(pool.layout)
