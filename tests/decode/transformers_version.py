"""Where transformers 4.51, the newest that torch 2.1 takes, differs from the 5 that the tests expect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers

IS_5 = int(transformers.__version__.split(".")[0]) >= 5

needs_5 = pytest.mark.skipif(
    not IS_5, reason=f"needs the modules of transformers 5, found {transformers.__version__}"
)

AS_SAVED: dict[str, Any] = {} if IS_5 else {"torch_dtype": "auto"}
"""The arguments of from_pretrained that keep the dtype of a checkpoint."""


def rope(theta: float) -> dict[str, Any]:
    """The arguments of Qwen3MoeConfig for default RoPE."""
    if IS_5:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return {"rope_theta": theta}


def dtype_named(name: str) -> dict[str, Any]:
    """The argument of Qwen3MoeConfig for the dtype of the weights."""
    return {"dtype" if IS_5 else "torch_dtype": name}


def down_projections(experts: torch.nn.Module) -> Iterable[torch.Tensor]:
    """The weight (H, I) of each expert."""
    return experts.down_proj if IS_5 else (expert.down_proj.weight for expert in experts)
