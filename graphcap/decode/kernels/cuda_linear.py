"""Projections of one token in CUDA C++ (``cuda/linear.cu``); signatures as in `triton_fused_linear`.

What they do besides: all weights of a projection are in registers before the kernel before has ended,
without a second wave of programs. What a plan with them gains stands in the packaged table of plans.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from graphcap.cuda.source import CudaKernel, as_constants, function, obstacle
from graphcap.operations import operation

LONGEST_ROW = 4096
"""Columns: a thread takes 8, and 512 threads with 128 registers fill a multiprocessor."""

MOST_ROWS = 20
"""Weight rows of a block, at four registers each."""


class CudaRows(NamedTuple):
    """Weight rows of one block; for one token."""

    rows: int


def rows_tile(outputs: int, multiprocessors: int = 132) -> CudaRows:
    """A block for every multiprocessor, or as many rows as a block's registers hold."""
    return CudaRows(max(1, min(MOST_ROWS, -(-outputs // (multiprocessors - 4)))))


def why_not(
    columns: int, dtype: torch.dtype, device: torch.device, tile: CudaRows | None = None
) -> str:
    """Why one token cannot be projected from `columns` by these kernels; empty where it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"they need bfloat16 or float16, found {dtype}"
    if columns % 256 or not 256 <= columns <= LONGEST_ROW:
        return f"they need rows of a multiple of 256 values up to {LONGEST_ROW}, found {columns}"
    if tile is not None and not 1 <= tile.rows <= MOST_ROWS:
        return f"they take 1 to {MOST_ROWS} rows a block, found {tile.rows}"
    return obstacle(device)


@cache
def _kernel(
    device: torch.device,
    half: bool,
    outputs: int,
    columns: int,
    rows: int,
    norm: bool,
    delta: bool,
    normed: bool,
    bias: bool,
    residual: bool,
    float_out: bool,
    pdl: bool,
) -> CudaKernel:
    constants = as_constants(
        {
            "HALF": half,
            "OUTPUTS": outputs,
            "COLUMNS": columns,
            "ROWS": rows,
            "NORM": norm,
            "DELTA": delta,
            "NORMED": normed,
            "BIAS": bias,
            "RESIDUAL": residual,
            "FLOAT_OUT": float_out,
            "PDL": pdl,
        }
    )
    found = function("linear.cu", "project", constants, device, 0)
    return CudaKernel("project", found, -(-outputs // rows), columns // 8, pdl=pdl)


def _project(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: CudaRows | None,
    pdl: bool,
    *,
    delta: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    normed: torch.Tensor | None = None,
    residual: bool = False,
) -> None:
    outputs, columns = weight.shape
    assert x.shape[0] == 1, "for one token; see LayerPlan"
    kernel = _kernel(
        x.device,
        x.dtype == torch.float16,
        outputs,
        columns,
        (rows_tile(outputs) if tile is None else tile).rows,
        norm is not None,
        delta is not None,
        normed is not None,
        bias is not None,
        residual,
        out.dtype == torch.float32,
        pdl,
    )
    kernel.launch(x.device, x, delta, norm, weight, bias, out, total, normed, float(eps))


@operation("norm_qkv", "cuda: linear")
def norm_qkv(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor | None,
    tile: CudaRows | None = None,
    pdl: bool = True,
) -> None:
    """As `triton_fused_linear.norm_qkv`, for one token and where `why_not` is empty."""
    _project(x, weight, out, tile, pdl, delta=delta, norm=norm, eps=eps, bias=bias, total=total)


@operation("norm_router", "cuda: linear")
def norm_router(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    normed: torch.Tensor,
    logits: torch.Tensor,
    tile: CudaRows | None = None,
    pdl: bool = True,
) -> None:
    """As `triton_fused_linear.norm_router`, for one token and where `why_not` is empty."""
    _project(x, weight, logits, tile, pdl, norm=norm, eps=eps, normed=normed)


@operation("output_residual", "cuda: linear")
def output_residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    tile: CudaRows | None = None,
    pdl: bool = True,
) -> None:
    """As `triton_fused_linear.output_residual`, for one token and where `why_not` is empty."""
    _project(x, weight, residual, tile, pdl, bias=bias, residual=True)
