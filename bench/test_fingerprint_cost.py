"""What a replay pays for the question whether all that was recorded is still in place.

The check alone, without the replay. A check is shorter than the resolution of the clock, so many in a row
are timed; ``microseconds_per_check`` has their median. Of a step with more than 14 names each check compares
8 of them, so every window takes part in what is timed.
"""

import statistics
import timeit

import pytest
import torch

from graphcap.checks import Fingerprint

TENSORS = 1200
CHECKS = 10_000


@pytest.fixture
def modules():
    """A step of 1,200 parameters in 600 modules."""
    module = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(TENSORS // 2)])
    return watching(module.forward)


@pytest.fixture
def plain():
    """A step that keeps its 1,200 weights in a list and in the attributes of plain objects."""

    class Layer:
        def __init__(self):
            self.norm = torch.ones(1)

    class Step:
        def __init__(self):
            self.layers = [Layer() for _ in range(TENSORS // 2)]
            self.weights = [torch.ones(1) for _ in range(TENSORS // 2)]

        def __call__(self, inputs):
            return {"y": inputs["x"] * self.weights[0] * self.layers[0].norm}

    return watching(Step())


@pytest.fixture
def small():
    """A step of 14 names, which are all compared at each check."""
    weights = [torch.ones(1) for _ in range(11)]
    return watching(lambda inputs: {"y": inputs["x"] * weights[0]})


@pytest.fixture
def written():
    """1,200 tensors of which every step writes 96 in place, as it does caches."""
    weights = [torch.ones(1) for _ in range(TENSORS)]
    fingerprint = watching(lambda inputs: {"y": inputs["x"] * weights[0]})
    for _ in range(3):  # the caches become known
        for cache in weights[:96]:
            cache.add_(1)
        for _ in range(TENSORS):
            fingerprint.check()
    for cache in weights[:96]:
        cache.add_(1)
    return fingerprint


def watching(step):
    fingerprint = Fingerprint(step, {"slot arena": torch.ones(1), "pool arena": torch.ones(1)})
    fingerprint.check()
    return fingerprint


@pytest.mark.parametrize("step", ["modules", "plain", "written", "small"])
def test_check(benchmark, request, step):
    fingerprint = request.getfixturevalue(step)
    runs = timeit.repeat(fingerprint.check, number=CHECKS, repeat=9)
    benchmark.extra_info["microseconds_per_check"] = round(
        statistics.median(runs) / CHECKS * 1e6, 3
    )
    benchmark.extra_info["tensors"] = len(fingerprint.tensors())
    benchmark.pedantic(fingerprint.check, rounds=50, iterations=CHECKS // 10, warmup_rounds=2)
    fingerprint.close()
