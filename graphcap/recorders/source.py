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
    str(_PACKAGE / "lint"),
    str(_PACKAGE / "operations.py"),
    str(_PACKAGE / "manager.py"),
    str(_PACKAGE / "serving.py"),
    str(_PACKAGE / "life.py"),
    str(_PACKAGE / "many.py"),
    str(_PACKAGE / "capturing.py"),
    str(_PACKAGE / "phases.py"),
    str(_PACKAGE / "fingerprint.py"),
    str(_PACKAGE / "comparing.py"),
    str(_PACKAGE / "narrowing.py"),
    str(_PACKAGE / "verify"),
    str(_PACKAGE / "ring"),
    str(_PACKAGE / "inputs.py"),
    str(_PACKAGE / "batch_check.py"),
    str(_PACKAGE / "pool.py"),
    contextlib.__file__,
    *(_TRITON.submodule_search_locations or () if _TRITON else ()),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that host or device memory is out. On the host torch raises a RuntimeError."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "not enough memory" in text
    )


def calling_line() -> str:
    """``file:line (function)`` of the innermost frame that is the step's own code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "unknown line"


def raising_line(trace: TracebackType | None) -> str:
    """``file:line (function)`` of the innermost frame of the step's own code in a traceback."""
    found = "unknown line"
    for entry in traceback.extract_tb(trace):
        if is_users(entry.filename):
            found = f"{entry.filename}:{entry.lineno} ({entry.name})"
    return found


def is_users(filename: str) -> bool:
    """Whether a file holds code of a step, not the machinery that runs it."""
    return not filename.startswith(_MACHINERY) and not filename.startswith("<frozen")
