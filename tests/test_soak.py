"""Many replays under random traffic: nothing grows, nothing differs. At reduced length; see tests/gpu."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import CPU

from graphcap.errors import VerificationError

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))
soak, soak_run = (importlib.import_module(name) for name in ("soak", "soak_run"))


@pytest.mark.parametrize(
    ("shape", "layers", "replays", "sample"),
    [("tiny", 2, 1000, 0.04), ("tiny-hybrid", 4, 240, 0.1)],
)
def test_nothing_grows_and_nothing_differs(
    shape: str, layers: int, replays: int, sample: float
) -> None:
    run = soak.Soak(CPU, shape=shape, layers=layers, sample=sample)
    legs = [run.leg(replays // 4) for _ in range(4)]
    stats = run.manager.stats()
    assert stats.fallbacks == {}
    # Verification and warm-up aside, each step was one replay.
    assert stats.replays == run.steps + 8
    assert run.steps >= replays
    assert set(run.batches) == set(range(1, 9))
    assert run.checked["steps"] >= replays * sample / 2
    assert run.checked["requests"] >= 1
    assert run.checked["bitwise equal steps"] == run.checked["steps"], "same kernels, same shapes"
    assert {memory.tensors for memory in legs} == {legs[0].tensors}
    assert soak.grown(legs)["resident"] < 2 * 2**20
    free = run.cache.num_blocks - 1
    assert len(run.cache._free) == len(set(run.cache._free)) == free
    run.close()


def spoiled(seed: int = 0, **options: Any) -> Any:
    return soak.Soak(CPU, layers=1, seed=seed, **options)


def test_a_tensor_that_is_kept_is_seen() -> None:
    run, kept = spoiled(), []
    original = run.manager.run
    run.manager.run = lambda given: kept.append(torch.ones(1)) or original(given)
    legs = [run.leg(20) for _ in range(2)]
    assert soak.grown(legs)["tensors"] >= 20


def test_a_step_that_writes_elsewhere_in_the_cache_is_seen() -> None:
    run = spoiled(sample=1.0)
    original = run.manager.run

    def spoil(given: Any) -> Any:
        outputs = original(given)
        run.cache.values[0][run.cache.num_blocks - 1, 0].add_(1)
        return outputs

    run.manager.run = spoil
    with pytest.raises(VerificationError, match="cache 1"):
        run.leg(20)


def test_a_request_that_gets_the_tokens_of_another_is_seen() -> None:
    run = spoiled(sample=0.0)
    draw = random.Random(1)
    original = run.manager.run

    def swap(given: Any) -> Any:
        outputs = dict(original(given))
        if draw.random() < 0.2:
            outputs["token_ids"] = outputs["token_ids"].flip(0)
        return outputs

    run.manager.run = swap
    run._sample = 1.0  # every request that is answered, and no step
    run._checked_step = lambda given: run.manager.run(given)["token_ids"].tolist()
    with pytest.raises(VerificationError, match="among other requests"):
        run.leg(500)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--replays", "0"], "expected an integer of at least 1, found '0'"),
        (["--sample", "3"], "expected a number from 0 to 1, found '3'"),
    ],
)
def test_a_wrong_argument_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        soak.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_an_unknown_shape_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--shape", "nope"]) == 2
    assert "no preset is called 'nope'" in capsys.readouterr().err
