"""What the host does in a call on a real device. Its times are printed (``pytest -s``) and not judged; they
are shown by bench/speed.py."""

import pytest
import torch
from walks import batch_of, walker

from graphcap import Settings
from graphcap.decode.measure import host_times
from graphcap.recorders.loop import GraphLoop, LoopDriver
from graphcap.recorders.loop_probe import kept_graph, probe_loops

AT_ONCE = 32


def test_the_host_side_of_calls_can_be_timed_and_harms_nothing(device):
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


@pytest.mark.parametrize("words", [1, 2, 31, 32, 33, 100])
def test_a_loop_begins_by_copying_every_word(device, words):
    if not probe_loops(device).works:
        pytest.skip(f"no loops: {probe_loops(device).detail}")
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
        value, live = torch.zeros(1, device=device), torch.ones(1, dtype=torch.bool, device=device)
        around = torch.full((words + 2,), -5, dtype=torch.int64, device=device)
        place = around[1:-1]
        source = torch.randint(2**62, (words,), dtype=torch.int64, device=device)
        source[-1] = 3
        left = place[-1:].view(torch.int32)[:1]
        value.add_(1).zero_()
        stream.synchronize()
        graph = kept_graph()
        graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        value.add_(1)
        graph.capture_end()
        raw, handle = graph.raw_cuda_graph(), stream.cuda_stream
        loop = GraphLoop(LoopDriver.loaded(), raw, left, live, lambda: handle, (place, source))
        for launches in (1, 2):
            loop.launch()
            assert float(value) == 3 * launches
            assert place[:-1].tolist() == source[:-1].tolist()
            assert int(left) == 0
            assert around[[0, -1]].tolist() == [-5, -5], "nothing beside it"
        loop.close()
        graph.reset()
