"""Host µs of run_many(32) and of its parts on a real device, the device's work not waited for."""

import pytest
import torch
from walks import batch_of, walker

from graphcap import Settings
from graphcap.decode.measure import host_times
from graphcap.recorders.loop_probe import probe_loops

AT_ONCE = 32


def test_a_call_of_32_steps_costs_the_host_at_most_60_us(device):
    if not probe_loops(device).works:
        pytest.skip(f"no loops: {probe_loops(device).detail}")
    with walker(AT_ONCE, device=str(device), settings=Settings(recorder="cuda")) as manager:
        report = manager.capture()
        assert manager.loops(4), report.notes
        manager.run_many(AT_ONCE, batch_of(4))
        loop = manager._many.loops[4]
        parts = {
            "run_many(32)": lambda: manager.run_many(AT_ONCE),
            "the launch alone": loop.launch,
            "a copy of 10 words, which it saves": lambda: place.copy_(source),
            "the fingerprint": manager._fingerprint.check,
            "run()": manager.run,
        }
        place, source = (torch.zeros(10, dtype=torch.int64, device=device) for _ in range(2))
        found = {}
        for name, call in parts.items():
            found[name] = host_times(call, device, bursts=60, queue=5)
            print(f"\n{name}: {found[name]}")
        assert found["run_many(32)"].calls == 240
        assert found["run_many(32)"].least <= 60
        assert manager.stats().replays > 0
