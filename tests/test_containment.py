"""A capture that fails anywhere leaves everything as it was, and what was recorded before it serves.

The step is made to fail before each of its operations, in each stage of the life of each bucket; then the
whole capture is, graphcap's own operations included.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as nn_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from toy import CPU, WIDTH, Inputs, floats

from graphcap.buckets import BucketLadder
from graphcap.errors import CaptureError, GraphcapError
from graphcap.inputs import PadPolicy, Slot, StaticInputs
from graphcap.manager import CaptureManager
from graphcap.operations import current_observer
from graphcap.pool import BufferPool
from graphcap.recorders.dispatched import tensors_in
from graphcap.settings import Settings

SIZES = (4, 2, 1)
TWO = (4, 1)
STAGES = ("warming up", "recording", "verifying")
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 1.00 GiB"


class Fault(TorchDispatchMode):
    """Fails once, before operation `at` (from 0); None: never. Counts, and follows what is made."""

    def __init__(self, failure: Callable[[], object], at: int | None) -> None:
        super().__init__()
        self.failure, self.at = failure, at
        self.seen = 0
        self.fired = False
        self.made: list[StorageWeakRef] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.seen == self.at and not self.fired:
            self.fired = True
            self.failure()
        self.seen += 1
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if tensor.untyped_storage()._cdata not in given:
                self.made.append(StorageWeakRef(tensor.untyped_storage()))
        return result

    def alive(self) -> int:
        """Storages that were made here and are still there."""
        return sum(not ref.expired() for ref in self.made)


class Step:
    """A matrix product in the pool, a draw of its own generator, a counter and a slot that advance.

    Attributes:
        stage: what the manager does now.
        faults: stage -> what watches the step there.
    """

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool
        self.weight = floats(WIDTH, seed=5)
        self.counter = torch.zeros(1)
        self.generator = torch.Generator().manual_seed(11)
        self.stage = ""
        self.faults: dict[str, Fault] = {}

    def __call__(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        fault = self.faults.get(self.stage)
        if fault is None:
            return self.compute(inputs)
        with fault:
            return self.compute(inputs)

    def compute(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        x = inputs["x"]
        hidden = self.pool.take("hidden", (x.shape[0], WIDTH), torch.float32)
        torch.mm(x, self.weight, out=hidden)
        drawn = torch.empty_like(self.weight[0]).uniform_(generator=self.generator)
        y = hidden.clamp(min=0) + drawn
        self.pool.release("hidden")
        self.counter.add_(1)
        inputs["count"].add_(1)
        return {"y": y, "count": inputs["count"] * 2}

    def expected(self, x: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        return (x.double() @ self.weight.double()).clamp(min=0) + drawn.double()


def make(sizes: tuple[int, ...] = SIZES, **settings: Any) -> tuple[CaptureManager, Step]:
    pool = BufferPool(CPU)
    step = Step(pool)
    slots = {
        "x": Slot((WIDTH,), torch.float32),
        "count": Slot((), torch.int64, PadPolicy.fill(-1)),
    }
    manager = CaptureManager(
        step,
        StaticInputs(max(sizes), slots, CPU),
        pool=pool,
        ladder=BucketLadder(sizes),
        settings=Settings(**settings),
        state=[step.counter, step.generator],
    )
    manager.inputs.load({"x": floats(3, seed=8), "count": torch.tensor([7, 8, 9])}, 3)
    return manager, step


def surroundings(manager: CaptureManager, step: Step) -> dict[str, Any]:
    """Everything that a capture puts back, in a form that can be compared."""
    inputs = manager.inputs
    return {
        "collections": gc.isenabled(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "dispatch modes": list(map(id, _get_current_dispatch_mode_stack())),
        "function modes": list(map(id, _get_current_function_mode_stack())),
        "observer": current_observer(),
        "module hooks": len(nn_module._global_parameter_registration_hooks),
        "threads": threading.enumerate(),
        "random numbers": torch.get_rng_state().tolist(),
        "own random numbers": step.generator.get_state().tolist(),
        "counter": step.counter.tolist(),
        "slots": inputs.arena.tolist(),
        "rows": inputs.rows,
        "pads": inputs._pad_words.tolist(),
        "held in the pool": dict(step.pool._held),
        "in a step": step.pool._in_step,
        "outside": step.pool._outside,
    }


def assert_serves(manager: CaptureManager, step: Step, recorded: set[int]) -> None:
    """Every batch gives what the step gives by definition; those of `recorded` buckets by replay."""
    before = manager.stats().replays
    served = 0
    for rows in (1, 2, 3, 4):
        x = floats(rows, seed=rows)
        ahead = torch.Generator()
        ahead.set_state(step.generator.get_state())
        drawn = torch.rand(WIDTH, generator=ahead)
        ran = step.counter.item()
        # What the buckets wrote before must not show through.
        for recording in manager._captured.recordings.values():
            for output in recording.outputs.values():
                output.fill_(float("nan") if output.is_floating_point() else -77)
        out = manager.run({"x": x, "count": torch.arange(rows)})
        torch.testing.assert_close(out["y"].double(), step.expected(x, drawn), rtol=1e-5, atol=1e-5)
        assert out["count"].tolist() == [2 * (i + 1) for i in range(rows)]
        assert step.counter.item() == ran + 1
        served += manager.ladder.bucket_for(rows) in recorded
    assert manager.stats().replays - before == served > 0


@contextmanager
def collections_off() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def serving(before: dict[str, Any]) -> dict[str, Any]:
    """`before`, once there are recordings: their fingerprint listens for rebound weights."""
    return before | {"module hooks": before["module hooks"] + 1}


def fail(kind: type[BaseException], *args: object) -> Callable[[], None]:
    def raise_it() -> None:
        raise kind(*args)

    return raise_it


def follow(step: Step) -> Callable[[int, int, str], None]:
    return lambda done, total, what: setattr(step, "stage", what)


def indexes(stage: str) -> range:
    """Of the operations of the step in `stage`."""
    manager, step = make()
    step.faults = {stage: Fault(lambda: None, None)}
    manager.capture(follow(step))
    assert step.faults[stage].seen >= 7
    return range(step.faults[stage].seen)


each_stage = pytest.mark.parametrize(
    "stage", [f"{stage} bucket {size}" for stage in STAGES for size in SIZES]
)


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """What the test runner holds is left out of collections, of which there are thousands here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# -- the step fails ------------------------------------------------------------------------------


