"""Environment variables, read once into one frozen `Settings`."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphcap.errors import LadderError, SettingsError
from graphcap.explain import warn

logger = logging.getLogger(__name__)

RECORDERS = ("auto", "cuda", "tape")
_MOST_DIGITS = 18  # beyond it Python may refuse to convert, and no count is that large
SCHEDULES = ("auto", "plain")
KERNELS = ("auto", "triton", "vllm", "ixformer", "reference")


@dataclass(frozen=True)
class Settings:
    """What the user asked for. Each field is one environment variable (see `VARIABLES`).

    Attributes:
        enabled: the vLLM plugin is on.
        buckets: ``auto``, bucket sizes or ``plan:FILE``, as written.
        recorder: ``auto``, ``cuda`` or ``tape``.
        kernels: ``auto`` or the name of a kernel backend.
        verify: ``off`` or ``capture``.
        verify_every: N of ``GRAPHCAP_VERIFY=N``, 0 where no sampling was asked for.
        strict: every fallback is an error.
        pool_mib: the largest pool that may be planned, in MiB; None: no limit.
        report: where to write the capture report as JSON; None: nowhere.
        nvtx: mark the parts of MoE layers as NVTX ranges.
        tune_cache: the folder of plans that `graphcap tune` found; None: in the user's cache.
        schedule: ``auto``, or ``plain``: layers of decode steps, and experts in vLLM, run without plans.
    """

    enabled: bool = False
    buckets: str = "auto"
    recorder: str = "auto"
    kernels: str = "auto"
    verify: str = "capture"
    verify_every: int = 0
    strict: bool = False
    pool_mib: float | None = None
    report: Path | None = None
    nvtx: bool = False
    tune_cache: Path | None = None
    schedule: str = "auto"
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, accepted in (
            ("recorder", RECORDERS),
            ("kernels", KERNELS),
            ("schedule", SCHEDULES),
            ("verify", ("off", "capture")),
        ):
            if getattr(self, name) not in accepted:
                raise SettingsError(
                    f"Settings.{name}: expected one of {', '.join(accepted)}, "
                    f"found {getattr(self, name)!r}"
                )
        for name in ("enabled", "strict", "nvtx"):
            if not isinstance(getattr(self, name), bool):  # "0" would be true
                raise SettingsError(
                    f"Settings.{name}: expected True or False, found {getattr(self, name)!r}"
                )
        every = self.verify_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise SettingsError(
                f"Settings.verify_every: expected 0 (never) or more, found {self.verify_every!r}"
            )
        if self.pool_mib is not None and not 0 < self.pool_mib < float("inf"):
            raise SettingsError(
                f"Settings.pool_mib: expected a positive number of MiB or None, found {self.pool_mib!r}"
            )
        if self.report is not None and not isinstance(self.report, Path):
            raise SettingsError(
                f"Settings.report: expected a pathlib.Path or None, found {self.report!r}"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read every ``GRAPHCAP*`` variable.

        A name that starts with ``GRAPHCAP_`` and is none of ours is warned about, with the nearest
        name that is: a misspelt switch must not be ignored in silence.

        Raises:
            SettingsError: a value is not accepted; names variable, value and what is.
        """
        source = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for variable in VARIABLES:
            text = source.get(variable.name)
            origins[variable.name] = "default" if text is None else "environment"
            if text is not None:
                values.update(variable.parse(variable.name, text.strip()))
        for line in misspelt(source):
            warn(logger, "unknown-variable", "%s", line)
        return cls(**values, origins=origins)

    def value_of(self, name: str) -> str:
        """The value of variable `name` in the form in which a user would write it."""
        return {
            "GRAPHCAP": "1" if self.enabled else "0",
            "GRAPHCAP_BUCKETS": self.buckets,
            "GRAPHCAP_RECORDER": self.recorder,
            "GRAPHCAP_KERNELS": self.kernels,
            "GRAPHCAP_SCHEDULE": self.schedule,
            "GRAPHCAP_VERIFY": str(self.verify_every) if self.verify_every else self.verify,
            "GRAPHCAP_STRICT": "1" if self.strict else "0",
            "GRAPHCAP_POOL_MIB": "unset" if self.pool_mib is None else f"{self.pool_mib:g}",
            "GRAPHCAP_REPORT": "unset" if self.report is None else str(self.report),
            "GRAPHCAP_NVTX": "1" if self.nvtx else "0",
            "GRAPHCAP_TUNE_CACHE": "unset" if self.tune_cache is None else str(self.tune_cache),
        }[name]


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """A line for each name that starts with ``GRAPHCAP_`` and means nothing to graphcap."""
    known = [variable.name for variable in VARIABLES]
    lines = []
    for name in sorted(environ):
        if name.startswith("GRAPHCAP_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            lines.append(f"{name} is not a graphcap variable and has no effect{hint}")
    return lines


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, its meaning, and how its text becomes fields."""

    name: str
    meaning: str
    parse: Callable[[str, str], dict[str, Any]]


def _refuse(name: str, text: str, accepted: str) -> SettingsError:
    return SettingsError(f"{name}: expected {accepted}, found {text!r}; correct or unset it")


def _switch(field_name: str) -> Callable[[str, str], dict[str, Any]]:
    def parse(name: str, text: str) -> dict[str, Any]:
        if text not in ("0", "1"):
            raise _refuse(name, text, "0 or 1")
        return {field_name: text == "1"}

    return parse


def _choice(field_name: str, accepted: tuple[str, ...]) -> Callable[[str, str], dict[str, Any]]:
    def parse(name: str, text: str) -> dict[str, Any]:
        if text.lower() not in accepted:
            raise _refuse(name, text, "one of " + ", ".join(accepted))
        return {field_name: text.lower()}

    return parse


def _buckets(name: str, text: str) -> dict[str, Any]:
    from graphcap.buckets import BucketLadder
    from graphcap.plan_file import is_plan, read_plan

    if is_plan(text):
        try:
            read_plan(text)
        except LadderError as error:
            raise SettingsError(f"{name}: {error}") from error
        return {"buckets": text}
    try:
        # The maximum is not known yet; parsing against a huge one checks every entry.
        BucketLadder.parse(text, max_batch=1 if text.lower() == "auto" else 1 << 30)
    except LadderError as error:
        raise _refuse(
            name, text, "auto, or positive integers such as 1,2,4,8,64, or plan:FILE"
        ) from error
    return {"buckets": text}


def _verify(name: str, text: str) -> dict[str, Any]:
    if text.lower() in ("off", "capture"):
        return {"verify": text.lower()}
    if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) > 0:
        return {"verify": "capture", "verify_every": int(text)}
    raise _refuse(name, text, "off, capture, or a number N of at least 1 (check every N-th replay)")


def _pool_mib(name: str, text: str) -> dict[str, Any]:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise _refuse(name, text, "a positive number of MiB")
    return {"pool_mib": value}


def _report(name: str, text: str) -> dict[str, Any]:
    accepted = "the path of a file in an existing folder"
    try:
        path = Path(text).expanduser()
        usable = bool(text) and not path.is_dir() and path.absolute().parent.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # no such home, name too long
        raise _refuse(name, text, accepted) from error
    if not usable:
        raise _refuse(name, text, accepted)
    return {"report": path}


def _tune_cache(name: str, text: str) -> dict[str, Any]:
    accepted = "the path of a folder, which tuning makes where it is not there"
    try:
        path = Path(text).expanduser()
        usable = bool(text) and (path.is_dir() or not path.exists())
    except (OSError, RuntimeError, ValueError) as error:  # no such home, name too long
        raise _refuse(name, text, accepted) from error
    if not usable:
        raise _refuse(name, text, accepted)
    return {"tune_cache": path}


VARIABLES = (
    Variable("GRAPHCAP", "1 turns the vLLM plugin on", _switch("enabled")),
    Variable("GRAPHCAP_BUCKETS", "auto, sizes such as 1,2,4,8,64, or plan:FILE", _buckets),
    Variable("GRAPHCAP_RECORDER", "auto, cuda or tape", _choice("recorder", RECORDERS)),
    Variable("GRAPHCAP_KERNELS", "kernel backend", _choice("kernels", KERNELS)),
    Variable(
        "GRAPHCAP_SCHEDULE",
        "auto: layers, and experts in vLLM, run by tuned plans; plain: without",
        _choice("schedule", SCHEDULES),
    ),
    Variable("GRAPHCAP_VERIFY", "off, capture, or N: also check every N-th replay", _verify),
    Variable("GRAPHCAP_STRICT", "1 makes every fallback an error", _switch("strict")),
    Variable("GRAPHCAP_POOL_MIB", "refuse to plan a larger pool", _pool_mib),
    Variable("GRAPHCAP_REPORT", "write the capture report there as JSON", _report),
    Variable(
        "GRAPHCAP_NVTX", "1 marks router, top-k and fused MoE for a profiler", _switch("nvtx")
    ),
    Variable("GRAPHCAP_TUNE_CACHE", "the folder of plans that graphcap tune found", _tune_cache),
)
