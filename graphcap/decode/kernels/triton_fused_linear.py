# mypy: allow-untyped-defs
# ruff: noqa: SIM102 - what is known at compile time is asked by an `if` of its own
"""Projections of few tokens in Triton, with what comes before and after them in the same kernel.

Before: the residual add and the RMS norm, made again in every program from a row that all of them
find in the cache; it costs less than a kernel of its own. After: bias and residual add. Every value is
rounded where the separate kernels round it, so the two schedules differ by the order of sums alone.

There are two kernels. By row a program keeps the whole of a few weight rows in registers, on their way
while the kernel before is still finishing, and takes token after token: vectors, no tl.dot. By tile it
is a matrix product that loops over the depth. Both sum in an order that depends on shapes only.

Annotations are not postponed in this module: Triton reads ``tl.constexpr`` from them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from graphcap.moe.kernels.triton_gemm import interpreted
from graphcap.moe.kernels.triton_pdl import let_next_start, pdl_options, wait_for_previous
from graphcap.operations import operation

ROWS_MAX = 2
"""Up to this many tokens a wide projection is taken by row (H200: 2 tokens, 6.7 µs, by
tile 12.6)."""

NARROW_ROWS = 64
"""Up to this many tokens a narrow projection (a router) is taken by row: it has too few tiles to read its
weights at speed (H200, 256 experts, 8 tokens: 2.4 µs by row, 7.5 by tile)."""


class RowsTile(NamedTuple):
    """By row: weight rows of one program, its warps, into how many programs the tokens are dealt (each
    reads the weights again, from the cache), and the registers a thread may use, 0 as many as it likes.

    With fewer registers all programs run at once, and those of the next kernel have room to fetch their
    weights meanwhile: four rows of 2,048 by four warps take 117, four programs a multiprocessor.
    """

    rows: int
    warps: int
    lanes: int
    registers: int = 0


class DotTile(NamedTuple):
    """By tile: outputs of one program, depth of one iteration, warps, stages, and whether the program's
    weights are sent for, into the second-level cache, before the kernel before has ended."""

    n: int
    depth: int
    warps: int
    stages: int
    early: bool = False


Tile = RowsTile | DotTile


def linear_tile(m: int, n: int, c: int, itemsize: int) -> Tile:
    """The tile for x (m, c) @ weight (n, c).T; it depends on static shapes only."""
    narrow = n <= 512
    if m <= ROWS_MAX or (narrow and m <= NARROW_ROWS):
        # 16 KiB of weights: registers of 128 threads hold them beside the row.
        rows = max(1, min(4, 16384 // (itemsize * triton.next_power_of_2(c))))
        return RowsTile(rows, 4, min(m, 8) if narrow else 1)
    if itemsize > 2:
        return DotTile(16, _reach(c, 64), 4, 2)
    return DotTile(16, _reach(c, 256 if m <= 32 else 128), 4, 4)


def _reach(c: int, depth: int) -> int:
    """`depth`, or less where C is so short that the tile would be mostly mask."""
    return max(16, min(depth, triton.next_power_of_2(c)))


@triton.jit
def _stream(x_ptr, delta_ptr, at, mask):
    """What the residual stream holds at `at`: x, or x + delta rounded to the model's dtype; float32."""
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if delta_ptr is not None:
        x += tl.load(delta_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _finish(total, bias_ptr, residual_ptr, out_ptr, at, n, mask, dtype: tl.constexpr):
    """Store a sum: plus bias, rounded to the model's dtype; plus the residual, rounded again."""
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    value = total.to(dtype).to(tl.float32)
    if residual_ptr is not None:
        value = (value + tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)).to(dtype)
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _linear_rows_kernel(
    x_ptr,
    delta_ptr,
    norm_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    sum_ptr,
    normed_ptr,
    eps,
    M,
    N: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0)
    n = part * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK_C)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # Rows beyond N read the last one again and are not stored.
    w_at = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * C + c[None, :]
    w = tl.load(w_at, mask=(c < C)[None, :], other=0.0, eviction_policy="evict_first")
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + c, mask=c < C, other=0.0)
    bias = tl.zeros((ROWS,), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    let_next_start(PDL)
    for row in range(tl.program_id(1), M, tl.num_programs(1)):
        at = row * C + c
        x = _stream(x_ptr, delta_ptr, at, c < C)
        # Loaded beside x, not after the sums: one latency less.
        residual = tl.zeros((ROWS,), tl.float32)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + row * N + n, mask=n < N, other=0.0).to(tl.float32)
        if sum_ptr is not None:
            if part == 0:
                tl.store(sum_ptr + at, x.to(dtype), mask=c < C)
        if norm_ptr is not None:
            scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / C + eps)
            x = (x * scale).to(dtype).to(tl.float32) * norm.to(tl.float32)
            x = x.to(dtype).to(tl.float32)
        if normed_ptr is not None:
            if part == 0:
                tl.store(normed_ptr + at, x.to(dtype), mask=c < C)
        total = tl.sum(w.to(tl.float32) * x[None, :], 1)
        value = (total + bias).to(dtype).to(tl.float32) + residual
        if residual_ptr is not None:
            value = value.to(dtype)
        tl.store(out_ptr + row * N + n, value.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _send_for(w_ptr, SIZE: tl.constexpr):
    """Have SIZE contiguous values on their way into the second-level cache; nothing waits for them."""
    BYTES: tl.constexpr = SIZE * w_ptr.dtype.element_ty.primitive_bitwidth // 8 // 128
    at = w_ptr.to(tl.int64) + tl.arange(0, 128).to(tl.int64) * BYTES
    size = tl.full((128,), BYTES, tl.int32)
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [at, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["M"])
def _linear_tiles_kernel(
    x_ptr,
    delta_ptr,
    norm_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    sum_ptr,
    normed_ptr,
    eps,
    M,
    N: tl.constexpr,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows_at = tl.where(row < M, row, 0)[:, None] * C
    w_at = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :] * C
    if EARLY:
        _send_for(w_ptr + part.to(tl.int64) * (BLOCK_N * C), BLOCK_N * C)
    wait_for_previous(PDL)
    let_next_start(PDL)

    scale = tl.full((BLOCK_M,), 1.0, tl.float32)
    if norm_ptr is not None:
        squares = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
        for start in range(0, C, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)
            mask = (row < M)[:, None] & (c < C)[None, :]
            x = _stream(x_ptr, delta_ptr, rows_at + c[None, :], mask)
            squares += x * x
            if sum_ptr is not None:
                if part == 0:
                    tl.store(sum_ptr + rows_at + c[None, :], x.to(dtype), mask=mask)
        scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / C + eps)

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = (row < M)[:, None] & (c < C)[None, :]
        w = tl.load(
            w_at + c[:, None], mask=(c < C)[:, None], other=0.0, eviction_policy="evict_first"
        )
        x = _stream(x_ptr, delta_ptr, rows_at + c[None, :], mask)
        if norm_ptr is not None:
            norm = tl.load(norm_ptr + c, mask=c < C, other=0.0).to(tl.float32)
            x = (x * scale[:, None]).to(dtype).to(tl.float32) * norm[None, :]
        x = x.to(dtype)
        if normed_ptr is not None:
            if part == 0:
                tl.store(normed_ptr + rows_at + c[None, :], x, mask=mask)
        if WIDEN:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
    out_at = row[:, None] * N + n[None, :]
    mask = (row < M)[:, None] & (n < N)[None, :]
    _finish(total, bias_ptr, residual_ptr, out_ptr, out_at, n[None, :], mask, dtype)


