"""Projections of one token in CUDA C++ (``cuda/linear.cu``); signatures as in `triton_fused_linear`.

What they do besides: all weights of a projection are in registers before the kernel before has ended,
without a second wave of programs; and the output projection can join the splits of attention itself, in place
of attention's second kernel. What a plan with them gains stands in the packaged table of plans.
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


MOST_PARTS = 9
"""Of a head's attention that a block joins: the new token and eight splits. Every block reads all parts, of
2,048 columns 8 KiB each."""


class CudaRows(NamedTuple):
    """Weight rows of one block; for one token."""

    rows: int


class CudaJoinRows(NamedTuple):
    """Weight rows of one block, which joins the parts of attention itself (`output_residual_joined`); for one
    token."""

    rows: int


def rows_tile(outputs: int, multiprocessors: int = 132) -> CudaRows:
    """A block for every multiprocessor, or as many rows as a block's registers hold."""
    return CudaRows(max(1, min(MOST_ROWS, -(-outputs // (multiprocessors - 4)))))


def why_not(
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    tile: CudaRows | CudaJoinRows | None = None,
) -> str:
    """Why one token cannot be projected from `columns` by these kernels; empty where it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"they need bfloat16 or float16, found {dtype}"
    if columns % 256 or not 256 <= columns <= LONGEST_ROW:
        return f"they need rows of a multiple of 256 values up to {LONGEST_ROW}, found {columns}"
    if tile is not None and not 1 <= tile.rows <= MOST_ROWS:
        return f"they take 1 to {MOST_ROWS} rows a block, found {tile.rows}"
    return obstacle(device)


def why_not_joined(
    heads: int,
    head_dim: int,
    splits: int,
    dtype: torch.dtype,
    device: torch.device,
    tile: CudaJoinRows | None = None,
) -> str:
    """Why one token's attention over `splits` splits cannot be joined and projected by
    `output_residual_joined`; empty where it can."""
    if head_dim % 8:
        return f"they join heads of a multiple of 8 values, found {head_dim}"
    if not 1 <= splits < MOST_PARTS:
        return f"they join 1 to {MOST_PARTS - 1} splits, found {splits}"
    return why_not(heads * head_dim, dtype, device, tile)


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
    joined: tuple[int, int, int, bool] | None,
) -> CudaKernel:
    """Args:
    joined: parts, values of a head, tokens of the attend tile, slots of 64 bits; None: x is given.
    """
    parts = dict(zip(("PARTS", "HEAD", "TOKENS", "SLOT64"), joined or (0, 0, 0, 0), strict=True))
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
            **parts,
        }
    )
    found = function("linear.cu", "project", constants, device, 0)
    return CudaKernel("project", found, -(-outputs // rows), columns // 8, pdl=pdl)


def _project(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int],
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: CudaRows | CudaJoinRows | None,
    pdl: bool,
    *,
    delta: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    normed: torch.Tensor | None = None,
    residual: bool = False,
    joined: tuple[int, int, int, bool] | None = None,
) -> None:
    """Args:
    x: the row; or, with `joined` (see `_kernel`), what `project` of linear.cu reads in its place.
    """
    outputs, columns = weight.shape
    given = x if isinstance(x, tuple) else (x,)
    assert given[0].shape[0] == 1, "for one token; see LayerPlan"
    kernel = _kernel(
        weight.device,
        weight.dtype == torch.float16,
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
        joined,
    )
    kernel.launch(weight.device, *given, delta, norm, weight, bias, out, total, normed, float(eps))


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


@operation("output_residual", "cuda: joined linear")
def output_residual_joined(
    partial: torch.Tensor,
    lse: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    capacity: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    tokens: int,
    tile: CudaJoinRows | None = None,
    pdl: bool = True,
) -> None:
    """residual (1, H) += joined @ weight.T + bias, of one token's attention as `attend_parts` leaves it.
    Every value is rounded where `attend` and `output_residual` round it; parts are joined in order.

    Everything but `partial` and `lse` is read while the kernel before may still be running: that kernel may
    write these alone. Parts that the token's length does not fill are not read, and padding (a negative slot)
    has none: what is joined is zero.

    Args:
        partial: (1, Hq, 1 + splits, D) float32; lse: (1, Hq, 1 + splits) float32; contiguous. See
            `why_not_joined` for what they may be.
        slots: (1,) int64 or int32; seq_lens: (1,) int32; capacity: tokens of a block table: as `attend_parts`
            was given them.
        weight: (H, Hq * D), contiguous; bias: (H,).
        tokens: of the tile that `attend_parts` ran by.
        tile: None: `rows_tile`.
        pdl: use programmatic dependent launch.
    """
    parts, dim = partial.shape[2:]
    assert 1 < parts <= MOST_PARTS, "see LayerPlan"
    assert partial.shape[1] * dim == weight.shape[1], "of other heads"
    _project(
        (partial, lse, slots, seq_lens, capacity),
        weight,
        residual,
        tile,
        pdl,
        bias=bias,
        residual=True,
        joined=(parts, dim, tokens, slots.dtype == torch.int64),
    )
