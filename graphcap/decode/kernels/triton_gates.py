# mypy: allow-untyped-defs
"""Gates in Triton: the gated norm of a delta net, the gate of an attention's output, that of a shared
expert."""

import torch
import triton
import triton.language as tl

from graphcap.decode.kernels.triton_norm import heads_per_program, warps
from graphcap.operations import operation


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    x_row,
    x_head,
    gate_row,
    gate_head,
    out_row,
    out_head,
    eps,
    heads,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(1)
    head = (tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    d = tl.arange(0, BLOCK_D)
    mask = (head < heads) & (d < D)[None, :]
    dtype = out_ptr.dtype.element_ty
    x_at = x_ptr + row * x_row + head * x_head + d[None, :]
    gate_at = gate_ptr + row * gate_row + head * gate_head + d[None, :]
    x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
    value = (x * scale[:, None]).to(dtype).to(tl.float32) * weight[None, :]
    value = value.to(dtype).to(tl.float32) * (gate * _sigmoid(gate))
    tl.store(out_ptr + row * out_row + head * out_head + d[None, :], value.to(dtype), mask=mask)


@triton.jit
def _output_gate_kernel(
    x_ptr,
    gate_ptr,
    x_row,
    x_head,
    gate_row,
    gate_head,
    heads,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(1)
    head = (tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < heads) & (d < D)
    dtype = x_ptr.dtype.element_ty
    x_at = x_ptr + row * x_row + head * x_head + d
    x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row + head * gate_head + d, mask=mask, other=0.0)
    opened = _sigmoid(gate.to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(x_at, (x * opened).to(dtype), mask=mask)


@triton.jit
def _shared_gate_kernel(
    hidden_ptr, weight_ptr, x_ptr, hidden_row, x_row, H: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    h = tl.arange(0, BLOCK)
    dtype = x_ptr.dtype.element_ty
    hidden = tl.load(hidden_ptr + row * hidden_row + h, mask=h < H, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    x_at = x_ptr + row * x_row + h
    x = tl.load(x_at, mask=h < H, other=0.0).to(tl.float32)
    logit = tl.sum(hidden * weight, 0).to(dtype).to(tl.float32)
    opened = _sigmoid(logit).to(dtype).to(tl.float32)
    tl.store(x_at, (x * opened).to(dtype), mask=h < H)


@operation("gated_rms_norm", "triton: gated_rms_norm")
def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    """out (M, Gv, Dv) = x / sqrt(mean(x²) + eps) * weight (Dv,) * silu(gate (M, Gv, Dv)).

    `out` may be `x`; each may be a strided view with contiguous heads. Rounded to the model's dtype before
    the weight and after it, then gated in float32.
    """
    m, heads, d = x.shape
    block_d = triton.next_power_of_2(d)
    block_h = heads_per_program(heads, block_d)
    _gated_rms_norm_kernel[(triton.cdiv(heads, block_h), m)](
        x,
        gate,
        weight,
        out,
        x.stride(0),
        x.stride(1),
        gate.stride(0),
        gate.stride(1),
        out.stride(0),
        out.stride(1),
        eps,
        heads,
        D=d,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=warps(block_h * block_d),
    )


@operation("output gate", "triton: output_gate")
def output_gate(x: torch.Tensor, gate: torch.Tensor) -> None:
    """In place: x (M, Hq, D) *= sigmoid(gate (M, Hq, D)), rounded to the model's dtype; both may be
    strided views with contiguous heads."""
    m, heads, d = x.shape
    block_d = triton.next_power_of_2(d)
    block_h = heads_per_program(heads, block_d)
    _output_gate_kernel[(triton.cdiv(heads, block_h), m)](
        x,
        gate,
        x.stride(0),
        x.stride(1),
        gate.stride(0),
        gate.stride(1),
        heads,
        D=d,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=warps(block_h * block_d),
    )


@operation("shared expert gate", "triton: shared_gate")
def shared_gate(hidden: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> None:
    """In place: x (M, H) *= sigmoid(hidden (M, H) @ weight (1, H).T), the logit summed in float32, logit
    and gate rounded to the model's dtype. Rows are contiguous."""
    m, h = x.shape
    block = triton.next_power_of_2(h)
    _shared_gate_kernel[(m,)](
        hidden,
        weight,
        x,
        hidden.stride(0),
        x.stride(0),
        H=h,
        BLOCK=block,
        num_warps=warps(block),
    )
