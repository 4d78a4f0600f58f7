"""run_many goes on in a thread that has done nothing on the device, and where another device is current."""

import threading

import pytest
import torch
from walks import batch_of, walker, walks

from graphcap import Settings
from graphcap.recorders.loop_probe import probe_loops


def captured(device):
    if not probe_loops(device).works:
        pytest.skip(f"no loops: {probe_loops(device).detail}")
    manager = walker(8, device=str(device), settings=Settings(recorder="cuda"))
    report = manager.capture()
    assert manager.loops(4), report.notes
    return manager


def in_a_new_thread(call):
    found = []

    def run():
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def test_the_first_thing_that_a_thread_does_is_a_call_that_goes_on(device):
    manager = captured(device)
    given = batch_of(3)
    manager.run_many(4, given)
    torch.cuda.synchronize(device)
    many = in_a_new_thread(lambda: manager.run_many(4))
    assert many.outputs["token"].t().tolist() == [row[4:] for row in walks(given, 8)]
    # As if it had not been there: this thread goes on, and another one gives the loops back.
    many = manager.run_many(3)
    assert many.outputs["token"].t().tolist() == [row[8:] for row in walks(given, 11)]
    in_a_new_thread(manager.close)
    assert manager.state == "closed"
    assert torch.ones(3, device=device).sum().item() == 3


def test_another_device_is_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    device = torch.device("cuda:1")
    with torch.cuda.device(device):  # Triton's kernels are launched on the current one
        manager = captured(device)
    with manager, torch.cuda.device(0):
        spin = torch.ones(2048, 2048, device=device)
        for turn in range(20):
            given = {name: tensor.to(device) for name, tensor in batch_of(3, turn).items()}
            for _ in range(20):  # what comes before the loop on its own device takes a while
                spin = spin @ spin * 1e-4
            many = manager.run_many(8, given)
            assert many.outputs["token"].t().tolist() == walks(batch_of(3, turn), 8)
            many = manager.run_many(8)
            assert many.outputs["token"].t().tolist() == [
                row[8:] for row in walks(batch_of(3, turn), 16)
            ]
        assert torch.cuda.current_device() == 0
