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
        given = batch_of(4)
        near = {name: tensor.to(device) for name, tensor in given.items()}
        place, source = (torch.zeros(10, dtype=torch.int64, device=device) for _ in range(2))
        manager.run_many(AT_ONCE, given)
        parts = {
            "run_many(32)": lambda: manager.run_many(AT_ONCE),
            "its launch alone": manager._many.loops[4].launch,
            "its fingerprint": manager._fingerprint.check,
            "a copy of 10 words, which the loop saves": lambda: place.copy_(source),
            "run()": manager.run,
            "the graph's launch alone": manager.recording(4).replay,
            "run(), a batch on the device": lambda: manager.run(near),
            "run(), a batch on the host": lambda: manager.run(given),
        }
        found = {}
        for name, call in parts.items():
            found[name] = host_times(call, device, bursts=60, queue=5)
            print(f"\n{name}: {found[name]}")
        assert found["run_many(32)"].calls == 240
        assert found["run_many(32)"].least <= 60
        # A new batch from the host is what it says, after all that was queued.
        token = manager.run(given)["token"].tolist()
        expected = (given["token"] * 5 + given["position"].int() * 3 + 7) % 31
        assert token == expected.tolist()


def test_batches_from_the_host_one_after_another(device):
    """Each is copied through one of four images, none of which is rewritten before it was read."""
    with walker(AT_ONCE, device=str(device), settings=Settings(recorder="cuda")) as manager:
        manager.capture()
        for turn in range(50):
            given = batch_of(turn % 6 + 1, turn)
            wide = {name: torch.stack([t, t], -1)[..., 0] for name, t in given.items()}
            out = manager.run(wide if turn % 2 else given)["token"].tolist()
            expected = (given["token"] * 5 + given["position"].int() * 3 + 7) % 31
            assert out == expected.tolist()


def test_slots_made_in_inference_mode_take_batches_from_the_host(device):
    with torch.inference_mode():
        manager = walker(AT_ONCE, device=str(device), settings=Settings(recorder="cuda"))
    with manager:
        manager.capture()
        given = batch_of(1, 3)
        wide = {name: torch.stack([t, t], -1)[..., 0] for name, t in given.items()}
        near = {name: torch.stack([t, t], -1)[..., 0].to(device) for name, t in given.items()}
        expected = (given["token"] * 5 + given["position"].int() * 3 + 7) % 31
        for batch in (given, wide, near):
            assert manager.run(batch)["token"].tolist() == expected.tolist()
