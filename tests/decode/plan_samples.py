"""Files of plans and machines that have GPUs, for the tests of schedules."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphcap.decode.cache_format import CacheFormat
from graphcap.decode.kernels import DecodeKernels, cuda_attend, cuda_linear
from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.model_shape import ModelShape
from graphcap.decode.plan_files import PlanFile, TunedBucket
from graphcap.decode.plan_key import PlanKey, kernels_digest, versions_here
from graphcap.decode.schedule import Schedule
from graphcap.decode.shapes import preset
from graphcap.moe.kernels import cuda_down, cuda_gate_up

H200 = "NVIDIA H200"
SEED = preset("seed-64")


def pretend(
    monkeypatch: pytest.MonkeyPatch, name: str = H200, capability: tuple[int, int] = (9, 0)
) -> None:
    """A CUDA device `name`, as far as a schedule asks, where CUDA C++ can be compiled."""
    for kernels in (cuda_attend, cuda_linear, cuda_gate_up, cuda_down):
        monkeypatch.setattr(kernels, "obstacle", lambda device: "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def schedule_of(
    kernels: DecodeKernels,
    shape: ModelShape = SEED,
    dtype: torch.dtype = torch.bfloat16,
    context: int = 320,
    name: str = "auto",
    device: str = "cuda:0",
    cache_format: CacheFormat | None = None,
    **how: Any,
) -> Schedule:
    """A schedule for weights and a cache that are not there: it looks at no tensor."""
    weights: Any = SimpleNamespace(shape=shape, dtype=dtype, device=torch.device(device))
    cache: Any = SimpleNamespace(
        format=CacheFormat() if cache_format is None else cache_format,
        blocks_per_sequence=-(-context // 16),
        block_size=16,
    )
    return Schedule(name, weights, cache, kernels, **how)


def file_of(
    *buckets: TunedBucket,
    shape: ModelShape = SEED,
    dtype: torch.dtype = torch.bfloat16,
    device: str = H200,
    **changes: Any,
) -> PlanFile:
    """What `graphcap tune` would write here."""
    key = PlanKey.of(shape, dtype, device)
    made = PlanFile(key, shape.name, kernels_digest(), versions_here(), ())
    return replace(made.with_buckets(buckets), **changes)


def bucket(rows: int, context: int = 256, plan: LayerPlan | None = None) -> TunedBucket:
    """Tuned, with a plan that no table and no rule has."""
    own = LayerPlan("apart", block=16, without_pdl=frozenset({"merge"}))
    return TunedBucket(rows, context, own if plan is None else plan, 1.5, 2.0, 1.75, 12, 40)
