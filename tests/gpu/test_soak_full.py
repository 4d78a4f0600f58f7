"""The soak at full length on a device: 100,000 replays of a tiny decode step by CUDA graphs."""

import pytest
from test_soak import soak


@pytest.mark.parametrize(
    ("shape", "layers", "replays"), [("tiny", 2, 100_000), ("tiny-hybrid", 4, 5_000)]
)
def test_nothing_grows_and_nothing_differs_over_so_many_replays(device, shape, layers, replays):
    run = soak.Soak(device, shape=shape, layers=layers, recorder="cuda")
    assert not run.report.failures, run.report.failures
    legs = [run.leg(replays // 5) for _ in range(5)]
    stats = run.manager.stats()
    assert stats.recorder == "cuda"
    assert stats.fallbacks == {}
    assert stats.replays == run.steps + 8
    assert run.steps >= replays
    assert set(run.batches) == set(range(1, 9))
    assert run.checked["steps"] >= replays * 0.007
    assert run.checked["requests"] >= 1
    assert len({(m.tensors, m.allocated, m.reserved) for m in legs}) == 1, legs
    run.close()
