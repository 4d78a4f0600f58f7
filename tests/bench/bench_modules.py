"""The scripts of bench/ that need a newer torch than graphcap does; elsewhere their tests are skipped."""

import pytest
import torch

if not (hasattr(torch.nn.functional, "rms_norm") and hasattr(torch, "_grouped_mm")):
    pytest.skip("bench/plain_torch.py needs a newer torch", allow_module_level=True)

import attention
import attention_load
import attention_timing
import attention_vllm
import attention_ways
import plain_torch
import speed
import speed_bytes
import speed_check
import speed_many
import speed_ways

__all__ = [
    "attention",
    "attention_load",
    "attention_timing",
    "attention_vllm",
    "attention_ways",
    "plain_torch",
    "speed",
    "speed_bytes",
    "speed_check",
    "speed_many",
    "speed_ways",
]