def launch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    delta: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    normed: torch.Tensor | None = None,
    tile: Tile | None = None,
    pdl: bool = True,
) -> None:
    """One launch of out (M, N) = f(x (M, C)) @ weight (N, C).T + bias, + residual; see the operations.

    Args:
        tile: None: `linear_tile`.
        pdl: use programmatic dependent launch where the device has it.
    """
    m, c = x.shape
    n = weight.shape[0]
    tile = linear_tile(m, n, c, x.element_size()) if tile is None else tile
    arguments = (x, delta, norm, weight, bias, residual, out, total, normed, eps, m)
    options: dict[str, Any] = pdl_options(x) if pdl else {"PDL": False}
    row_bytes = c * weight.element_size()
    if isinstance(tile, RowsTile):
        if tile.registers and pdl_options(x)["PDL"]:  # an NVIDIA device
            options["maxnreg"] = tile.registers
        _linear_rows_kernel[(triton.cdiv(n, tile.rows), min(m, tile.lanes))](
            *arguments,
            N=n,
            C=c,
            ROWS=tile.rows,
            BLOCK_C=triton.next_power_of_2(c),
            num_warps=tile.warps,
            **options,
        )
        return
    block_m = min(64, max(16, triton.next_power_of_2(m)))
    _linear_tiles_kernel[(triton.cdiv(n, tile.n), triton.cdiv(m, block_m))](
        *arguments,
        N=n,
        C=c,
        BLOCK_M=block_m,
        BLOCK_N=tile.n,
        BLOCK_C=tile.depth,
        EARLY=tile.early and options["PDL"] and n % tile.n == 0 and tile.n * row_bytes % 2048 == 0,
        WIDEN=interpreted(x),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **options,
    )


