"""graphcap: one CUDA graph launch per decode step. Importing it does not import torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphcap.buckets import BucketLadder
    from graphcap.census import Census
    from graphcap.errors import GraphcapError
    from graphcap.inputs import PadPolicy, Slot, StaticInputs
    from graphcap.manager import CaptureManager
    from graphcap.pool import BufferPool
    from graphcap.ring import Ring, Stop
    from graphcap.settings import Settings

__version__ = "0.1.0"

_HOMES = {
    "BucketLadder": "graphcap.buckets",
    "BufferPool": "graphcap.pool",
    "CaptureManager": "graphcap.manager",
    "Census": "graphcap.census",
    "GraphcapError": "graphcap.errors",
    "PadPolicy": "graphcap.inputs",
    "Ring": "graphcap.ring",
    "Settings": "graphcap.settings",
    "Slot": "graphcap.inputs",
    "StaticInputs": "graphcap.inputs",
    "Stop": "graphcap.ring",
}

__all__ = [
    "BucketLadder",
    "BufferPool",
    "CaptureManager",
    "Census",
    "GraphcapError",
    "PadPolicy",
    "Ring",
    "Settings",
    "Slot",
    "StaticInputs",
    "Stop",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'graphcap' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
