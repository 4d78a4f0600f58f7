"""Kernels of hybrids in Triton: gated delta nets, gates, and norms that multiply by 1 + weight."""

from __future__ import annotations

from graphcap.decode.kernels.triton_delta import conv_update, delta_rule
from graphcap.decode.kernels.triton_gates import gated_rms_norm, output_gate, shared_gate
from graphcap.decode.kernels.triton_norm import (
    centred_fused_add_rms_norm as fused_add_rms_norm,
)
from graphcap.decode.kernels.triton_norm import centred_rms_norm as rms_norm

__all__ = [
    "conv_update",
    "delta_rule",
    "fused_add_rms_norm",
    "gated_rms_norm",
    "output_gate",
    "rms_norm",
    "shared_gate",
]
