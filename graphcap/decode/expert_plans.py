"""By which plan routed experts run where the rest of the layer is not the fused schedule's: a hybrid's, or an
MoE layer of vLLM's.

A plan is looked for as a whole layer's is, on this machine, then in the packaged tables, then by rule; but
what it was measured for need only agree in the sizes of the experts, so that the plans of one model serve
another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from graphcap.decode.cuda_kernels import expert_obstacles
from graphcap.decode.first_run import first_run
from graphcap.decode.kernels import FusedLayerKernels
from graphcap.decode.layer_plan import LayerPlan, default_plan, planned_experts
from graphcap.decode.plan_choice import (
    PlanChoice,
    cached_plans,
    device_obstacle,
    files_of_plans,
    nearest,
)
from graphcap.decode.plan_files import PlanFile, cache_folder, tables
from graphcap.decode.plan_key import ExpertSizes, differences, file_name_start
from graphcap.moe.kernels import ExpertKernels
from graphcap.pool import BufferPool

MOST_ROWS = 64
"""Rows of the largest batch that the kernels of a plan were measured with."""

LONGEST_ROW = 8192
"""Values of a row of router weights that a program holds in registers at the most."""


class ExpertPlans:
    """The plans of experts of one size, by rows.

    Args:
        kernels: without a plan.
        fused: of the same backend, for what a plan needs besides; None: it has none, and every batch runs
            on `kernels`.
        dtype: of the weights.
        tune_cache: folder of plans that were tuned here; None: see `cache_folder`.

    Attributes:
        title: the experts, to be told from others.
    """

    def __init__(
        self,
        kernels: ExpertKernels,
        fused: FusedLayerKernels | None,
        sizes: ExpertSizes,
        dtype: torch.dtype,
        device: torch.device,
        tune_cache: Path | None = None,
    ) -> None:
        self._kernels = kernels
        self._fused = fused
        self._sizes = sizes
        self._dtype = dtype
        self._device = device
        width, experts, top_k, inner = sizes
        self.title = f"{experts} experts of {width} x {inner}, top-{top_k}, {str(dtype)[6:]}"
        self._obstacle = self._why_not()
        self._found: list[tuple[str, str, PlanFile]] = []
        if self._obstacle is None:
            self._found = list(self._measured(cache_folder(tune_cache)))
        self._made: dict[int, tuple[PlanChoice, ExpertKernels]] = {}
        self._ran: set[int] = set()

    def choice(self, rows: int) -> PlanChoice:
        """By which plan a batch of `rows` runs; the same at every call, but where it could not `run`. Its
        layers are "plain" where it runs on the kernels without a plan."""
        return self._of(rows)[0]

    def kernels(self, rows: int) -> ExpertKernels:
        """The kernels of a batch of `rows`, whose rows must be contiguous, all of them."""
        return self._of(rows)[1]

    def run(self, rows: int, pool: BufferPool, launch: Callable[[ExpertKernels], None]) -> None:
        """`launch` the experts of a batch of `rows` on their kernels. Where the plan of so many rows cannot
        run the first time, they run without one, then and later, which a WARNING tells.

        Args:
            pool: of the experts.
            launch: reads nothing that it has written before it failed.
        """
        choice, kernels = self._of(rows)
        if rows in self._ran or kernels is self._kernels:
            launch(kernels)
            return
        failed = first_run(
            pool,
            lambda: launch(kernels),
            lambda: launch(self._kernels),
            "experts",
            rows,
            f"{choice.source} {choice.file}".strip(),
        )
        if failed is None:
            self._ran.add(rows)
        else:
            self._made[rows] = choice.failed(failed), self._kernels

    def _of(self, rows: int) -> tuple[PlanChoice, ExpertKernels]:
        if rows not in self._made:
            choice, kernels = self._choose(rows), self._kernels
            if choice.plan.layers != "plain":
                assert self._fused is not None
                kernels = planned_experts(kernels, self._fused, choice.plan)
            self._made[rows] = choice, kernels
        return self._made[rows]

    def _why_not(self) -> str | None:
        if self._fused is None:
            return f"{self._kernels.name} kernels are to run without plans"
        obstacle = device_obstacle(self._dtype, self._device)
        if obstacle is None and self._sizes.hidden_size > LONGEST_ROW:
            obstacle = (
                f"rows of {self._sizes.hidden_size} values do not fit registers; {LONGEST_ROW} do"
            )
        return obstacle

    def _choose(self, rows: int) -> PlanChoice:
        plain = LayerPlan("plain")
        if self._obstacle is not None:
            return PlanChoice(rows, plain, "not supported", self._obstacle)
        if rows > MOST_ROWS:
            why = f"plans are made for at most {MOST_ROWS} rows"
            return PlanChoice(rows, plain, "not supported", why)
        plain_won = False
        for source, where, file in self._found:
            # Experts do not see a context: that of the shortest stands for all.
            tuned = nearest(file.buckets, rows, 1)
            if tuned is None:
                continue
            if tuned.plan.layers == "plain":
                plain_won = True
                continue
            plan = tuned.plan.of_experts()
            why = f"{where}: tuned for {tuned.rows} rows"
            obstacles, lacks = self._without_cuda(plan, rows), ""
            if obstacles:
                reason = next(iter(obstacles.values()))
                plan = plan.without(obstacles)
                lacks = f"{', '.join(obstacles)} by Triton, not CUDA C++: {reason}"
                why += f"; {lacks}"
            return PlanChoice(rows, plan, source, why, file=where, lacks=lacks)
        if plain_won:  # of whole layers; with somebody else's attention it says little
            why = "whole layers were tuned for this batch, and plain ones were the fastest"
        else:
            found = (
                "no tuned plan serves this batch" if self._found else "no plan was tuned for these"
            )
            why = f"{found}; graphcap tune finds one"
        return PlanChoice(rows, self._by_rule(rows), "default", why)

    def _by_rule(self, rows: int) -> LayerPlan:
        plan = default_plan(rows)
        if (
            plan.block is not None
            and 2 * rows * self._sizes.top_k > plan.block * self._sizes.num_experts
        ):
            # Many experts would fill more than one short block, and be read again for each.
            plan = replace(plan, block=None)
        return plan

    def _without_cuda(self, plan: LayerPlan, rows: int) -> Mapping[str, str]:
        """What of `plan` cannot be made in CUDA C++ here, and why."""
        return expert_obstacles(self._sizes, self._dtype, self._device, rows, plan)

    def _measured(self, folder: Path) -> Iterator[tuple[str, str, PlanFile]]:
        """(source, what to call it, plans) for experts of these sizes, the cache before the tables."""
        device = torch.cuda.get_device_name(self._device)
        dtype = str(self._dtype).removeprefix("torch.")

        def for_these(file: PlanFile) -> bool:
            key = file.key
            return (key.device, key.dtype, key.experts) == (device, dtype, self._sizes)

        for path in files_of_plans(folder, file_name_start(device, dtype)):
            file = cached_plans(path, lambda file: "", for_these)
            if file is not None:
                yield "cache", str(path), file
        for name, table in tables():
            if for_these(table):
                other = "; ".join(differences(table.machine, table.kernels))
                yield "table", f"{name}{f' (made with {other})' if other else ''}", table
