"""What `manager.run` costs the host besides the step itself: a step of one small operation."""

import pytest
import torch

from graphcap import BufferPool, CaptureManager, Settings, Slot, StaticInputs


@pytest.fixture
def manager(device):
    weight = torch.randn(16, 16, device=device)
    pool = BufferPool(device)

    def step(inputs):
        x = inputs["x"]
        out = pool.take("out", tuple(x.shape), x.dtype)
        torch.mm(x, weight, out=out)
        return {"y": out}

    inputs = StaticInputs(8, {"x": Slot((16,), torch.float32)}, device)
    with CaptureManager(step, inputs, pool=pool, settings=Settings()) as made:
        made.capture()
        yield made


def test_run_without_a_batch(benchmark, manager, device):
    manager.run({"x": torch.randn(8, 16, device=device)})
    benchmark(manager.run)


def test_replay_alone(benchmark, manager, device):
    manager.run({"x": torch.randn(8, 16, device=device)})
    benchmark(manager.recording(8).replay)


def test_run_with_a_batch_on_the_device(benchmark, manager, device):
    batch = {"x": torch.randn(8, 16, device=device)}
    benchmark(manager.run, batch)


def test_run_with_a_batch_on_the_host(benchmark, manager):
    batch = {"x": torch.randn(8, 16)}
    benchmark(manager.run, batch)
