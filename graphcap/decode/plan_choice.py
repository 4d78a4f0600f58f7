"""What a bucket runs by, and what it is chosen from: plans in the cache of this machine, tables, a rule."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.plan_files import PlanFile, TunedBucket, read_plans
from graphcap.decode.plan_key import differences
from graphcap.errors import InputError
from graphcap.explain import warn

logger = logging.getLogger(__name__)

_told: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class PlanChoice:
    """How the layers of a bucket run.

    Attributes:
        source: "asked for", "cache" (tuned on this machine), "table" (packaged), "default" (by rule),
            "not supported", or "failed" (of a plan from one of these, which could not run).
        why: what the source says.
        experts: how the routed experts of a plain bucket run, where they have a plan of their own (see
            `ExpertPlans`).
        file: where a measured plan was read; part of `why`.
        lacks: what of the plan cannot be had here; part of `why`.
    """

    rows: int
    plan: LayerPlan
    source: str
    why: str
    experts: PlanChoice | None = None
    file: str = ""
    lacks: str = ""

    def failed(self, why: str) -> PlanChoice:
        """What is left of it where its plan cannot run."""
        told = f"{self.source} plan ({self.why}): {why}"
        return PlanChoice(self.rows, LayerPlan("plain"), "failed", told, file=self.file)

    def __str__(self) -> str:
        own = f"{self.plan.layers} ({self.source}: {self.why})"
        return own if self.experts is None else f"{own}, its experts {self.experts}"


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


def device_obstacle(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why tiles that were chosen by rule are not taken for `dtype` on `device`; None: they are."""
    if device.type != "cuda":
        return f"the device is {device.type}, and tiles are chosen for CUDA"
    if torch.version.cuda is None or "corex" in torch.__version__:
        return "the device is none of NVIDIA's, and nothing was measured on it"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the compute capability is below 8.0, and nothing was measured there"
    if dtype.itemsize != 2:
        return f"weights are {str(dtype).removeprefix('torch.')}, and tiles are for 16 bits"
    return None


def cached_plans(
    path: Path,
    misfit: Callable[[PlanFile], str],
    wanted: Callable[[PlanFile], bool] = lambda file: True,
) -> PlanFile | None:
    """The plans in `path`; None where there are none that can be used, for which it warns once.

    Args:
        misfit: why plans are of no use here though they are in order; empty where they are.
        wanted: whether plans are for what is asked for; those that are not are passed over in silence.
    """
    if is_missing(path):
        return None
    try:
        file = read_plans(path)
        if not wanted(file):
            return None
        problem = misfit(file)
        if not problem and (stale := differences(file.machine, file.kernels)):
            problem = f"it was made with {'; '.join(stale)}"
    except InputError as error:
        if is_missing(path):  # since then
            return None
        problem = error.args[0]
    if not problem:
        return file
    _tell(path, problem)
    return None


def files_of_plans(folder: Path, start: str) -> list[Path]:
    """The JSON files in `folder` whose names begin with `start`; none where it cannot be looked into, for
    which it warns once."""
    if is_missing(folder):
        return []
    try:
        return sorted(
            folder / name
            for name in os.listdir(folder)
            if name.startswith(start) and name.endswith(".json")
        )
    except OSError as error:
        _tell(folder, f"folder of plans: {type(error).__name__}: {error}")
        return []


def is_missing(path: Path) -> bool:
    """Whether nothing is there; what cannot be asked about, a loop of links too, is."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def _tell(path: Path, problem: str) -> None:
    if (str(path), problem) in _told:
        return
    _told.add((str(path), problem))
    warn(
        logger,
        "tune-cache",
        "tuned plans are not used, buckets run by table or default: %s: %s",
        path,
        problem,
    )
