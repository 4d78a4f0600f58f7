"""Footguns of padding on a CUDA device: cases 20 to 23 on graphcap's own kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_toy import WIDTH, batch, churn, manager_of

from graphcap import BucketLadder, BufferPool, CaptureManager, Settings, StaticInputs
from graphcap.moe.experts import RoutedExperts
from graphcap.moe.kernels import choose_backend, expert_kernels

EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 64, 32


def test_20_gpu_a_batch_wide_maximum(device: torch.device):
    """Kin: on a device, with NaN left in padding rows between replays."""

    def scaled(inputs: Any) -> Any:
        x = inputs["x"]
        scale = x.abs().amax() / 448
        return {"y": torch.round(x / scale) * scale}

    manager = manager_of(scaled, device, sizes=(1, 4), max_batch=8)
    assert not manager.capture().failures
    for rows in (8, 3, 5, 1):
        given = batch(rows, device, rows)
        manager.inputs["x"][rows:].fill_(float("nan"))
        torch.testing.assert_close(manager.run(given)["y"], scaled(given)["y"])


class Moe:
    """One MoE layer whose output is that of the layer alone."""

    def __init__(self, pool: BufferPool, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(7)

        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) / 8).to(device, torch.bfloat16)

        self.pool = pool
        self.layer = RoutedExperts(
            expert_kernels(choose_backend("auto", device)),
            pool,
            weight(EXPERTS, HIDDEN),
            weight(EXPERTS, 2 * INNER, HIDDEN),
            weight(EXPERTS, HIDDEN, INNER),
            top_k=TOP_K,
            renormalize=True,
        )

    def __call__(self, inputs: Any) -> Any:
        state = self.pool.take("state", tuple(inputs["x"].shape), torch.bfloat16)
        state.copy_(inputs["x"])
        self.layer(state, inputs["count"], out=state)
        return {"y": state}


@pytest.mark.parametrize("rows", [1, 3, 5, 8])
def test_22_gpu_pads_reach_no_expert(rows: int, device: torch.device):
    """Kin: on graphcap's Triton kernels: NaN and other ids in padding rows change nothing."""
    from cuda_toy import SLOTS

    pool = BufferPool(device)
    step = Moe(pool, device)
    manager = CaptureManager(
        step,
        StaticInputs(8, SLOTS, device),
        pool=pool,
        ladder=BucketLadder([2, 8]),
        settings=Settings(recorder="cuda"),
    )
    assert not manager.capture().failures
    manager.run(batch(8, device, 1))
    given = batch(rows, device)
    wanted = manager.run(given)["y"].clone()
    manager.inputs["x"][rows:].fill_(float("nan"))
    manager.inputs["count"][rows:].fill_(1)
    pool.poison()
    churn(device)
    assert torch.equal(manager.run(given)["y"], wanted)
    bucket = manager.ladder.bucket_for(rows)
    assert manager.recording(bucket).outputs["y"].isfinite().all()
    assert (manager.recording(bucket).outputs["y"][rows:] == 0).all()  # no expert gave anything
    assert HIDDEN == WIDTH
