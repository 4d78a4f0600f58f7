"""What bench/speed.py says of run_many: which calls are timed, and that waiting is not taken for work."""

from __future__ import annotations

import time

import torch
from bench_modules import speed_many, speed_ways
from loop_fakes import FakeDriver, LoopingRecorder
from walks import batch_of, walker

from graphcap.decode import measure
from graphcap.ring import Stop

CPU = torch.device("cpu")
TOKENS = 5


def captured(recorder=None):
    manager = walker(TOKENS, stop=Stop("token", (speed_many.NEVER,)), recorder=recorder)
    manager.capture()
    return manager


def test_most_calls_are_of_ended_rows_and_in_short_bursts():
    driver = FakeDriver()
    with captured(LoopingRecorder(driver)) as manager:
        steps, whole = [], manager.run_many

        def run_many(tokens):
            before = driver.runs
            many = whole(tokens)
            steps.append(driver.runs - before)
            assert int(manager.inputs["position"][0]) <= 1000 + speed_ways.HEADROOM
            return many

        manager.run_many = run_many
        found = speed_many.many_times(manager, batch_of(3), TOKENS, CPU)
    bursts = 29
    assert found["host_calls"] == bursts * (speed_many.QUEUE - 1) >= speed_many.CALLS
    assert found["host_rows_ended"]
    rounds = [TOKENS] * 3 * speed_many.ROUNDS
    assert steps == rounds + ([TOKENS] + [1] * speed_many.QUEUE) * bursts
    assert 0 < found["host_us_least"] <= found["host_us_per_call"]
    assert found["ms"] > 0
    assert found["host_us_after_idle"] > 0


def test_without_a_loop_calls_are_of_all_steps():
    with captured() as manager:
        found = speed_many.many_times(manager, batch_of(3), TOKENS, CPU)
        assert not manager.loops(4)
    assert (found["host_rows_ended"], found["host_calls"]) == (False, speed_many.ROUNDS - 1)
    assert found["host_us_per_call"] == found["host_us_behind_steps"]
    assert found["host_waits"], "on a CPU the host does the work itself"


def test_a_driver_that_makes_the_host_wait_is_told_from_the_hosts_work():
    class Waits(FakeDriver):
        def cuGraphLaunch(self, executable, stream):
            before = self.runs
            answer = super().cuGraphLaunch(executable, stream)
            if self.runs - before > 1:
                time.sleep(0.02)
            return answer

    with captured(LoopingRecorder(Waits())) as manager:
        found = speed_many.many_times(manager, batch_of(3), TOKENS, CPU)
    assert found["host_waits"]
    assert found["host_us_behind_steps"] > 20_000 > found["host_us_per_call"]


def test_what_host_times_counts_and_what_it_leaves_out():
    order = []
    found = measure.host_times(
        lambda: order.append("call"), CPU, 3, 4, before=lambda: order.append("before")
    )
    assert order == ["before", *["call"] * 4] * 3
    assert found.calls == 9
    assert 0 < found.least <= found.queued
    assert found.idle > 0
