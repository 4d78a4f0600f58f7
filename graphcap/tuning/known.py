"""Plans that were measured before, on this device for this model: starts of a search, whatever has changed.

Kernels change, and with them what is best, but seldom by much: what was found once costs hundreds of
trials less than finding it again. Each is measured anew before anything is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from graphcap.decode.cuda_kernels import cuda_obstacles
from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.model_shape import ModelShape
from graphcap.decode.plan_choice import is_missing
from graphcap.decode.plan_files import PlanFile, read_plans, tables
from graphcap.decode.plan_key import PlanKey
from graphcap.errors import InputError

Known = Callable[[int, int], tuple[LayerPlan, ...]]
"""Rows, context -> plans of that many rows, each once, of the nearest context that a file has."""


def no_plans(rows: int, context: int) -> tuple[LayerPlan, ...]:
    return ()


def known_plans(path: Path, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Known:
    """Those in `path`, a file of plans, and in the packaged tables, also if other kernels or versions made
    them. A file that cannot be read has none.

    What a plan wants in CUDA C++ and cannot have here is left out of it.
    """
    key = PlanKey.of(shape, dtype, torch.cuda.get_device_name(device))
    files = [file for _, file in tables()]
    if not is_missing(path):
        with suppress(InputError):  # it is written anew, see `plan_file`
            files.insert(0, read_plans(path))
    files = [file for file in files if file.key == key]

    def known(rows: int, context: int) -> tuple[LayerPlan, ...]:
        found: list[LayerPlan] = []
        for file in files:
            plan = _nearest(file, rows, context)
            if plan is not None:
                plan = plan.without(cuda_obstacles(shape, dtype, device, rows, plan))
                found += [plan] if plan not in found else []
        return tuple(found)

    return known


def _nearest(file: PlanFile, rows: int, context: int) -> LayerPlan | None:
    same = [bucket for bucket in file.buckets if bucket.rows == rows]
    if not same:
        return None
    nearest = min(same, key=lambda b: max(b.context, context) / min(b.context, context))
    return nearest.plan if nearest.plan.layers != "plain" else None
