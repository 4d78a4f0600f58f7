"""By which plan the layers of each bucket run, and why: asked for, tuned here, of a table, or by rule.

Decided when a step is built or first meets a bucket, from files alone: nothing is measured here, so
nothing can be tuned inside a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from graphcap.decode.cache import PagedCache
from graphcap.decode.cache_format import CacheFormat
from graphcap.decode.cuda_kernels import cuda_obstacles
from graphcap.decode.expert_plans import LONGEST_ROW, ExpertPlans
from graphcap.decode.kernels import DecodeKernels
from graphcap.decode.layer_plan import LayerPlan, default_plan
from graphcap.decode.model_shape import ModelShape
from graphcap.decode.plan_choice import PlanChoice, cached_plans, device_obstacle, nearest
from graphcap.decode.plan_files import PlanFile, TunedBucket, cache_folder, tables
from graphcap.decode.plan_key import ExpertSizes, PlanKey, differences
from graphcap.decode.weights import ModelWeights
from graphcap.errors import InputError
from graphcap.moe.kernels import ExpertKernels
from graphcap.pool import BufferPool

SCHEDULES = ("auto", "fused", "plain")

Plans = Callable[[int], LayerPlan]
"""The plan of a bucket of so many rows."""

LARGEST_HEAD = 256
"""The largest head dimension that fused attention was measured with."""

CONTEXT_RATIO = 2
"""A tile of attention serves contexts up to so many times as long or as short as the one it was
tuned for: it says into how many splits a sequence is divided."""


def check_schedule(schedule: str, kernels: DecodeKernels) -> None:
    """Raises InputError where there is no such schedule, or `kernels` cannot run it."""
    if schedule not in SCHEDULES:
        raise InputError(f"schedule: expected one of {', '.join(SCHEDULES)}, found {schedule!r}")
    if schedule == "fused" and kernels.fused is None:
        raise _refused(_no_fused_layer(kernels))


def _refused(obstacle: str) -> InputError:
    return InputError(
        f"schedule 'fused': {obstacle}; use schedule 'auto', which takes what can run, or 'plain'"
    )


def fused_obstacle(shape: ModelShape, cache: CacheFormat, kernels: DecodeKernels) -> str | None:
    """Why the fused schedule cannot run; None: it can."""
    if kernels.fused is None:
        return _no_fused_layer(kernels)
    if shape.is_hybrid:
        return (
            f"expected a model whose layers all have full attention without an output gate, found "
            f"{shape.name}, a hybrid"
        )
    if cache != CacheFormat():
        return f"expected a cache of format {CacheFormat()}, found {cache}"
    return None


def _no_fused_layer(kernels: DecodeKernels) -> str:
    return f"expected triton kernels, found {kernels.experts.name}, which have no fused layer"


def default_obstacle(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the fused schedule, which could run, is not taken where nothing was measured; None: it is."""
    obstacle = device_obstacle(dtype, device)
    if obstacle is not None:
        return obstacle
    longest = max(shape.hidden_size, shape.num_heads * shape.head_dim)
    if longest > LONGEST_ROW:
        return f"rows of {longest} values do not fit registers; {LONGEST_ROW} do"
    if shape.head_dim > LARGEST_HEAD:
        return f"heads of {shape.head_dim} values were not measured; {LARGEST_HEAD} were"
    return None


