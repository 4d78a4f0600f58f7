"""What a result file says of the machine that made it."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from graphcap import __version__


def machine(commit: str, **more: str | None) -> dict[str, Any]:
    """Card, driver and versions. Asks nvidia-smi, not torch: whoever only starts processes keeps no
    CUDA context of its own."""
    card, driver = _card()
    return {
        "card": card,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "graphcap": __version__,
        **more,
        "commit": commit,
    }


def _card() -> tuple[str | None, str | None]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None, None
    name, driver = told.splitlines()[0].split(",")
    return name.strip(), driver.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
