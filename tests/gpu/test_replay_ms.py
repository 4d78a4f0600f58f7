"""Replays of CUDA graphs are timed by the device, and change nothing."""

import pytest
import torch

from graphcap import BucketLadder, CaptureManager, Settings, Slot, StaticInputs

WIDTH = 512
CYCLES = 20_000_000


def test_a_replay_is_timed_by_the_device(device):
    def step(inputs):
        x = inputs["x"]
        if x.shape[0] == 8:
            torch.cuda._sleep(CYCLES)  # the device is busy, the host is not
        x.add_(1)
        return {"y": x * 2}

    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize()
    first.record()
    torch.cuda._sleep(CYCLES)
    last.record()
    torch.cuda.synchronize()
    asleep = first.elapsed_time(last)

    inputs = StaticInputs(8, {"x": Slot((WIDTH,), torch.float32)}, device)
    with CaptureManager(
        step, inputs, ladder=BucketLadder([2, 8]), settings=Settings(recorder="cuda")
    ) as manager:
        inputs["x"].fill_(7)
        report = manager.capture()
        assert report.failures == {}
        short, long = (bucket.replay_ms for bucket in report.buckets)
        assert 0 < short < long / 2
        assert long == pytest.approx(asleep, rel=0.3)
        assert (inputs["x"] == 7).all()
