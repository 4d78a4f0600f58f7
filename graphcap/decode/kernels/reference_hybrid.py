"""Kernels of hybrids besides the gated delta net, in plain torch: the oracle, and what CPUs run.

They round where transformers' Qwen3-Next rounds. Nothing allocates and nothing synchronises.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphcap.decode.kernels.reference_delta import conv_update, delta_rule
from graphcap.moe.kernels.constants import constant
from graphcap.operations import BufferSpec, operation

__all__ = [
    "conv_update",
    "delta_rule",
    "fused_add_rms_norm",
    "gated_rms_norm",
    "output_gate",
    "rms_norm",
    "shared_gate",
]


def _norm_scratch(x: torch.Tensor, *_: object) -> Mapping[str, BufferSpec]:
    shape = tuple(x.shape)
    return {
        "wide": (shape, torch.float32),
        "square": (shape, torch.float32),
        "scale": ((*shape[:-1], 1), torch.float32),
    }


def _scaled(
    x: torch.Tensor, eps: float, wide: torch.Tensor, square: torch.Tensor, scale: torch.Tensor
) -> None:
    """wide = x / sqrt(mean(x²) + eps) over the last dimension."""
    wide.copy_(x)
    torch.mul(wide, wide, out=square)
    torch.sum(square, -1, keepdim=True, out=scale)
    width = constant(x.shape[-1], x.device, torch.float32)
    torch.addcdiv(constant(eps, x.device, torch.float32), scale, width, out=scale)
    scale.rsqrt_()
    wide.mul_(scale)


def _centred_scratch(x: torch.Tensor, *_: object) -> Mapping[str, BufferSpec]:
    return {**_norm_scratch(x), "factor": ((x.shape[-1],), torch.float32)}


def _normalise(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    factor: torch.Tensor,
    wide: torch.Tensor,
    square: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    _scaled(x, eps, wide, square, scale)
    factor.copy_(weight)
    factor.add_(constant(1, x.device, torch.float32))
    wide.mul_(factor)
    out.copy_(wide)


@operation("rms_norm", scratch=_centred_scratch)
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    **scratch: torch.Tensor,
) -> None:
    """out = x / sqrt(mean(x²) + eps) * (1 + weight) over the last dimension, rounded once. `out` may
    be `x`."""
    _normalise(x, weight, out, eps, **scratch)


@operation("fused_add_rms_norm", scratch=_centred_scratch)
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    **scratch: torch.Tensor,
) -> None:
    """In place: residual (M, H) += x; x (M, H) = residual / sqrt(mean(residual²) + eps) * (1 + weight)."""
    residual.add_(x)
    _normalise(residual, weight, x, eps, **scratch)


def _gated_scratch(x: torch.Tensor, *_: object) -> Mapping[str, BufferSpec]:
    return {**_norm_scratch(x), "opened": (tuple(x.shape), torch.float32)}


@operation("gated_rms_norm", scratch=_gated_scratch)
def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    *,
    opened: torch.Tensor,
    wide: torch.Tensor,
    square: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    """out (M, Gv, Dv) = x / sqrt(mean(x²) + eps) * weight (Dv,) * silu(gate (M, Gv, Dv)); `out` may be
    `x`, `gate` a view.

    Rounded to the model's dtype before the weight and after it, then gated in float32.
    """
    _scaled(x, eps, wide, square, scale)
    out.copy_(wide)
    out.mul_(weight)
    wide.copy_(gate)
    torch.sigmoid(wide, out=opened)
    opened.mul_(wide)
    wide.copy_(out)
    wide.mul_(opened)
    out.copy_(wide)


def _gate_scratch(x: torch.Tensor, gate: torch.Tensor) -> Mapping[str, BufferSpec]:
    return {"opened": (tuple(x.shape), x.dtype)}


@operation("output gate", scratch=_gate_scratch)
def output_gate(x: torch.Tensor, gate: torch.Tensor, *, opened: torch.Tensor) -> None:
    """In place: x (M, Hq, D) *= sigmoid(gate (M, Hq, D)), a view of the fused projection."""
    torch.sigmoid(gate, out=opened)
    x.mul_(opened)


def _shared_scratch(
    hidden: torch.Tensor, weight: torch.Tensor, x: torch.Tensor
) -> Mapping[str, BufferSpec]:
    return {"logit": ((hidden.shape[0], 1), hidden.dtype)}


@operation("shared expert gate", scratch=_shared_scratch)
def shared_gate(
    hidden: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, *, logit: torch.Tensor
) -> None:
    """In place: x (M, H) *= sigmoid(hidden (M, H) @ weight (1, H).T), the logit and the gate rounded to
    the model's dtype."""
    torch.mm(hidden, weight.t(), out=logit)
    torch.sigmoid(logit, out=logit)
    x.mul_(logit)