class Schedule:
    """The plans of a step.

    Args:
        name: "auto", "fused" or "plain".
        plans: of "fused"; None: `default_plan`.
        tune_cache: folder of plans that were tuned here, for "auto"; None: see `cache_folder`.

    Raises:
        InputError: there is no such schedule, it cannot run these kernels, model or cache, or `plans`
            are given to another than "fused".
    """

    def __init__(
        self,
        name: str,
        weights: ModelWeights,
        cache: PagedCache,
        kernels: DecodeKernels,
        plans: Plans | None = None,
        tune_cache: Path | None = None,
    ) -> None:
        check_schedule(name, kernels)
        if plans is not None and name != "fused":
            raise InputError(f"plans go with schedule 'fused', found schedule {name!r}")
        self.name = name
        self._weights = weights
        self._kernels = kernels
        self._plans = default_plan if plans is None else plans
        self._capacity = cache.blocks_per_sequence * cache.block_size
        self._choices: dict[int, PlanChoice] = {}
        self._found: list[tuple[str, str, PlanFile]] = []
        self._against = None
        self._obstacle = fused_obstacle(weights.shape, cache.format, kernels)
        if name == "fused" and self._obstacle is not None:
            raise _refused(self._obstacle)
        if name == "auto" and self._obstacle is None:
            self._against = default_obstacle(weights.shape, weights.dtype, weights.device)
            self._found = measured_plans(weights, cache_folder(tune_cache))
        self._experts: ExpertPlans | None = None
        if name == "auto" and kernels.fused is not None and weights.shape.is_hybrid:
            sizes = ExpertSizes(*(getattr(weights.shape, name) for name in ExpertSizes._fields))
            self._experts = ExpertPlans(
                kernels.experts, kernels.fused, sizes, weights.dtype, weights.device, tune_cache
            )

    @property
    def may_fuse(self) -> bool:
        """Whether a bucket can run by another schedule than the plain one."""
        if self.name == "auto":
            return self._obstacle is None and (bool(self._found) or self._against is None)
        return self.name == "fused"

    def choice(self, rows: int) -> PlanChoice:
        """How a bucket of `rows` runs; the same at every call, but where its plan could not run."""
        if rows not in self._choices:
            self._choices[rows] = self._choose(rows)
        choice = self._choices[rows]
        if self._experts is not None and choice.experts is not (own := self._experts.choice(rows)):
            choice = self._choices[rows] = replace(choice, experts=own)  # theirs could not run
        return choice

    def experts(self, rows: int) -> ExpertKernels | None:
        """On which kernels the routed experts of a plain bucket run; None: on those without a plan."""
        return None if self._experts is None else self._experts.kernels(rows)

    def run_experts(
        self, rows: int, pool: BufferPool, launch: Callable[[ExpertKernels], None]
    ) -> None:
        """`launch` the routed experts of a layer of a plain bucket; see `ExpertPlans.run`."""
        if self._experts is None:
            launch(self._kernels.experts)
            return
        self._experts.run(rows, pool, launch)

    def give_up(self, rows: int, why: str) -> None:
        """The plan of `rows` cannot run: from here on the bucket is a plain one."""
        self._choices[rows] = self.choice(rows).failed(why)

    def _choose(self, rows: int) -> PlanChoice:
        if self.name == "plain":
            return PlanChoice(rows, LayerPlan("plain"), "asked for", "schedule 'plain'")
        if self.name == "fused":
            plan = self._plans(rows)
            for kernel, reason in self._without_cuda(plan, rows).items():
                raise InputError(
                    f"schedule 'fused': the plan of {rows} rows wants {kernel} in CUDA C++: {reason}; give "
                    f"it a tile of Triton's, or none"
                )
            return PlanChoice(rows, plan, "asked for", "schedule 'fused'")
        if self._obstacle is not None:
            experts = None if self._experts is None else self._experts.choice(rows)
            plain = LayerPlan("plain")
            return PlanChoice(rows, plain, "not supported", self._obstacle, experts)
        for source, where, file in self._found:
            tuned = nearest(file.buckets, rows, self._capacity)
            if tuned is not None:
                plan, why = fitted(tuned, rows, self._capacity)
                obstacles, lacks = self._without_cuda(plan, rows), ""
                if obstacles:
                    reason = next(iter(obstacles.values()))
                    lacks = f"{', '.join(obstacles)} by Triton, not CUDA C++: {reason}"
                    why += f"; {lacks}"
                    plan = plan.without(obstacles)
                return PlanChoice(rows, plan, source, f"{where}: {why}", file=where, lacks=lacks)
        if self._against is not None:
            return PlanChoice(rows, LayerPlan("plain"), "default", self._against)
        why = "no tuned plan serves this bucket" if self._found else "no plan was tuned for this"
        return PlanChoice(rows, default_plan(rows), "default", f"{why}; graphcap tune finds one")

    def _without_cuda(self, plan: LayerPlan, rows: int) -> Mapping[str, str]:
        """What of `plan` cannot be made in CUDA C++ here, and why."""
        if not plan.in_cuda:
            return {}
        weights = self._weights
        return cuda_obstacles(weights.shape, weights.dtype, weights.device, rows, plan)


def measured_plans(weights: ModelWeights, folder: Path) -> list[tuple[str, str, PlanFile]]:
    """(source, what to call it, plans) measured for `weights` on their device, the cache before the
    tables.

    What lies in the cache and cannot be used is told of in a WARNING, and left alone. A table serves
    whatever the versions: its plans are as right with others, and most likely still fast.
    """
    device = weights.device
    if device.type != "cuda":
        return []
    found = []
    key = PlanKey.of(weights.shape, weights.dtype, torch.cuda.get_device_name(device))
    path = folder / key.file_name
    file = cached_plans(
        path,
        lambda file: (
            "" if file.key == key else f"expected plans for {key}, found plans for {file.key}"
        ),
    )
    if file is not None:
        found.append(("cache", str(path), file))
    for name, table in tables():
        if table.key == key:
            other = "; ".join(differences(table.machine, table.kernels))
            found.append(("table", f"{name}{f' (made with {other})' if other else ''}", table))
    return found


def fitted(tuned: TunedBucket, rows: int, capacity: int) -> tuple[LayerPlan, str]:
    """The plan for such rows and sequences, and what to say of it."""
    plan = tuned.plan
    why = f"tuned for {tuned.rows} rows at context {tuned.context}"
    ratio = max(tuned.context, capacity) / min(tuned.context, capacity)
    if "attend" in plan.tiles and ratio > CONTEXT_RATIO:
        plan = plan.without(["attend"])
        why += f"; attention by its own tile, as sequences may have {capacity} tokens"
    return plan, why
