"""Where in the user's code something happened: the innermost and the outermost line of the step."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from graphcap.recorders.source import is_users

Step = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]

_POOL = str(Path(__file__).resolve().parent.parent / "pool.py")
_LIBRARY = sysconfig.get_paths()["stdlib"]
_INSTALLED = ("site-packages", "dist-packages")  # may lie below the standard library


@dataclass(frozen=True, order=True)
class Place:
    """One line of the user's code."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Site:
    """Where an operation was called from.

    Attributes:
        place: the innermost line of the step's own code; None: none was found.
        via: the outermost one.
        in_pool: a `BufferPool` asked, for a buffer of the step.
    """

    place: Place | None
    via: Place | None
    in_pool: bool = False


def is_step_code(filename: str) -> bool:
    """Whether a file holds code of the step: not torch's, graphcap's machinery or Python's own."""
    if not is_users(filename) or filename.startswith("<string>"):
        return False
    own = filename.startswith(_LIBRARY) and not any(part in filename for part in _INSTALLED)
    return not own


def site_here() -> Site:
    """The site of the call that is running, up to where lint called the step."""
    frame: FrameType | None = sys._getframe(1)
    place = via = None
    in_pool = False
    while frame is not None:
        filename = frame.f_code.co_filename
        if frame.f_code is call_step.__code__:
            break
        if is_step_code(filename):
            via = Place(filename, frame.f_lineno, frame.f_code.co_name)
            place = place or via
        elif place is None and filename == _POOL and frame.f_code.co_name == "take":
            in_pool = True
        frame = frame.f_back
    return Site(place, via, in_pool)


def call_step(step: Step, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Calls the step: what lies outside this frame is no code of the step."""
    return step(inputs)


def place_in(message: str) -> Place | None:
    """The place that a message of a recorder names."""
    found = re.search(r"(?:at|by) (\S+):(\d+) \(([^)]*)\)", message)
    return Place(found[1], int(found[2]), found[3]) if found else None
