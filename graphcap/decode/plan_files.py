"""Files of measured layer plans: the cache that `graphcap tune` writes, and the packaged tables.

Both have one format, JSON of a `PlanFile`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.plan_json import plan_from_json, plan_to_json
from graphcap.decode.plan_key import DIMENSIONS, PlanKey
from graphcap.errors import InputError
from graphcap.report import write_json

FORMAT = "graphcap plans 1"

_TOO_LARGE = 2**31  # no count of rows or tokens, and no time of a step in ms, is

_LARGEST_FILE = 2**24
"""Bytes; a plan is about one thousand."""

TABLES = Path(__file__).resolve().parent.parent / "tuning" / "tables"
"""Tables that come with graphcap, one for each device and shape."""


@dataclass(frozen=True)
class TunedBucket:
    """The fastest plan found for a load. Times are milliseconds of a step of `layers` layers.

    Attributes:
        rows, context: the load: so many sequences, each of so many tokens.
        plain_ms, default_ms: of the plain schedule and of the plan by rule in the same run.
        tried: plans that were measured.
    """

    rows: int
    context: int
    plan: LayerPlan
    ms: float
    plain_ms: float | None = None
    default_ms: float | None = None
    layers: int | None = None
    tried: int | None = None


@dataclass(frozen=True)
class PlanFile:
    """Attributes:
    shape: the name of the model that was measured, for people.
    kernels: see `kernels_digest`.
    machine: driver and versions, see `versions_here`; whatever else the maker knew.
    buckets: by rows, then context.
    """

    key: PlanKey
    shape: str
    kernels: str
    machine: Mapping[str, Any]
    buckets: tuple[TunedBucket, ...]

    def with_buckets(self, more: Iterable[TunedBucket]) -> PlanFile:
        """The same with `more`, which take the place of those of the same load."""
        found = {(bucket.rows, bucket.context): bucket for bucket in (*self.buckets, *more)}
        return replace(self, buckets=tuple(found[load] for load in sorted(found)))

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "device": self.key.device,
            "dtype": self.key.dtype,
            "shape": self.shape,
            "sizes": dict(self.key.sizes),
            "kernels": self.kernels,
            "machine": dict(self.machine),
            "buckets": [
                {
                    **{
                        name: value
                        for name, value in vars(bucket).items()
                        if name != "plan" and value is not None
                    },
                    "plan": plan_to_json(bucket.plan),
                }
                for bucket in self.buckets
            ],
        }

    @classmethod
    def from_json(cls, found: Any) -> PlanFile:
        """What `to_json` made.

        Raises:
            InputError: it is none; says what was expected and found.
        """
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            form = found.get("format") if isinstance(found, dict) else type(found).__name__
            raise InputError(f"file of plans: expected format {FORMAT!r}, found {form!r}")
        try:
            sizes = tuple((name, int(found["sizes"][name])) for name in DIMENSIONS)
            key = PlanKey(str(found["device"]), sizes, str(found["dtype"]))
            buckets = [
                TunedBucket(**{**bucket, "plan": plan_from_json(bucket["plan"])})
                for bucket in found["buckets"]
            ]
            for bucket in buckets:
                _check(bucket)
            made = cls(key, str(found["shape"]), str(found["kernels"]), dict(found["machine"]), ())
            return made.with_buckets(buckets)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(
                f"file of plans: expected what graphcap tune writes: {type(error).__name__}: {error}"
            ) from error

    def write(self, path: Path) -> None:
        """Whole or not at all; makes the folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.to_json())


def _check(bucket: TunedBucket) -> None:
    counts = (bucket.rows, bucket.context)
    times = [time for time in (bucket.ms, bucket.plain_ms, bucket.default_ms) if time is not None]
    if not all(type(count) is int and 0 < count < _TOO_LARGE for count in counts):
        rows, context = (repr(count)[:40] for count in counts)
        raise ValueError(f"a bucket of {rows} rows at context {context}")
    if bucket.ms is None:
        raise ValueError("a bucket that takes None ms")
    for time in times:
        if type(time) not in (int, float) or not 0 < time < _TOO_LARGE:
            raise ValueError(f"a bucket that takes {repr(time)[:40]} ms")


def read_plans(path: Path) -> PlanFile:
    """Raises:
    InputError: there is no such file, it cannot be read, or is no file of plans.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for whoever writes into it
            raise InputError("file of plans: expected a file, found a folder, a pipe or a device")
        if found.st_size > _LARGEST_FILE:
            raise InputError(
                f"file of plans: expected at most {_LARGEST_FILE} bytes, found {found.st_size}"
            )
        return PlanFile.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"file of plans: {type(error).__name__}: {error}") from error


@cache
def tables() -> tuple[tuple[str, PlanFile], ...]:
    """File name and contents of every packaged table."""
    return tuple((path.name, read_plans(path)) for path in sorted(TABLES.glob("*.json")))


def cache_folder(given: Path | None = None) -> Path:
    """Where tuned plans are kept: `given`, or ``GRAPHCAP_TUNE_CACHE``, or ``graphcap/tune`` in
    ``XDG_CACHE_HOME``, which is ``~/.cache`` unless it says otherwise."""
    if given is not None:
        return given
    chosen = os.environ.get("GRAPHCAP_TUNE_CACHE", "").strip()
    if chosen:
        return Path(os.path.expanduser(chosen))  # as it is, where there is no such user
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path there is to be ignored: XDG Base Directory Specification.
    folder = Path(base) if base.startswith("/") else Path(os.path.expanduser("~")) / ".cache"
    return folder / "graphcap" / "tune"
