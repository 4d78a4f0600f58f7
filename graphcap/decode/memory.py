"""Does a model fit on a device? Asked before the first allocation, so that the answer names a cure."""

from __future__ import annotations

from pathlib import Path

import torch

from graphcap.decode.shapes import DTYPES, ModelShape
from graphcap.errors import BackendError, CheckpointError

_GIB = 1 << 30
_MEMINFO = Path("/proc/meminfo")


def as_device(device: torch.device | str) -> torch.device:
    """`device` as a torch.device that this machine has.

    Raises:
        BackendError: the name means nothing to torch, or there is no such device here.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise BackendError(
            f"device {str(device)!r}: expected a name such as 'cuda', 'cuda:1' or 'cpu'."
            " Correct the name."
        ) from error
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise BackendError(
                f"device '{found}': expected a CUDA device of this machine, found {count} of them."
                " Use device 'cpu', or install a torch built for the card and check its driver."
            )
    return found


def meminfo_available(path: Path = _MEMINFO) -> int | None:
    """Bytes that Linux says can be taken without swapping (`MemAvailable`); None if it does not say."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on `device`; None where that is not known (meta, other systems)."""
    if device.type == "cpu":
        return meminfo_available()
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch's allocator holds without using it is ours as well.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + held)
    return None


def ensure_fits(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> None:
    """Return if all weights of `shape` in `dtype` fit on `device`, or if that cannot be known.

    Raises:
        CheckpointError: names the GiB needed and available, and what would fit.
    """
    available = available_bytes(device)
    needed = shape.weight_bytes(dtype)
    if available is None or needed <= available:
        return
    cures = []
    # Weights grow with every layer, so the largest number that fits can be bisected.
    low, high = 0, shape.num_layers - 1
    while low < high:
        middle = (low + high + 1) // 2
        fits = shape.with_layers(middle).weight_bytes(dtype) <= available
        low, high = (middle, high) if fits else (low, middle - 1)
    if low and shape.with_layers(low).weight_bytes(dtype) <= available:
        cures.append(f"take at most {low} of the {shape.num_layers} layers (--layers {low})")
    for name, other in DTYPES.items():
        if other.itemsize < dtype.itemsize and shape.weight_bytes(other) <= available:
            cures.append(f"use dtype {name}")
    cures.append("use a device with more memory" if cures else "only more memory helps")
    raise CheckpointError(
        f"the weights of '{shape.name}' do not fit on {device}: {needed / _GIB:.2f} GiB needed in"
        f" {str(dtype).removeprefix('torch.')}, {available / _GIB:.2f} GiB available."
        f" Cure: {', or '.join(cures)}."
    )
