"""What `manager.run` costs the host besides the step itself: a step of one small operation."""

import pytest
import torch

from graphcap import BufferPool, CaptureManager, Ring, Settings, Slot, StaticInputs, Stop


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


MANY = 32


@pytest.fixture
def many(device):
    """A step of one small operation that goes on by itself, with a ring of its tokens."""
    weight = torch.randn(16, 16, device=device)
    pool = BufferPool(device)

    def step(inputs):
        x = inputs["x"]
        out = pool.take("out", tuple(x.shape), x.dtype)
        torch.mm(x, weight, out=out)
        inputs["token"].add_(1)
        return {"y": out, "token": inputs["token"]}

    slots = {"x": Slot((16,), torch.float32), "token": Slot((), torch.int32)}
    inputs = StaticInputs(8, slots, device)
    ring = Ring(MANY, {"token": ((), torch.int32)}, Stop("token", (-1,)))
    with CaptureManager(step, inputs, pool=pool, settings=Settings(), ring=ring) as made:
        made.capture()
        made.run(
            {
                "x": torch.randn(8, 16, device=device),
                "token": torch.zeros(8, dtype=torch.int32, device=device),
            }
        )
        yield made


def test_run_many(benchmark, many, device):
    """Host µs of one call of 32 steps; on a device its work is waited for between calls, not timed."""
    benchmark.extra_info["notes"] = list(many.report.notes)
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    benchmark.pedantic(many.run_many, args=(MANY,), setup=wait, rounds=200, warmup_rounds=5)


def test_as_many_runs(benchmark, many, device):
    """The same 32 steps by as many calls of run()."""

    def runs():
        for _ in range(MANY):
            many.run()

    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    benchmark.pedantic(runs, setup=wait, rounds=200, warmup_rounds=5)