@each_stage
def test_a_step_that_raises_costs_its_bucket_and_leaves_no_trace(stage: str) -> None:
    size = int(stage.split()[-1])
    for at in indexes(stage):
        kind, said = (
            (torch.cuda.OutOfMemoryError, OUT_OF_MEMORY) if at % 2 else (ValueError, "by design")
        )
        manager, step = make()
        fault = Fault(fail(kind, said), at)
        step.faults = {stage: fault}
        before = surroundings(manager, step)
        with collections_off():
            # Collections are off: what has gone was held by nobody.
            report = manager.capture(follow(step))
            assert fault.fired
            assert fault.alive() == 0
        assert surroundings(manager, step) == serving(before)
        assert set(report.failures) == {size}
        text = report.failures[size]
        assert f"bucket {size}" in text
        assert __file__ in text
        assert said in text
        cure = {"warming": "without graphcap", "recording": "differs", "verifying": "eagerly"}
        assert ("GRAPHCAP_BUCKETS" if at % 2 else cure[stage.split()[0]]) in text
        assert text.endswith("(graphcap explain capture)")
        step.stage = ""
        assert_serves(manager, step, set(SIZES) - {size})
        manager.close()


@each_stage
@pytest.mark.parametrize("strict", [False, True], ids=["interrupt", "strict"])
def test_what_ends_the_capture_leaves_a_manager_that_captures_again(
    stage: str, strict: bool
) -> None:
    for at in indexes(stage):
        manager, step = make(strict=strict)
        step.faults = {stage: Fault(fail(ValueError if strict else KeyboardInterrupt), at)}
        before = surroundings(manager, step)
        with pytest.raises(CaptureError if strict else KeyboardInterrupt):
            manager.capture(follow(step))
        assert step.faults[stage].fired
        gc.collect()
        assert step.faults[stage].alive() == 0
        assert surroundings(manager, step) == before
        assert manager.state == "new"
        assert manager._captured.recordings == {}
        step.stage = ""
        assert manager.capture(follow(step)).failures == {}
        step.stage = ""
        assert surroundings(manager, step) == serving(before)
        assert_serves(manager, step, set(SIZES))
        manager.close()
        assert surroundings(manager, step)["module hooks"] == before["module hooks"]


@each_stage
def test_a_collection_in_the_middle_of_the_step_changes_nothing(stage: str) -> None:
    class Ring:
        """Garbage that only a collection finds, with a tensor in it."""

        def __init__(self) -> None:
            self.me, self.tensor = self, torch.ones(3)

    for at in list(indexes(stage))[::2]:
        manager, step = make()

        def collect() -> None:
            Ring()
            assert gc.collect() > 0

        step.faults = {stage: Fault(collect, at)}
        before = surroundings(manager, step)
        assert manager.capture(follow(step)).failures == {}
        assert step.faults[stage].fired
        step.stage = ""
        assert surroundings(manager, step) == serving(before)
        assert_serves(manager, step, set(SIZES))
        manager.close()


# -- anything fails, graphcap's own operations included ----------------------------------------------


def all_indexes() -> range:
    manager, _ = make(TWO)
    with Fault(lambda: None, None) as counting:
        manager.capture()
    return range(counting.seen)


@pytest.mark.parametrize("interrupt", [False, True], ids=["error", "interrupt"])
@pytest.mark.parametrize("part", range(4))
def test_any_operation_of_a_capture_may_fail(part: int, interrupt: bool) -> None:
    """What fails between the buckets (saving and restoring, the arena) ends the capture."""
    ended = 0
    for at in all_indexes()[part::4]:
        manager, step = make(TWO)
        kind = KeyboardInterrupt if interrupt else RuntimeError
        before = surroundings(manager, step)
        fault = Fault(fail(kind, "by design"), at)
        report, said = None, ""
        try:
            with fault:
                report = manager.capture()
        except (kind, GraphcapError) as error:
            said = str(error)
            ended += 1
        assert fault.fired
        assert report is not None or "by design" in said
        if report is None:
            assert surroundings(manager, step) == before, at
            assert manager.state == "new"
            failed = set(manager.capture().failures)
            assert failed == set()
        else:
            failed = set(report.failures)
            assert not interrupt
            assert len(failed) == 1, at
            assert "by design" in report.failures[failed.copy().pop()]
        assert surroundings(manager, step) == serving(before), at
        assert_serves(manager, step, set(TWO) - failed)
        manager.close()
        del manager, step, report
        gc.collect()
        assert fault.alive() == 0
    assert ended if interrupt else ended < 20
