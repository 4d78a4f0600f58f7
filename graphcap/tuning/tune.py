"""Tunes the buckets of a model on the device at hand; what it finds goes into a file of plans."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphcap.decode.kernels import DecodeKernels
from graphcap.decode.layer_plan import LayerPlan, default_plan
from graphcap.decode.model_shape import ModelShape
from graphcap.decode.plan_files import PlanFile, TunedBucket, read_plans
from graphcap.decode.plan_key import PlanKey, differences, kernels_digest, versions_here
from graphcap.decode.weights import ModelWeights
from graphcap.errors import InputError
from graphcap.tuning.known import Known, no_plans
from graphcap.tuning.search import Show, best_of, search
from graphcap.tuning.space import knobs, starts
from graphcap.tuning.trials import Trials
from graphcap.tuning.tunable import check_tunable

TURNS = 9
"""Of the last measurement of a load, that of plain, default and the best found."""

Load = tuple[int, int]
"""Rows, context."""

Find = Callable[[Trials, float, Show], tuple[LayerPlan, float]]
"""Finds the best plan of trials before a deadline; see `search`."""


@dataclass
class Tuning:
    """What came of one load.

    Attributes:
        bucket: None: every plan failed, the plain schedule's included.
        candidates: all that was measured, in order: ``knob``, ``plan``, and ``ms`` or ``failed``.
    """

    rows: int
    context: int
    bucket: TunedBucket | None = None
    candidates: list[dict[str, Any]] = field(default_factory=list)


def tune(
    weights: ModelWeights,
    kernels: DecodeKernels,
    loads: Sequence[Load],
    seconds: float,
    show: Show = lambda row: None,
    find: Find = search,
    known: Known = no_plans,
) -> Iterator[Tuning]:
    """Tune load after load, within `seconds` together but for what each needs at least.

    Args:
        weights: of the layers that are measured, on the device.
        show: called with every candidate.
        known: plans that are starts beside those of every load; see `known_plans`.

    Raises:
        BackendError, InputError: see `check_tunable`.
    """
    check_tunable(weights.shape, weights.dtype, weights.device, kernels)
    deadline = time.monotonic() + seconds
    for index, load in enumerate(loads):
        now = time.monotonic()
        # What an easy load leaves goes to those that follow.
        until = now + (deadline - now) / (len(loads) - index)
        yield _tune_load(weights, kernels, load, until, show, find, known(*load))


def _tune_load(
    weights: ModelWeights,
    kernels: DecodeKernels,
    load: Load,
    until: float,
    show: Show,
    find: Find,
    known: tuple[LayerPlan, ...],
) -> Tuning:
    found = Tuning(*load)

    def note(row: dict[str, Any]) -> None:
        found.candidates.append(row)
        show(row)

    trials = Trials(weights, kernels, *load)
    trials.known = known
    tuned, _ms = find(trials, until, note)
    by_rule = default_plan(trials.rows)
    finalists = [LayerPlan("plain")]
    finalists += [plan for plan in (by_rule, tuned) if plan.layers != "plain"]
    best = best_of(trials, list(_unique(finalists)), note, turns=TURNS)
    if best is not None:
        last = [row for row in found.candidates if row["knob"] == "final"]

        def ms_of(plan: LayerPlan) -> float | None:
            return next((row.get("ms") for row in last if row["plan"] == plan), None)

        found.bucket = TunedBucket(
            *load,
            *best,
            plain_ms=ms_of(LayerPlan("plain")),
            default_ms=ms_of(by_rule),
            layers=weights.shape.num_layers,
            tried=len(found.candidates),
        )
    return found


def _unique(plans: Sequence[LayerPlan]) -> Iterator[LayerPlan]:
    for index, plan in enumerate(plans):
        if plan not in plans[:index]:
            yield plan


def plan_file(
    path: Path, shape: ModelShape, dtype: torch.dtype, device: torch.device, commit: str | None
) -> PlanFile:
    """What `path` holds for this device and these kernels, or a file of plans without buckets."""
    key = PlanKey.of(shape, dtype, torch.cuda.get_device_name(device))
    machine: dict[str, Any] = {"driver": _driver(), **versions_here()}
    if commit is not None:
        machine["commit"] = commit
    fresh = PlanFile(key, shape.name, kernels_digest(), machine, ())
    try:
        there = read_plans(path)
    except InputError:  # none, or none that can be used: it is written anew
        return fresh
    if there.key != key or differences(there.machine, there.kernels):
        return fresh
    return fresh.with_buckets(there.buckets)


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = told.stdout.split()
    return lines[0] if lines else None


# -- what would be tried -------------------------------------------------------------------------

SECONDS_A_PLAN = 0.3
"""Host work of a trial: an eager step and a capture of twelve layers (H200: 0.3 to 0.4 s)."""

READ_BYTES_A_SECOND = 2e12
"""For the estimate alone, which is made without a device."""


@dataclass(frozen=True)
class Forecast:
    """Without a device: no kernels in CUDA C++, which depend on it, no plans known from before, one round.

    Attributes:
    knobs: (schedule, name of the knob, changes that would be tried).
    plans: that would be measured.
    seconds: an estimate, compiling left out.
    """

    rows: int
    context: int
    knobs: tuple[tuple[str, str, int], ...]
    plans: int
    seconds: float


def forecast(shape: ModelShape, dtype: torch.dtype, rows: int, context: int) -> Forecast:
    """What tuning a load of `shape`, of the layers that would be measured, would try."""
    by_schedule: dict[str, list[tuple[str, str, int]]] = {}
    for start in starts(rows):
        tried = [(start.layers, n, len(c)) for n, c in knobs(start, shape, rows, context)]
        by_schedule.setdefault(start.layers, tried)
    found = [knob for tried in by_schedule.values() for knob in tried]
    plans = 1 + len(starts(rows)) + sum(count for *_, count in found) + 3
    replays = 6 * 8  # see `median_ms`
    step = shape.bytes_read_per_step(dtype, rows) / READ_BYTES_A_SECOND
    return Forecast(rows, context, tuple(found), plans, plans * (SECONDS_A_PLAN + replays * step))
