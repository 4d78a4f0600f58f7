"""A CUDA graph that differs from the eager step: the operation is named from inside the graph."""

import re
from pathlib import Path

import pytest
import torch

from graphcap import (
    BucketLadder,
    BufferPool,
    CaptureManager,
    PadPolicy,
    Settings,
    Slot,
    StaticInputs,
    narrowing,
)
from graphcap.operations import operation
from graphcap.recorders.cuda import CudaRecorder

WIDTH = 64
HERE = re.escape(str(Path(__file__)))


def make(device, step, sizes=(4,), recorder=None, pool=None, **options):
    inputs = StaticInputs(8, {"x": Slot((WIDTH,), torch.float32, PadPolicy.ZERO)}, device)
    return CaptureManager(
        step,
        inputs,
        pool=pool,
        ladder=BucketLadder(sizes, 8),
        settings=options.pop("settings", Settings(recorder="cuda")),
        recorder=recorder,
        **options,
    )


class Drifting:
    """Matrix products on the pool; the one at `at` is scaled by a number that the host changes."""

    def __init__(self, device, pool, at=5, wrong_rows=(4, 8)):
        generator = torch.Generator(device).manual_seed(0)
        self.weight = torch.randn(WIDTH, WIDTH, device=device, generator=generator) / 8
        self.pool, self.at, self.wrong_rows, self.runs = pool, at, wrong_rows, 0

    def __call__(self, inputs):
        self.runs += 1
        x = inputs["x"]
        for stage in range(10):
            y = self.pool.take("y", (x.shape[0], WIDTH), torch.float32)
            torch.mm(x, self.weight, out=y)
            drifts = stage == self.at and x.shape[0] in self.wrong_rows
            x = y.mul(self.runs if drifts else 1)
            self.pool.release("y")
        return {"y": x.tanh()}


@pytest.mark.parametrize("budget", [narrowing.BUDGET, 4096])
@pytest.mark.parametrize("watched", [True, False])
def test_the_operation_inside_a_graph_is_named(device, budget, watched, monkeypatch):
    real = narrowing.Narrowing
    monkeypatch.setattr(
        "graphcap.verify.Narrowing",
        lambda recorder, put, known: real(recorder, put, known, budget, 100),
    )
    pool, recorder = BufferPool(device), CudaRecorder(device)
    recorder.watched = watched
    with make(device, Drifting(device, pool), pool=pool, recorder=recorder) as manager:
        failures = manager.capture().failures
    assert set(failures) == {4, 8}
    for text in failures.values():
        assert "output 'y' differs from the eager step" in text
        assert re.search(
            rf"first operation whose result differs is aten\.mul\.Tensor at {HERE}:\d+ \(__call__\)",
            text,
        )
        assert "at run 6 of this line, after aten.mm.out at" in text
        assert "it differs as well between two eager runs" in text


def test_an_operation_of_the_kernel_layer_inside_a_graph_is_named(device):
    runs = [0]

    @operation("scaled_copy", "by hand")
    def scaled_copy(source, out, by):
        torch.mul(source, by, out=out)

    def step(inputs):
        runs[0] += 1
        out = torch.empty(inputs["x"].shape, device=device)
        scaled_copy(inputs["x"] + 1, out, runs[0])
        return {"y": out + 1}

    with make(device, step) as manager:
        text = manager.capture().failures[8]
    assert re.search(rf"result differs is scaled_copy \(by hand\) at {HERE}:\d+ \(step\)", text)


def test_what_is_launched_past_torch_is_told_of(device):
    triton = pytest.importorskip("triton")
    import triton.language as tl

    @triton.jit
    def scaled(source, out, by, n, block: tl.constexpr):
        at = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(out + at, tl.load(source + at, at < n) * by, at < n)

    runs = [0]

    def step(inputs):
        runs[0] += 1
        x = inputs["x"] + 1
        out = torch.empty_like(x)
        scaled[(triton.cdiv(x.numel(), 128),)](x, out, float(runs[0]), x.numel(), block=128)
        return {"y": out}

    with make(device, step) as manager:
        text = manager.capture().failures[8]
    assert "of what torch runs no operation differs, only output 'y'" in text
    assert re.search(rf"after aten\.add\.Tensor at {HERE}:\d+ \(step\)", text)


def test_looking_for_it_leaves_the_other_buckets_and_the_memory_alone(device):
    pool = BufferPool(device)
    step = Drifting(device, pool, wrong_rows=(4,))
    generator_before = torch.cuda.get_rng_state(device)
    with make(device, step, sizes=(2, 4), pool=pool) as manager:
        assert set(manager.capture().failures) == {4}
        assert torch.equal(torch.cuda.get_rng_state(device), generator_before)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        for rows in (1, 2, 6, 8):
            x = torch.randn(rows, WIDTH, device=device)
            out = manager.run({"x": x})["y"]
            with torch.no_grad(), pool.outside(), pool.step():
                expected = step({"x": x})["y"]
            assert torch.allclose(out, expected, rtol=1e-3, atol=1e-4)
        assert manager.stats().replays == 4
        del out, expected, x
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated(device) <= before + 2**20


class Undoes(CudaRecorder):
    """Its replays leave the cache as it was."""

    def __init__(self, device, cache):
        super().__init__(device)
        self.cache, self.undoes = cache, True

    def record(self, step, bucket):
        recording = super().record(step, bucket)
        right = recording.replay

        def replay():
            saved = self.cache.clone()
            right()
            if self.undoes:
                self.cache.copy_(saved)

        recording.replay = replay
        return recording


@pytest.mark.parametrize("undoes", [True, False])
def test_a_missing_write_in_place_is_found(device, undoes):
    cache = torch.zeros(8, WIDTH, device=device)
    recorder = Undoes(device, cache)
    recorder.undoes = undoes

    def step(inputs):
        rows = inputs["x"].shape[0]
        cache[:rows].copy_(inputs["x"] * 3)
        return {"y": inputs["x"] + 1}

    manager = make(device, step, recorder=recorder)
    failures = manager.capture().failures
    if undoes:
        assert set(failures) == {4, 8}
        assert "the replay leaves something else in" in failures[8]
        assert "cache than the eager step does" in failures[8]
    else:
        assert not failures
    manager.close()


class Corrupts(CudaRecorder):
    broken = False

    def record(self, step, bucket):
        recording = super().record(step, bucket)
        right = recording.replay

        def replay():
            right()
            if self.broken:
                recording.outputs["y"].add_(1)

        recording.replay = replay
        return recording


def test_a_wrong_replay_while_serving_gets_the_eager_result(device, caplog):
    recorder = Corrupts(device)
    settings = Settings(recorder="cuda", verify_every=2)
    manager = make(device, lambda i: {"y": i["x"] * 2}, recorder=recorder, settings=settings)
    assert not manager.capture().failures
    x = torch.randn(3, WIDTH, device=device)
    assert torch.equal(manager.run({"x": x})["y"], x * 2)
    recorder.broken = True
    for _ in range(3):
        assert torch.equal(manager.run({"x": x})["y"], x * 2)
    stats = manager.stats()
    assert stats.fallbacks == {"verification": 3}
    assert stats.replays == 1
    assert "while serving, bucket 4 with 3 rows: output 'y' differs" in caplog.text
    manager.close()
