"""The scripts of bench/, which is no package and not installed, as modules."""

import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

if not (hasattr(torch.nn.functional, "rms_norm") and hasattr(torch, "_grouped_mm")):
    pytest.skip("bench/plain_torch.py needs a newer torch", allow_module_level=True)

import plain_torch  # noqa: E402

__all__ = ["BENCH", "plain_torch"]