@operation("norm_qkv", "triton: fused_linear")
def norm_qkv(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor | None,
    tile: Tile | None = None,
    pdl: bool = True,
) -> None:
    """total = x + delta; out = rms_norm(total) @ weight.T + bias.

    All tensors are contiguous and of the model's dtype. Weights may be read while
    the kernel before is still running: that kernel must not write them.

    Args:
        x: (M, H), the residual stream.
        delta: (M, H), what is still to be added to it; None: nothing.
        norm: (H,); `eps` is added to the mean square.
        weight, bias: (N, H) and (N,) or None.
        out: (M, N).
        total: (M, H), neither x nor delta (other programs still read them); None without a delta.
    """
    launch_linear(
        x,
        weight,
        out,
        delta=delta,
        norm=norm,
        eps=eps,
        bias=bias,
        total=total,
        tile=tile,
        pdl=pdl,
    )


@operation("norm_router", "triton: fused_linear")
def norm_router(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    normed: torch.Tensor,
    logits: torch.Tensor,
    tile: Tile | None = None,
    pdl: bool = True,
) -> None:
    """normed (M, H) = rms_norm(x (M, H)); logits (M, E) float32 = normed @ weight (E, H).T.

    The logits are accumulated in float32, then rounded to the model's dtype, as `router_gemm` does.
    Contiguous tensors; `normed` is not x.
    """
    launch_linear(x, weight, logits, norm=norm, eps=eps, normed=normed, tile=tile, pdl=pdl)


@operation("output_residual", "triton: fused_linear")
def output_residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    tile: Tile | None = None,
    pdl: bool = True,
) -> None:
    """residual (M, H) += x (M, A) @ weight (H, A).T + bias (H,), in place; the product is rounded to the
    model's dtype before the sum is. Contiguous tensors of one dtype."""
    launch_linear(x, weight, residual, bias=bias, residual=residual, tile=tile, pdl=pdl)


@operation("projections", "triton: fused_linear")
def project(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile | None = None,
    pdl: bool = True,
) -> None:
    """out (M, N) = x (M, C) @ weight (N, C).T + bias (N,): `linear`, with its weights on their way while
    the kernel before is still running. Contiguous tensors of one dtype, but that `out` may be float32:
    it then holds what was rounded to the model's dtype, as `router_gemm` does."""
    launch_linear(x, weight, out, bias=bias, tile=tile, pdl=pdl)
