"""run_many as a loop on the device: the manager's part, over a driver that runs its graphs on the host."""

from __future__ import annotations

import random

import pytest
import torch
from loop_fakes import FakeDriver, LoopingRecorder
from walks import TOKENS, Walk, batch_of, counted, walker, walks

from graphcap.errors import BackendError
from graphcap.ring import Stop
from graphcap.settings import Settings

LENGTH = 8


def looping(driver=None, **options):
    recorder = LoopingRecorder(driver)
    return walker(LENGTH, recorder=recorder, **options), recorder.driver


@pytest.mark.parametrize("ends", [(), (3,), (3, 17, 20)])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_as_replays_and_no_step_too_many(ends, seed):
    stop = Stop("token", ends) if ends else None
    draw = random.Random(seed)
    manager, driver = looping(stop=stop)
    with manager:
        report = manager.capture()
        assert report.notes == ()
        assert not report.failures
        for turn in range(8):
            rows = draw.randint(1, 6)
            given = batch_of(rows, 10 * seed + turn)
            manager.inputs.poison_pads(0)
            at, first = 0, True
            for _ in range(3):
                steps = draw.randint(1, LENGTH)
                launches, runs = driver.calls.count("cuGraphLaunch"), driver.runs
                many = manager.run_many(steps, given if first else None)
                assert driver.calls.count("cuGraphLaunch") == launches + 1
                tokens = walks(given, at + steps)
                belonging = [counted(t, ends) for t in tokens]
                needed = min(steps, max(1, max(belonging) - at))
                assert driver.runs - runs == needed
                for row, count in enumerate(belonging):
                    expected = tokens[row][at : min(count, at + needed)]
                    assert many.outputs["token"][: len(expected), row].tolist() == expected
                    if ends:
                        assert int(many.counts[row]) == len(expected)
                at, first = at + needed, False
                assert manager.inputs["position"][:rows].tolist() == [
                    p + at for p in given["position"].tolist()
                ]


def test_stats_count_what_was_asked_for():
    manager, driver = looping()
    with manager:
        manager.capture()
        runs = driver.runs
        manager.run_many(5, batch_of(3))
        manager.run()
        stats = manager.stats()
        assert (stats.replays, stats.rows, stats.padding_rows) == (6, 18, 6)
        assert driver.runs == runs + 5


@pytest.mark.parametrize("every", [1, 4, 100])
def test_calls_in_which_a_replay_is_due_for_verification_go_step_by_step(every):
    manager, driver = looping(settings=Settings(verify_every=every))
    with manager:
        manager.capture()
        given = batch_of(2, 1)
        path = [[], []]
        for index, steps in enumerate((3, 2, 8, 1)):
            launches, due = driver.calls.count("cuGraphLaunch"), manager.stats().replays
            many = manager.run_many(steps, given if index == 0 else None)
            looped = driver.calls.count("cuGraphLaunch") - launches
            assert looped == (0 if (due + steps) // every > due // every else 1)
            for row, tokens in enumerate(many.outputs["token"].t().tolist()):
                path[row] += tokens
            stats = manager.stats()
            assert stats.verified == stats.replays // every
        assert path == walks(given, 14)


def test_a_driver_without_loops_costs_nothing_but_speed():
    driver = FakeDriver()
    driver.fails = {"cuGraphConditionalHandleCreate"}
    manager, _ = looping(driver)
    with manager:
        report = manager.capture()
        assert report.notes == (
            "run_many() enqueues its replays one by one, without a loop on the device: "
            "cuGraphConditionalHandleCreate failed: CUresult.CUDA_ERROR_NOT_SUPPORTED",
        )
        given = batch_of(3)
        assert manager.run_many(6, given).outputs["token"].t().tolist() == walks(given, 6)
        assert "cuGraphLaunch" not in driver.calls


class Wrong(FakeDriver):
    """Runs each loop of one recording once too often, or ends it too early."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by

    def _go_on(self, handle, left, live, rows):
        super()._go_on(handle, left, live, rows)
        if rows == 4:
            import ctypes

            remaining = ctypes.c_int32.from_address(left).value
            self.values[handle] = int(remaining > self.by)


class Deaf(FakeDriver):
    """Its copy of a recording does nothing for one bucket, as a driver may that takes more than it can."""

    def _go_on(self, handle, left, live, rows):
        super()._go_on(handle, left, live, rows)

    def cuGraphAddChildGraphNode(self, graph, nodes, count, child):
        answer = super().cuGraphAddChildGraphNode(graph, nodes, count, child)
        self.children = [*getattr(self, "children", []), child]
        if len(self.children) == 2:
            self.bodies[child] = lambda: None
        return answer


@pytest.mark.parametrize("driver", [Wrong(-1), Wrong(1), Deaf()], ids=["long", "short", "deaf"])
def test_a_loop_that_does_something_else_is_not_used(driver, caplog):
    manager, _ = looping(driver)
    with manager:
        report = manager.capture()
        (note,) = report.notes
        assert "bucket 4" in note
        assert note.endswith("buckets [2, 6] have one")
        assert "run_many() replays bucket 4 step by step" in caplog.text
        assert not report.failures
        for rows, launches in ((3, 0), (2, 1), (6, 1)):
            before = driver.calls.count("cuGraphLaunch")
            given = batch_of(rows, rows)
            assert manager.run_many(5, given).outputs["token"].t().tolist() == walks(given, 5)
            assert driver.calls.count("cuGraphLaunch") - before == launches


class Drawing(Walk):
    def __init__(self, generator=None):
        super().__init__()
        self.generator = generator

    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        noise = torch.rand(outputs["token"].shape, generator=self.generator)
        return {**outputs, "noise": noise}


@pytest.mark.parametrize("own", [False, True])
def test_a_step_that_draws_random_numbers_is_not_looped(own):
    generator = torch.Generator().manual_seed(1) if own else None
    driver = FakeDriver()
    manager, _ = looping(
        driver,
        step=Drawing(generator),
        outputs={**TOKENS, "noise": ((), torch.float32)},
        state=[generator] if own else (),
    )
    with manager:
        (note,) = manager.capture().notes
        assert "draws random numbers" in note
        launches = driver.calls.count("cuGraphLaunch")
        noise = manager.run_many(6, batch_of(4)).outputs["noise"]
        assert len(set(noise.flatten().tolist())) == 24
        assert driver.calls.count("cuGraphLaunch") == launches


def test_loops_are_given_back_before_their_recordings():
    manager, driver = looping()
    manager.capture()
    assert len(driver.open["executable"]) == 3
    manager.drop(4, "not_recorded", "the host says so")
    assert len(driver.open["executable"]) == 2
    given = batch_of(3)
    assert manager.run_many(2, given).outputs["token"].t().tolist() == walks(given, 2)
    manager.close()
    assert not any(driver.open.values())


def test_a_capture_that_fails_late_leaves_no_loop(monkeypatch):
    manager, driver = looping()

    def late(seconds):
        raise BackendError("late")

    monkeypatch.setattr(manager, "_reported", late)
    with pytest.raises(BackendError, match="late"):
        manager.capture()
    assert manager.state == "new"
    assert not any(driver.open.values())


def test_slots_and_ring_are_as_before_capture():
    manager, _ = looping(stop=Stop("token", (3,)))
    with manager:
        manager.inputs.load(batch_of(2, 9), 2)
        before = [manager.inputs.arena.clone(), *(t.clone() for t in manager._many.buffer.tensors)]
        manager.capture()
        after = [manager.inputs.arena, *manager._many.buffer.tensors]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert manager.run_many(2).outputs["token"].t().tolist() == walks(batch_of(2, 9), 2)
