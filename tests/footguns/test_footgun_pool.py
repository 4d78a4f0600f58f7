"""Footguns of the pool and of addresses: cases 8 to 13 and their kin, as far as a CPU shows them."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import parametrizations, parametrize, prune, vector_to_parameters
from toy import CPU, WIDTH, floats, manager_of

from graphcap.errors import PoolError, PoolFrozenError, StaleRecordingError
from graphcap.manager import CaptureManager
from graphcap.operations import operation
from graphcap.pool import BufferPool
from graphcap.recorders.tape import TapeRecorder
from graphcap.settings import Settings

F32 = torch.float32


def captured(step: Any, **options: Any) -> CaptureManager:
    manager = manager_of(step, **options)
    assert not manager.capture().failures
    return manager


def run(manager: CaptureManager, rows: int = 3, seed: int = 0) -> torch.Tensor:
    return manager.run({"x": floats(rows, seed)})["y"]


def pooled(pool: BufferPool) -> Callable[..., Any]:
    """Twice the input, in a buffer of the pool."""

    def step(inputs: Any) -> Any:
        out = pool.take("doubled", tuple(inputs["x"].shape), F32)
        torch.mul(inputs["x"], 2, out=out)
        return {"y": out}

    return step


# -- 8 -------------------------------------------------------------------------------------------


def test_08_a_larger_request_after_recording_is_refused():
    """Elsewhere: a larger eager batch grew the shared workspace, and graphs read freed memory.
    Here: the pool is frozen; the request is refused with its caller named, graphs go on."""
    pool = BufferPool(CPU)
    step = pooled(pool)
    manager = captured(step, pool=pool)
    address = pool.arena.data_ptr()
    with pytest.raises(PoolFrozenError, match=r"test_footgun_pool\.py:\d+ \(step\).*\(100, 3\)"):
        step({"x": floats(100)})
    assert torch.equal(run(manager), floats(3) * 2)
    assert pool.arena.data_ptr() == address


def test_08_kin_a_batch_above_the_maximum_leaves_the_pool_alone():
    """Kin: a batch above the maximum through `run()`, which is served elsewhere."""
    pool = BufferPool(CPU)
    manager = captured(pooled(pool), pool=pool)
    run(manager)
    contents, address = pool.arena.clone(), pool.arena.data_ptr()
    assert torch.equal(run(manager, 100), floats(100) * 2)
    assert torch.equal(pool.arena, contents)
    assert pool.arena.data_ptr() == address


def test_08_kin_another_buffer_or_neighbour_after_the_freeze():
    """Kin: a new buffer name, or two buffers held together that never were."""
    pool = BufferPool(CPU)
    for name in ("first", "second"):
        with pool.step():
            pool.take(name, (4,), F32)
    pool.freeze()
    with pool.step(), pytest.raises(PoolFrozenError, match="no such buffer was asked for"):
        pool.take("third", (1,), F32)
    with pool.step():
        pool.take("first", (4,), F32)
        with pytest.raises(PoolFrozenError, match="shares bytes with first"):
            pool.take("second", (4,), F32)


@pytest.mark.parametrize("shape", [[4, 3], (-1, 3), (2.0, 3), torch.tensor([4, 3]), 4])
def test_08_kin_a_shape_that_is_none(shape: Any):
    """Kin: a shape with a negative number, a float, a tensor."""
    with pytest.raises(PoolError, match="expected a tuple of integers of at least 0"):
        BufferPool(CPU).take("odd", shape, F32)


# -- 9 -------------------------------------------------------------------------------------------


def test_09_a_smaller_bucket_that_needs_the_larger_workspace():
    """Elsewhere: batch 8 needed more workspace than batch 16, for which another kernel was chosen.
    Here: every bucket is warmed before the freeze, so the pool holds the true maximum."""
    pool = BufferPool(CPU)

    def step(inputs: Any) -> Any:
        rows = inputs["x"].shape[0]
        pool.take("workspace", (4096 if rows == 2 else 16,), F32).fill_(1)
        return {"y": inputs["x"] * 2}

    manager = captured(step, pool=pool, buckets=(1, 2))
    assert pool.nbytes >= 4 * 4096
    for rows in (4, 2, 1):
        assert torch.equal(run(manager, rows), floats(rows) * 2)


def test_09_kin_a_buffer_that_one_bucket_alone_takes():
    """Kin: a buffer, or scratch of a kernel, that one bucket alone takes."""
    pool = BufferPool(CPU)

    @operation("split", scratch=lambda x: {"partial": ((x.shape[0], 999), F32)})
    def split(x: torch.Tensor, *, partial: torch.Tensor) -> None:
        partial.fill_(float("nan"))
        x.mul_(1)

    def step(inputs: Any) -> Any:
        if inputs["x"].shape[0] == 1:
            pool.take("only for one row", (7,), F32)
            pool.run(split, inputs["x"])
        return {"y": inputs["x"] * 2}

    manager = captured(step, pool=pool, buckets=(1, 2))
    assert set(pool.plan.sizes) == {"only for one row", "split/partial"}
    assert torch.equal(run(manager, 1), floats(1) * 2)


# -- 10 ------------------------------------------------------------------------------------------

GLOBAL = torch.ones(WIDTH)
ELSEWHERE = types.ModuleType("elsewhere")


class Layer(torch.nn.Module):
    table = torch.ones(WIDTH)

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.shifts = [torch.zeros(WIDTH)]
        self.named = {"gain": torch.ones(WIDTH)}
        self.factor = 1.0

    def forward(self, inputs: Any) -> Any:
        y = self.linear(inputs["x"]) * self.scale * self.named["gain"] + self.shifts[0]
        return {"y": y * self.factor * self.table * GLOBAL * ELSEWHERE.weight}


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Layer:
    monkeypatch.setattr(ELSEWHERE, "weight", torch.ones(WIDTH), raising=False)
    monkeypatch.setattr(Layer, "table", torch.ones(WIDTH))
    monkeypatch.setitem(globals(), "GLOBAL", torch.ones(WIDTH))
    return Layer()


def zeros(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(*(shape or (WIDTH, WIDTH))))


REBOUND: dict[str, tuple[Callable[[Layer], object], str]] = {
    "parameter": (lambda m: setattr(m.linear, "weight", zeros()), "weight is another tensor"),
    "buffer": (lambda m: setattr(m, "scale", torch.zeros(WIDTH)), "scale is another tensor"),
    "resize_": (lambda m: m.scale.resize_(1000), "scale has moved"),
    "set_": (lambda m: m.scale.set_(torch.zeros(WIDTH)), "scale has moved"),
    ".data": (lambda m: setattr(m.linear.weight, "data", zeros().data), "weight has moved"),
    "storage": (lambda m: m.scale.untyped_storage().resize_(4096), "scale has moved"),
    "assign": (lambda m: m.load_state_dict(Layer().state_dict(), assign=True), "is another"),
    "to and back": (lambda m: m.double().float(), "is another"),
    "parametrized": (
        lambda m: parametrize.register_parametrization(m.linear, "weight", torch.nn.Identity()),
        "weight is another",
    ),
    "weight norm": (lambda m: parametrizations.weight_norm(m.linear), "weight is another"),
    "pruned": (lambda m: prune.l1_unstructured(m.linear, "weight", amount=2), "weight is another"),
    "one vector": (
        lambda m: vector_to_parameters(torch.zeros(WIDTH * WIDTH + WIDTH), m.linear.parameters()),
        "weight has moved",
    ),
    "module": (
        lambda m: setattr(m, "linear", torch.nn.Linear(WIDTH, WIDTH)),
        "linear is another object",
    ),
    "dictionary": (lambda m: m.named.update(gain=torch.zeros(WIDTH)), r"named\['gain'\] is"),
    "list": (lambda m: m.shifts.__setitem__(0, torch.ones(WIDTH)), r"shifts\[0\] is another"),
    "class": (lambda m: setattr(Layer, "table", torch.zeros(WIDTH)), "table is another"),
    "global": (lambda m: globals().update(GLOBAL=torch.zeros(WIDTH)), "GLOBAL is another"),
    "module's global": (
        lambda m: setattr(ELSEWHERE, "weight", torch.zeros(WIDTH)),
        r"ELSEWHERE\.weight is another",
    ),
}


def stays_stale(manager: CaptureManager, words: str) -> None:
    """Named at every run from now on, before anything is loaded."""
    slots = manager.inputs.arena.clone()
    for _ in range(2):
        with pytest.raises(StaleRecordingError, match=rf"{words}.*copy_\(new\)"):
            run(manager, seed=1)
    assert torch.equal(manager.inputs.arena, slots)


@pytest.mark.parametrize("what", ["parameter", "resize_"])
def test_10_a_rebound_or_resized_parameter_is_named(what: str, layer: Layer):
    """Elsewhere: `module.weight = Parameter(new)` and `resize_` left graphs reading old memory.
    Here: found before the replay and named; copying in place works."""
    manager = captured(layer)
    run(manager)
    change, words = REBOUND[what]
    change(layer)
    stays_stale(manager, words)


@pytest.mark.parametrize("what", REBOUND)
def test_10_kin_other_ways_to_rebind(what: str, layer: Layer):
    """Kin: `.data =`, `set_`, storages, `assign=True`, parametrizations, pruning, dictionaries, lists,
    classes, globals, other modules."""
    manager = captured(layer)
    run(manager)
    change, words = REBOUND[what]
    change(layer)
    stays_stale(manager, words)


def test_10_kin_a_closure_variable():
    """Kin: closure variables."""
    weight = torch.ones(WIDTH)

    def step(inputs: Any) -> Any:
        return {"y": inputs["x"] * weight}

    manager = captured(step)
    run(manager)
    weight = torch.zeros(WIDTH)
    stays_stale(manager, r"step\.weight is another tensor")


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: setattr(inputs["x"], "data", torch.zeros(4, WIDTH)),
        lambda inputs: inputs["x"].set_(torch.zeros(4, WIDTH)),
        lambda inputs: inputs["x"].resize_(4000, WIDTH),
    ],
    ids=[".data", "set_", "resize_"],
)
def test_10_kin_a_slot(change: Callable[[Any], object]):
    """Kin: a slot that is rebound or resized."""
    manager = captured(lambda inputs: {"y": inputs["x"] * 2})
    run(manager)
    change(manager.inputs)
    for batch in ({"x": floats(3, 1)}, None):
        with pytest.raises(StaleRecordingError, match="slot"):
            manager.run(batch)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.load_state_dict(Layer().state_dict()),
        lambda m: m.linear.weight.data.copy_(torch.zeros(WIDTH, WIDTH)),
        lambda m: torch.nn.init.zeros_(m.linear.bias),
        lambda m: [p.data.mul_(3) for p in m.parameters()],
        lambda m: ELSEWHERE.weight.fill_(7),
    ],
    ids=["load_state_dict", "copy_", "init", "mul_", "another module's"],
)
def test_10_kin_changes_in_place_are_followed(change: Callable[[Layer], object], layer: Layer):
    """Kin: changes in place, which replays follow."""
    manager = captured(layer)
    before = run(manager).clone()
    change(layer)
    with torch.no_grad():
        wanted = layer({"x": floats(3)})["y"]
    torch.testing.assert_close(run(manager), wanted)
    assert not torch.equal(wanted, before)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "factor", 5.0),
        lambda m: m.linear.register_forward_hook(lambda module, given, out: out * 5),
        lambda m: setattr(m.linear, "forward", lambda x: x * 5),
    ],
    ids=["number", "hook", "forward"],
)
def test_10_kin_python_that_a_replay_does_not_run(change: Callable[[Layer], object], layer: Layer):
    """Kin: a Python number, a hook or a `forward` changed afterwards: no address moves, so
    `GRAPHCAP_VERIFY=N` finds it."""
    manager = captured(layer, settings=Settings(verify_every=2))
    before = run(manager).clone()
    change(layer)
    with torch.no_grad():
        wanted = layer({"x": floats(3)})["y"]
    assert not torch.equal(wanted, before)
    for _ in range(2):  # the replay that is checked, and a step after it
        torch.testing.assert_close(run(manager), wanted)
    assert "output 'y' differs from the eager step" in manager.stats().failures[4]
    assert manager.stats().fallbacks == {"verification": 2}


# -- 11 ------------------------------------------------------------------------------------------


def churn() -> None:
    gc.collect()
    for _ in range(3):
        junk = [torch.full((64, WIDTH), float("nan")) for _ in range(50)]
        del junk


def test_11_inputs_and_outputs_are_owned_by_the_recording():
    """Elsewhere: a wrapper with weak references to its outputs gave other results after allocator churn.
    Here: a recording owns or pins every address that it uses."""

    def recording_of_a_weight_that_nobody_keeps() -> Any:
        weight = floats(WIDTH)
        return TapeRecorder(CPU).record(lambda: {"y": torch.relu(weight @ weight) + 1}, WIDTH)

    recording = recording_of_a_weight_that_nobody_keeps()
    churn()
    recording.replay()
    assert torch.equal(recording.outputs["y"], torch.relu(floats(WIDTH) @ floats(WIDTH)) + 1)


def test_11_kin_what_only_a_cache_held():
    """Kin: memory that only a cache held; the report says that its rebinding is not noticed."""

    @functools.cache
    def table() -> torch.Tensor:
        return torch.full((WIDTH,), 3.0)

    manager = captured(lambda inputs: {"y": inputs["x"] * table()})
    table.cache_clear()
    churn()
    assert torch.equal(run(manager), floats(3) * 3)
    assert any("rebinding them is not noticed" in note for note in manager.report.notes)


def test_11_kin_outputs_outlive_the_manager():
    """Kin: outputs kept while their manager is closed or dropped."""
    manager = captured(lambda inputs: {"y": inputs["x"] * 2})
    kept = run(manager)
    seen = weakref.ref(manager)
    manager.close()
    del manager
    churn()
    assert seen() is None
    assert torch.equal(kept, floats(3) * 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.fill_(float("nan")),
        lambda y: y.t_(),
        lambda y: y.unsqueeze_(0),
        lambda y: y.resize_(0),
        lambda y: y.set_(torch.zeros(1)),
        lambda y: setattr(y, "data", torch.zeros(3, WIDTH)),
    ],
    ids=["fill_", "t_", "unsqueeze_", "resize_", "set_", ".data"],
)
def test_11_kin_what_a_caller_does_to_outputs_ends_with_the_next_run(
    change: Callable[[torch.Tensor], object],
):
    """Kin: outputs that the caller fills, transposes, resizes or rebinds."""
    manager = captured(lambda inputs: {"y": inputs["x"] * 2})
    change(run(manager))
    assert torch.equal(run(manager, seed=1), floats(3, 1) * 2)


def test_11_kin_an_output_whose_memory_was_freed():
    """Kin: an output whose storage the caller frees: named before the replay that would write there."""
    manager = captured(lambda inputs: {"y": inputs["x"] * 2})
    run(manager).untyped_storage().resize_(0)
    with pytest.raises(StaleRecordingError, match=r"output 'y' of bucket 4.*clone\(\)"):
        run(manager)


# -- 12 ------------------------------------------------------------------------------------------


def test_12_kin_one_pool_recorded_from_the_largest_down():
    """Kin: a pool for each bucket: its size does not depend on their number."""
    sizes = {}
    for buckets in ((), (1, 2, 3)):
        order: list[int] = []
        pool = BufferPool(CPU)
        step = pooled(pool)

        def noting(inputs: Any, order: list[int] = order, step: Any = step) -> Any:
            order.append(inputs["x"].shape[0])
            return step(inputs)

        manager = captured(noting, pool=pool, buckets=buckets, settings=Settings(verify="off"))
        ladder = sorted({*buckets, 4}, reverse=True)
        assert order == ladder * 2  # all warmed, then all recorded
        sizes[len(ladder)] = pool.nbytes
        outputs = {manager.recording(size).outputs["y"].data_ptr() for size in ladder}
        assert outputs == {pool.arena.data_ptr()}
    assert sizes[1] == sizes[4]


# -- 13 ------------------------------------------------------------------------------------------

MOVES = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 300)), max_size=16)


@settings(max_examples=40, deadline=None)
@given(st.lists(MOVES, min_size=1, max_size=3))
def test_13_no_two_live_buffers_overlap(steps: list[list[tuple[str, int]]]):
    """Elsewhere: a view handed out for one layer overlapped one still alive in another.
    Here: the plan keeps live buffers apart (property test)."""
    pool = BufferPool(CPU)

    def play(step: list[tuple[str, int]]) -> None:
        """Take a buffer, or release it if it is held; after each move look for overlaps."""
        held: dict[str, torch.Tensor] = {}
        with pool.step():
            for name, nbytes in step:
                if held.pop(name, None) is not None:
                    pool.release(name)
                    continue
                held[name] = pool.take(name, (nbytes,), torch.uint8)
                spans = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t in held.values())
                ends = [0, *(end for _, end in spans)]
                assert all(start >= end for (start, _), end in zip(spans, ends, strict=False))

    for step in steps:
        play(step)
    pool.freeze()
    for step in steps:
        play(step)


def test_13_kin_a_buffer_is_used_after_its_release():
    """Kin: a buffer used after its release, returned after it, or kept from one step to the next: found
    by verification."""
    pool = BufferPool(CPU)

    def used_after(inputs: Any) -> Any:
        shape = tuple(inputs["x"].shape)
        first = pool.take("first", shape, F32)
        torch.mul(inputs["x"], 2, out=first)
        pool.release("first")
        second = pool.take("second", shape, F32)
        torch.mul(inputs["x"], 3, out=second)
        return {"y": first + second}

    failures = manager_of(used_after, pool=pool).capture().failures
    assert set(failures) == {2, 4}
    assert "output 'y' differs" in failures[4]


def test_13_kin_a_buffer_is_kept_from_step_to_step():
    """Kin: a buffer kept from one step to the next."""
    pool = BufferPool(CPU)
    kept: dict[int, torch.Tensor] = {}

    def step(inputs: Any) -> Any:
        rows = inputs["x"].shape[0]
        before = kept.get(rows, torch.zeros(rows, WIDTH))
        out = pool.take("out", (rows, WIDTH), F32)
        torch.add(inputs["x"], before, out=out)
        kept[rows] = out
        return {"y": out * 1}

    failures = manager_of(step, pool=pool).capture().failures
    assert set(failures) == {2, 4}


def test_13_kin_a_name_is_taken_twice():
    """Kin: a name taken while it is held."""
    pool = BufferPool(CPU)
    with pool.step():
        pool.take("cache1", (4,), F32)
        with pytest.raises(PoolError, match=r"'cache1' was taken by .*test_footgun_pool\.py"):
            pool.take("cache1", (4,), F32)
