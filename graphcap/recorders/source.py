"""Where in the user's code something happened, for error messages."""

from __future__ import annotations

import contextlib
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType

import torch

_PACKAGE = Path(__file__).resolve().parent.parent
_TRITON = find_spec("triton")
_MACHINERY = (
    str(Path(torch.__file__).resolve().parent),
    str(_PACKAGE / "recorders"),
    str(_PACKAGE / "operations.py"),
    str(_PACKAGE / "manager.py"),
    str(_PACKAGE / "serving.py"),
    str(_PACKAGE / "life.py"),
    str(_PACKAGE / "many.py"),
    str(_PACKAGE / "ring"),
    str(_PACKAGE / "inputs.py"),
    str(_PACKAGE / "pool.py"),
    contextlib.__file__,
    *(_TRITON.submodule_search_locations or () if _TRITON else ()),
)


def calling_line() -> str:
    """``file:line (function)`` of the innermost frame that is the step's own code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "unknown line"


def raising_line(trace: TracebackType | None) -> str:
    """``file:line (function)`` of the innermost frame of the step's own code in a traceback."""
    found = "unknown line"
    for entry in traceback.extract_tb(trace):
        if _is_users(entry.filename):
            found = f"{entry.filename}:{entry.lineno} ({entry.name})"
    return found


def _is_users(filename: str) -> bool:
    return not filename.startswith(_MACHINERY) and not filename.startswith("<frozen")
