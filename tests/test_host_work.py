"""What one call makes the host do: driver calls and torch operations, counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loop_fakes import FakeDriver, LoopingRecorder
from torch.utils._python_dispatch import TorchDispatchMode
from walks import Walk, batch_of, walker, walks

from graphcap.errors import InputError, StaleRecordingError, StateError
from graphcap.ring import Stop
from graphcap.settings import Settings

LENGTH = 8
LAUNCH = ["cuCtxGetCurrent", "cuGraphLaunch"]  # of which the first is a question


class Operations(TorchDispatchMode):
    """Names of what torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Asleep(FakeDriver):
    """While `sleeps`, a launch is taken and nothing runs: what is left is the host's own work."""

    sleeps = False

    def cuGraphLaunch(self, executable: int, stream: int) -> Any:
        if not self.sleeps:
            return super().cuGraphLaunch(executable, stream)
        return self._answer("cuGraphLaunch")


def looping(**options):
    recorder = LoopingRecorder(Asleep())
    manager = walker(LENGTH, recorder=recorder, **options)
    manager.capture()
    assert [manager.loops(size) for size in (2, 4, 6)] == [True] * 3
    return manager, recorder.driver


def work(driver, call):
    """(driver calls, torch operations) of the host in one call."""
    driver.sleeps = True
    before = len(driver.calls)
    with Operations() as seen:
        call()
    driver.sleeps = False
    return driver.calls[before:], seen.names


@pytest.mark.parametrize("stop", [None, Stop("token", (3,))])
def test_many_steps_are_one_launch_and_no_torch_operation(stop):
    manager, driver = looping(stop=stop)
    with manager:
        manager.run_many(5, batch_of(3))
        for _ in range(3):
            assert work(driver, lambda: manager.run_many(5)) == (LAUNCH, [])
        # Another number of steps, and a batch, each cost what they change.
        calls, operations = work(driver, lambda: manager.run_many(4))
        assert calls == LAUNCH
        assert [name for name in operations if "slice" not in name] == ["aten.fill_.Scalar"]
        given = batch_of(3, 1)
        calls, operations = work(driver, lambda: manager.run_many(4, given))
        assert calls == LAUNCH
        assert operations.count("aten.lt.Scalar_out") == 1, "all rows of a new batch are live"
        assert "aten.fill_.Scalar" not in operations


def test_calls_after_one_another_are_the_same_as_first_calls():
    """What is left out of a call that goes on changes nothing of what it gives."""
    manager, driver = looping()
    given = batch_of(3)
    with manager:
        path = [[], [], []]
        for index, steps in enumerate((3, 3, 3, 1, 8, 8, 2)):
            many = manager.run_many(steps, given if index == 0 else None)
            for row, tokens in enumerate(many.outputs["token"].t().tolist()):
                path[row] += tokens
        assert path == walks(given, 28)
        assert manager.stats().replays == 28
        assert driver.calls.count("cuGraphLaunch") == 7 + 3  # as many as were held against replays


def test_between_single_steps_hosts_and_smaller_batches():
    manager, _ = looping(stop=Stop("token", (99,)))
    with manager:
        given = batch_of(4)
        manager.run(given)
        tokens = walks(given, 30)
        assert manager.run_many(3).outputs["token"].t().tolist() == [t[1:4] for t in tokens]
        assert manager.run()["token"].tolist() == [t[4] for t in tokens]
        assert manager.run_many(2).outputs["token"].t().tolist() == [t[5:7] for t in tokens]
        manager.replay(4, 3)  # a host says that a row less is real
        many = manager.run_many(2)
        assert many.outputs["token"].t().tolist() == [t[8:10] for t in tokens[:3]]
        assert many.live.tolist() == [True] * 3
        assert manager.run_many(2, rows=2).outputs["token"].shape == (2, 2)


def test_what_is_checked_is_checked_at_every_call():
    manager, driver = looping()
    with manager:
        manager.run_many(2, batch_of(3))
        launches = driver.calls.count("cuGraphLaunch")
        for steps, message in ((0, "at least 1"), (True, "at least 1"), (9, "at most 8 steps")):
            with pytest.raises(InputError, match=message):
                manager.run_many(steps)
        manager.inputs["token"].untyped_storage().resize_(0)
        with pytest.raises(StaleRecordingError, match="slot"):
            manager.run_many(2)
        assert driver.calls.count("cuGraphLaunch") == launches
    with pytest.raises(StateError, match="is closed"):
        manager.run_many(2)


def test_a_weight_that_moved_is_found_by_a_call_that_goes_on():
    class Scaled(Walk):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(1, dtype=torch.int32)

        def __call__(self, inputs):
            inputs["token"].mul_(self.scale)
            return super().__call__(inputs)

    step = Scaled()
    manager, driver = looping(step=step)
    with manager:
        manager.run_many(2, batch_of(3))
        manager.run_many(2)
        launches = driver.calls.count("cuGraphLaunch")
        step.scale = torch.zeros(1, dtype=torch.int32)
        with pytest.raises(StaleRecordingError, match="scale"):
            manager.run_many(2)
        assert driver.calls.count("cuGraphLaunch") == launches


def test_verification_that_is_due_sees_the_calls_that_go_on():
    manager, _ = looping(settings=Settings(verify_every=5))
    with manager:
        given = batch_of(3)
        manager.run_many(4, given)
        assert manager.stats().verified == 0
        manager.run_many(4)
        assert manager.stats().verified == 1
        assert manager.inputs["position"][:3].tolist() == (given["position"] + 8).tolist()


def test_a_loop_that_does_not_begin_by_itself_is_not_used():
    class Forgets(Asleep):
        def cuGraphAddKernelNode(self, graph, nodes, count, params):
            answer = super().cuGraphAddKernelNode(graph, nodes, count, params)
            if self.nodes[graph][-1][0] == "begin":
                self.nodes[graph][-1] = ("begin", *self.nodes[graph][-1][1:3], 0)
            return answer

    for length in (1, 2, LENGTH):
        recorder = LoopingRecorder(Forgets())
        with walker(length, recorder=recorder) as manager:
            (note,) = manager.capture().notes
            assert "one by one" in note
            assert not any(manager.loops(size) for size in (2, 4, 6))
            given = batch_of(3)
            many = manager.run_many(length, given)
            assert many.outputs["token"].t().tolist() == walks(given, length)
