"""A small step and its manager on a CUDA device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from graphcap import (
    BucketLadder,
    BufferPool,
    CaptureManager,
    PadPolicy,
    Settings,
    Slot,
    StaticInputs,
)

WIDTH = 64
SLOTS = {
    "x": Slot((WIDTH,), torch.float32),
    "count": Slot((), torch.int64, PadPolicy.fill(-1)),
}


class Step:
    """A linear layer on the pool, ReLU, and a slot that advances.

    Attributes:
        while_capturing: rows -> what a bucket of so many rows does first, under capture only.
    """

    def __init__(self, pool: BufferPool, device: torch.device) -> None:
        self.pool = pool
        self.weight = torch.randn(WIDTH, WIDTH, device=device)
        self.while_capturing: dict[int, Callable[[torch.Tensor], object]] = {}

    def __call__(self, inputs: Any) -> dict[str, torch.Tensor]:
        x = inputs["x"]
        hidden = self.pool.take("hidden", tuple(x.shape), torch.float32)
        torch.mm(x, self.weight, out=hidden)
        if x.shape[0] in self.while_capturing and torch.cuda.is_current_stream_capturing():
            self.while_capturing[x.shape[0]](hidden)
        inputs["count"].add_(1)
        return {"y": torch.relu(hidden) + 1}


def make(
    device: torch.device, sizes: tuple[int, ...] = (1, 2, 4), max_batch: int = 8, **settings: Any
) -> tuple[CaptureManager, Step]:
    """A manager, not captured yet, and its step."""
    pool = BufferPool(device)
    step = Step(pool, device)
    return manager_of(step, device, sizes, max_batch, pool=pool, **settings), step


def manager_of(
    step: Callable[..., Any],
    device: torch.device,
    sizes: tuple[int, ...] = (2,),
    max_batch: int = 4,
    pool: BufferPool | None = None,
    state: Any = (),
    rows_mix: bool = False,
    **settings: Any,
) -> CaptureManager:
    return CaptureManager(
        step,
        StaticInputs(max_batch, SLOTS, device),
        pool=pool,
        ladder=BucketLadder(sizes, max_batch),
        settings=Settings(recorder="cuda", **settings),
        state=state,
        rows_mix=rows_mix,
    )


def batch(rows: int, device: torch.device | str, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator).to(device)
    return {"x": x, "count": torch.arange(rows, device=device)}


def right(manager: CaptureManager, step: Step, rows: int, seed: int = 0) -> None:
    """A run of `rows` fresh rows equals the step computed in float64."""
    device = step.weight.device
    given = batch(rows, device, seed)
    wanted = torch.relu(given["x"].double() @ step.weight.double()) + 1
    out = manager.run(given)["y"]
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-3)


def churn(device: torch.device) -> None:
    """Free memory is given away, overwritten with NaN and given back."""
    for _ in range(5):
        junk = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(16)]
        del junk
        gc.collect()
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
