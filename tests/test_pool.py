"""The pool: planned from what a step does, then fixed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcap.errors import PoolError, PoolFrozenError, PoolLimitError, StateError
from graphcap.operations import operation
from graphcap.pool import BufferPool

F32 = torch.float32


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool("cpu")


def warmed(pool: BufferPool, rows: int = 4) -> BufferPool:
    """Freeze after: a with b, then b with c. So a and c share bytes."""
    with pool.step():
        pool.take("a", (rows, 8), F32)
        pool.take("b", (rows, 16), F32)
        pool.release("a")
        pool.take("c", (rows, 8), F32)
    pool.freeze()
    return pool


def here() -> str:
    return Path(__file__).name


def test_frozen_pool_gives_the_same_addresses_and_no_allocation(pool: BufferPool):
    warmed(pool)
    before = pool.allocations
    seen = []
    for _ in range(3):
        with pool.step():
            a, b = pool.take("a", (4, 8), F32), pool.take("b", (4, 16), F32)
            pool.release("a")
            c = pool.take("c", (4, 8), F32)
            seen.append((a.data_ptr(), b.data_ptr(), c.data_ptr()))
    assert len(set(seen)) == 1
    assert pool.allocations == before == 3
    assert seen[0][0] == seen[0][2]  # a and c never met
    assert all((address - pool.arena.data_ptr()) % 256 == 0 for address in seen[0])


def test_smaller_requests_start_at_the_same_address(pool: BufferPool):
    warmed(pool)
    with pool.step():
        large = pool.take("b", (4, 16), F32).data_ptr()
    with pool.step():
        small = pool.take("b", (1, 16), torch.bfloat16)
    assert small.data_ptr() == large
    assert small.shape == (1, 16)
    assert small.dtype == torch.bfloat16


def test_plan_holds_the_largest_bucket_whichever_was_warmed_last(pool: BufferPool):
    for rows in (16, 2):
        with pool.step():
            pool.take("workspace", (rows if rows == 2 else 8, 64), F32)
            pool.take("other", (rows, 4), F32)
    pool.freeze()
    with pool.step():
        assert pool.take("workspace", (8, 64), F32).shape == (8, 64)
        assert pool.take("other", (16, 4), F32).shape == (16, 4)


def test_larger_request_names_caller_request_and_held(pool: BufferPool):
    warmed(pool)
    with pool.step():
        pool.take("b", (4, 16), F32)
        with pytest.raises(PoolFrozenError) as caught:
            pool.take("a", (5, 8), F32)
    message = str(caught.value)
    assert f"{here()}:" in message
    assert "test_larger_request_names_caller_request_and_held" in message
    assert "(5, 8)" in message
    assert "held: b" in message
    assert "160 bytes, but 128" in message


def test_unknown_request_is_refused(pool: BufferPool):
    warmed(pool)
    with pytest.raises(PoolFrozenError, match=r"'new'.*no such buffer.*held: nothing"):
        pool.take("new", (1,), F32)


def test_new_neighbours_are_refused(pool: BufferPool):
    warmed(pool)
    with pool.step():
        pool.take("a", (4, 8), F32)
        with pytest.raises(PoolFrozenError, match="shares bytes with a"):
            pool.take("c", (4, 8), F32)


@pytest.mark.parametrize("frozen", [False, True])
def test_taking_twice_and_releasing_what_is_not_held(pool: BufferPool, frozen: bool):
    if frozen:
        warmed(pool)
    with pool.step():
        pool.take("a", (4, 8), F32)
        with pytest.raises(PoolError, match=f"'a'.*{here()}.*still held"):
            pool.take("a", (4, 8), F32)
        with pytest.raises(PoolError, match=f"'b'.*{here()}.*not held; held: a"):
            pool.release("b")


def test_step_releases_everything_also_after_an_error(pool: BufferPool):
    def failing() -> None:
        with pool.step():
            pool.take("a", (4, 8), F32)
            raise ValueError("the step failed")

    with pytest.raises(ValueError, match="the step failed"):
        failing()
    with pool.step():
        pool.take("a", (4, 8), F32)


def test_inner_step_is_part_of_the_outer(pool: BufferPool):
    with pool.step():
        pool.take("a", (1,), F32)
        with pool.step():
            pool.take("b", (1,), F32)
        with pytest.raises(PoolError, match="still held"):
            pool.take("a", (1,), F32)


def test_outside_serves_from_the_allocator_and_leaves_the_arena(pool: BufferPool):
    warmed(pool)
    pool.arena.fill_(7)
    plan = pool.plan
    with pool.outside(), pool.step():
        big = pool.take("a", (400, 8), F32)
        new = pool.take("never seen", (3,), F32)
        big.fill_(1)
        new.fill_(1)
    assert (pool.arena == 7).all()
    assert pool.plan is plan
    with pytest.raises(PoolFrozenError):
        pool.take("a", (400, 8), F32)


def test_freeze_twice_inside_a_step_and_questions_before(pool: BufferPool):
    for question in (lambda: pool.plan, lambda: pool.arena):
        with pytest.raises(StateError, match="freeze"):
            question()
    assert pool.nbytes == 0
    with pool.step(), pytest.raises(StateError, match="inside a step"):
        pool.freeze()
    warmed(pool)
    with pytest.raises(StateError, match="frozen already"):
        pool.freeze()


def test_limit_names_sizes_and_leaves_the_pool_open(pool: BufferPool):
    with pool.step():
        pool.take("huge", (1 << 20,), F32)
    with pytest.raises(PoolLimitError, match=r"4\.00 MiB and at most 1 MiB.*huge 4\.00 MiB"):
        pool.freeze(limit_mib=1)
    assert not pool.frozen
    pool.freeze(limit_mib=4)
    assert pool.nbytes == 4 << 20


def test_scratch_lives_for_one_call(pool: BufferPool):
    seen: list[int] = []

    @operation("with scratch", scratch=lambda x: {"tmp": (tuple(x.shape), x.dtype)})
    def doubled(x: torch.Tensor, *, tmp: torch.Tensor) -> None:
        tmp.copy_(x)
        seen.append(tmp.data_ptr())
        x.add_(tmp)

    x = torch.ones(4)
    with pool.step():
        pool.run(doubled, x)
        pool.run(doubled, x)
        pool.take("with scratch/tmp", (4,), F32)  # free again
    pool.freeze()
    seen.clear()
    with pool.step():
        pool.run(doubled, x)
        pool.run(doubled, x)
    assert seen == [pool.arena.data_ptr()] * 2
    assert (x == 16).all()


def test_poison_is_nan_in_every_float_and_minus_one_in_integers(pool: BufferPool):
    warmed(pool)
    pool.poison()
    with pool.step():
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            assert pool.take("b", (4, 2), dtype).isnan().all()
            pool.release("b")
        assert (pool.take("b", (4,), torch.int64) == -1).all()


def test_pool_frozen_in_inference_mode_can_be_written_outside(pool: BufferPool):
    with torch.inference_mode():
        warmed(pool)
    with pool.step():
        assert (pool.take("a", (4, 8), F32).fill_(2) == 2).all()


def test_empty_buffers_and_empty_pools(pool: BufferPool):
    with pool.step():
        pool.take("none", (0, 5), F32)
    pool.freeze()
    with pool.step():
        assert pool.take("none", (0, 5), F32).shape == (0, 5)
    empty = BufferPool("cpu")
    empty.freeze()
    empty.poison()
    assert empty.nbytes == 0


STEP = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(1, 200), st.booleans()), max_size=24
)


@settings(max_examples=50)
@given(st.lists(STEP, min_size=1, max_size=4))
def test_what_was_warmed_can_be_replayed_without_clobbering(steps: list[list]):
    """Every step that was observed runs in the frozen pool, and no buffer changes while it is held."""
    pool = BufferPool("cpu")

    def run(step: list, verify: bool) -> None:
        held: dict[str, tuple[torch.Tensor, int]] = {}
        with pool.step():
            for moment, (name, length, drop) in enumerate(step):
                if name in held:
                    view, value = held.pop(name)
                    assert not verify or (view == value).all()
                    pool.release(name)
                if not drop:
                    view = pool.take(name, (length,), torch.int32)
                    view.fill_(moment)
                    held[name] = (view, moment)
            assert not verify or all((view == value).all() for view, value in held.values())

    for step in steps:
        run(step, verify=False)
    plan = pool.freeze()
    assert plan.total >= plan.lower_bound
    for step in steps:
        run(step, verify=True)


@pytest.mark.parametrize("fails", [False, True])
def test_a_gpu_is_the_current_device_of_a_step(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches on the current device, wherever its tensors lie."""
    entered: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        entered.append(device)
        try:
            yield
        finally:
            entered.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    pool = BufferPool("cuda:1")
    with suppress(ZeroDivisionError), pool.step():
        with pool.step():  # the outer one is the step
            assert entered == [torch.device("cuda:1")]
        if fails:
            1 / 0  # noqa: B018
    assert entered == []
    with BufferPool("cpu").step():
        assert entered == []
