"""What a process and its device hold, and by how much that has grown."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Memory:
    """What is held once every request has left; bytes. `allocated` and `reserved`: of the device."""

    tensors: int
    resident: int
    allocated: int
    reserved: int


def read_memory(device: torch.device) -> Memory:
    """After a garbage collection, and with torch's cache given back."""
    gc.collect()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    return Memory(
        tensors=sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()),
        resident=_resident_bytes(),
        allocated=torch.cuda.memory_allocated(device) if cuda else 0,
        reserved=torch.cuda.memory_reserved(device) if cuda else 0,
    )


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def grown(legs: list[Memory]) -> dict[str, int]:
    """By how much each kind of memory is more after the last leg than after the first, in its unit."""
    first, last = asdict(legs[0]), asdict(legs[-1])
    return {name: last[name] - first[name] for name in first}
