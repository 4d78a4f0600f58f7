# mypy: allow-untyped-defs
"""RMS norms in Triton: of whole rows, of every head of a fused buffer, and after a residual add."""

import torch
import triton
import triton.language as tl

from graphcap.moe.kernels.triton_pdl import let_next_start, pdl_options, wait_for_previous
from graphcap.operations import operation


@triton.jit
def _normalized(x, weight, eps, D: tl.constexpr, dtype: tl.constexpr, ADD_ONE: tl.constexpr):
    """RMS norm of the rows of x (rows, D) float32; rounded to the model's dtype before the weight, or
    times 1 + weight without that."""
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
    if ADD_ONE:
        return x * scale[:, None] * (1.0 + weight.to(tl.float32))[None, :]
    return (x * scale[:, None]).to(dtype).to(tl.float32) * weight.to(tl.float32)[None, :]


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_row,
    x_head,
    out_row,
    out_head,
    eps,
    heads,
    ADD_ONE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(1)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    mask = (head < heads)[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + row * x_row + head[:, None] * x_head + d[None, :], mask=mask, other=0.0)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0)
    value = _normalized(x.to(tl.float32), weight, eps, D, x_ptr.dtype.element_ty, ADD_ONE)
    tl.store(
        out_ptr + row * out_row + head[:, None] * out_head + d[None, :],
        value.to(out_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _fused_add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    x_row,
    residual_row,
    eps,
    ADD_ONE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    dtype = residual_ptr.dtype.element_ty
    x_at = x_ptr + row * x_row + d[None, :]
    residual_at = residual_ptr + row * residual_row + d[None, :]
    mask = (d < D)[None, :]
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0)
    wait_for_previous(PDL)
    let_next_start(PDL)
    x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
    total = (residual + x).to(dtype)
    tl.store(residual_at, total, mask=mask)
    value = _normalized(total.to(tl.float32), weight, eps, D, dtype, ADD_ONE)
    tl.store(x_at, value.to(dtype), mask=mask)


def heads_per_program(heads: int, block_d: int) -> int:
    """How many heads one program takes: a power of two, about a thousand elements in all."""
    return min(triton.next_power_of_2(heads), max(1, 1024 // block_d))


def warps(elements: int) -> int:
    """Warps for a tile of so many elements: eight elements a thread, 1 to 8 warps."""
    return min(8, max(1, elements // 256))


def _run_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, add_one: bool
) -> None:
    if x.dim() == 3:
        m, heads, d = x.shape
        x_head, out_head = x.stride(1), out.stride(1)
    else:
        (m, d), heads, x_head, out_head = x.shape, 1, 0, 0
    block_d = triton.next_power_of_2(d)
    block_h = heads_per_program(heads, block_d)
    _rms_norm_kernel[(triton.cdiv(heads, block_h), m)](
        x,
        weight,
        out,
        x.stride(0),
        x_head,
        out.stride(0),
        out_head,
        eps,
        heads,
        ADD_ONE=add_one,
        D=d,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=warps(block_h * block_d),
    )


def _run_fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    add_one: bool,
    pdl: bool = False,
) -> None:
    m, d = x.shape
    block_d = triton.next_power_of_2(d)
    _fused_add_rms_norm_kernel[(m,)](
        x,
        residual,
        weight,
        x.stride(0),
        residual.stride(0),
        eps,
        ADD_ONE=add_one,
        D=d,
        BLOCK_D=block_d,
        num_warps=warps(block_d),
        **(pdl_options(x) if pdl else {"PDL": False}),
    )


@operation("rms_norm", "triton: rms_norm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    """out = x / sqrt(mean(x²) + eps), rounded to the model's dtype, times weight (D,).

    x is (M, D) or (M, heads, D), each row contiguous; it may be a strided view, and `out` may be x.
    """
    _run_rms_norm(x, weight, out, eps, False)


@operation("rms_norm", "triton: centred_rms_norm")
def centred_rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    """out = x / sqrt(mean(x²) + eps) * (1 + weight (D,)), rounded once; x and out as in `rms_norm`."""
    _run_rms_norm(x, weight, out, eps, True)


@operation("fused_add_rms_norm", "triton: fused_add_rms_norm")
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    pdl: bool = False,
) -> None:
    """In place: residual += x, rounded to the model's dtype; x = rms_norm(residual) * weight.

    x and residual (M, D) with contiguous rows, weight (D,). With `pdl` the weight is read while the
    kernel before may still be running.
    """
    _run_fused_add_rms_norm(x, residual, weight, eps, False, pdl)


@operation("fused_add_rms_norm", "triton: centred_fused_add_rms_norm")
def centred_fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """In place: residual += x, rounded to the model's dtype; x = residual / sqrt(mean(residual²) + eps) *
    (1 + weight), rounded once. Shapes as in `fused_add_rms_norm`."""
    _run_fused_add_rms_norm(x, residual, weight, eps, True)
