"""By which plan the layers of each bucket run, and why: asked for, tuned here, of a table, or by rule.

Decided when a step is built or first meets a bucket, from files alone: nothing is measured here, so
nothing can be tuned inside a capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from graphcap.decode.cache import PagedCache
from graphcap.decode.cache_format import CacheFormat
from graphcap.decode.cuda_kernels import cuda_obstacles
from graphcap.decode.kernels import DecodeKernels
from graphcap.decode.layer_plan import LayerPlan, default_plan
from graphcap.decode.model_shape import ModelShape
from graphcap.decode.plan_files import PlanFile, TunedBucket, cache_folder, read_plans, tables
from graphcap.decode.plan_key import PlanKey, differences
from graphcap.decode.weights import ModelWeights
from graphcap.errors import InputError
from graphcap.explain import warn

logger = logging.getLogger(__name__)

SCHEDULES = ("auto", "fused", "plain")

Plans = Callable[[int], LayerPlan]
"""The plan of a bucket of so many rows."""

LONGEST_ROW = 8192
"""Values of a weight row that a program of the fused schedule holds in registers at the most."""

LARGEST_HEAD = 256
"""The largest head dimension that fused attention was measured with."""

CONTEXT_RATIO = 2
"""A tile of attention serves contexts up to so many times as long or as short as the one it was
tuned for: it says into how many splits a sequence is divided."""

_told: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class PlanChoice:
    """How the layers of a bucket run.

    Attributes:
        source: "asked for", "cache" (tuned on this machine), "table" (packaged), "default" (by rule) or
            "not supported".
        why: what the source says.
    """

    rows: int
    plan: LayerPlan
    source: str
    why: str

    def __str__(self) -> str:
        return f"{self.plan.layers} ({self.source}: {self.why})"


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
    if device.type != "cuda":
        return f"the device is {device.type}, and the fused schedule is made for CUDA"
    if torch.version.cuda is None or "corex" in torch.__version__:
        return "the device is none of NVIDIA's, and nothing was measured on it"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the compute capability is below 8.0, and nothing was measured there"
    if dtype.itemsize != 2:
        return f"weights are {str(dtype).removeprefix('torch.')}, and tiles are for 16 bits"
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

    @property
    def may_fuse(self) -> bool:
        """Whether a bucket can run by another schedule than the plain one."""
        if self.name == "auto":
            return self._obstacle is None and (bool(self._found) or self._against is None)
        return self.name == "fused"

    def choice(self, rows: int) -> PlanChoice:
        """How a bucket of `rows` runs; the same at every call."""
        if rows not in self._choices:
            self._choices[rows] = self._choose(rows)
        return self._choices[rows]

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
            return PlanChoice(rows, LayerPlan("plain"), "not supported", self._obstacle)
        for source, where, file in self._found:
            tuned = nearest(file.buckets, rows, self._capacity)
            if tuned is not None:
                plan, why = fitted(tuned, rows, self._capacity)
                obstacles = self._without_cuda(plan, rows)
                if obstacles:
                    reason = next(iter(obstacles.values()))
                    why += f"; {', '.join(obstacles)} by Triton, not CUDA C++: {reason}"
                    plan = plan.without(obstacles)
                return PlanChoice(rows, plan, source, f"{where}: {why}")
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
    file = _cached(key, path)
    if file is not None:
        found.append(("cache", str(path), file))
    for name, table in tables():
        if table.key == key:
            other = "; ".join(differences(table.machine, table.kernels))
            found.append(("table", f"{name}{f' (made with {other})' if other else ''}", table))
    return found


def _cached(key: PlanKey, path: Path) -> PlanFile | None:
    """The plans in `path`; None where there are none that can be used, for which it warns once."""
    try:
        if not path.exists():
            return None
        file = read_plans(path)
        problem = ""
        if file.key != key:
            problem = f"expected plans for {key}, found plans for {file.key}"
        elif stale := differences(file.machine, file.kernels):
            problem = f"it was made with {'; '.join(stale)}"
    except (InputError, OSError) as error:
        problem = error.args[0] if isinstance(error, InputError) else str(error)
    if not problem:
        return file
    if (str(path), problem) not in _told:
        _told.add((str(path), problem))
        warn(
            logger,
            "tune-cache",
            "tuned plans are not used, buckets run by table or default: %s: %s",
            path,
            problem,
        )
    return None


def nearest(buckets: Iterable[TunedBucket], rows: int, capacity: int) -> TunedBucket | None:
    """Whose plan serves `rows` rows and sequences of up to `capacity` tokens; None: nobody's.

    The smallest tuned size that is at least `rows` and less than twice as many, as a batch runs in the
    smallest bucket that holds it; of its contexts the one that is nearest to `capacity` by ratio.
    """
    fitting = [bucket for bucket in buckets if rows <= bucket.rows < 2 * rows]
    if not fitting:
        return None
    size = min(bucket.rows for bucket in fitting)
    return min(
        (bucket for bucket in fitting if bucket.rows == size),
        key=lambda bucket: max(bucket.context, capacity) / min(bucket.context, capacity),
    )


def fitted(tuned: TunedBucket, rows: int, capacity: int) -> tuple[LayerPlan, str]:
    """The plan for such rows and sequences, and what to say of it."""
    plan = tuned.plan
    why = f"tuned for {tuned.rows} rows at context {tuned.context}"
    ratio = max(tuned.context, capacity) / min(tuned.context, capacity)
    if "attend" in plan.tiles and ratio > CONTEXT_RATIO:
        plan = plan.without(["attend"])
        why += f"; attention by its own tile, as sequences may have {capacity} tokens"
    return plan, why
