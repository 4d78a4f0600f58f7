# mypy: allow-untyped-defs
"""The two matrix products of the MoE layer in Triton: the router's and the experts'.

At decode sizes both read each weight once and are bound by memory: tiles are chosen so that every
multiprocessor has loads in flight, not for arithmetic. Tile sizes depend on static shapes only;
nothing is tuned at run time, so a recording and its eager twin always run the same kernel.

Annotations are not postponed in this module: Triton reads ``tl.constexpr`` from them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphcap.moe.kernels.triton_pdl import let_next_start, pdl_options, wait_for_previous
from graphcap.operations import operation

PROGRAMS_WANTED = 256
"""About two programs for each multiprocessor of a large GPU: one loads while the other waits."""

ROWWISE_MAX = 8
"""Up to this many tokens the router runs one program per token and few experts, without tl.dot."""


class Tile(NamedTuple):
    """How one program of a matrix product is shaped."""

    n: int
    k: int
    warps: int
    stages: int


def expert_tile(pairs: int, blocks: int, n: int, c: int, itemsize: int, block: int) -> Tile:
    """The tile of `expert_gemm` for at most `blocks` blocks of `block` pairs, weights (E, n, c).

    Narrower tiles until the grid has `PROGRAMS_WANTED` programs. Every choice stays below 160 KiB of
    shared memory, float32 (no tensor cores in full precision) far below.
    """
    blocks = min(pairs, blocks)
    if itemsize > 2:
        return Tile(32, _reach(c, 32), 4, 2)
    width = 128 if block >= 64 else 64
    while width > 32 and blocks * triton.cdiv(n, width) < PROGRAMS_WANTED:
        width //= 2
    # A deep tile keeps more bytes in flight; it pays where C gives it enough iterations.
    depth = 256 if width == 32 and block <= 16 and c >= 2048 else 128
    return Tile(width, _reach(c, depth), 4, 3 if width == 128 else 4)


def router_tile(c: int, itemsize: int) -> Tile:
    """The tile of `router_gemm` where it uses tl.dot: narrow, since E is small and C is long."""
    return Tile(16, _reach(c, 256 if itemsize <= 2 else 64), 4, 3)


def router_rows(m: int, e: int) -> tuple[int, int]:
    """Experts and warps of one program of `router_gemm` where it takes the tokens one by one."""
    return (1 if m * e <= 128 else 2 if m * e <= 256 else 4), 4


def _reach(c: int, depth: int) -> int:
    """`depth`, or less where C is so short that the tile would be mostly mask."""
    return max(16, min(depth, triton.next_power_of_2(c)))


@triton.jit
def _router_weights(w_ptr, w_stride, expert, start, E, C: tl.constexpr, BLOCK_C: tl.constexpr):
    c = start + tl.arange(0, BLOCK_C)
    at = w_ptr + expert[:, None] * w_stride + c[None, :]
    return tl.load(at, mask=(expert < E)[:, None] & (c < C)[None, :], other=0.0)


@triton.jit
def _router_rows_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    x_stride,
    w_stride,
    E,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1)
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    w = _router_weights(w_ptr, w_stride, expert, 0, E, C, BLOCK_C)
    wait_for_previous(PDL)
    let_next_start(PDL)
    total = tl.zeros((BLOCK_E, BLOCK_C), tl.float32)
    for start in tl.static_range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        x = tl.load(x_ptr + row * x_stride + c, mask=c < C, other=0.0)
        if start > 0:
            w = _router_weights(w_ptr, w_stride, expert, start, E, C, BLOCK_C)
        total += w.to(tl.float32) * x.to(tl.float32)[None, :]
    logit = tl.sum(total, 1).to(x_ptr.dtype.element_ty)
    tl.store(out_ptr + row * E + expert, logit.to(tl.float32), mask=expert < E)


@triton.jit(do_not_specialize=["M"])
def _router_tiles_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    x_stride,
    w_stride,
    M,
    E,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDEN: tl.constexpr,
):
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        x = tl.load(
            x_ptr + row[:, None] * x_stride + c[None, :],
            mask=(row < M)[:, None] & (c < C)[None, :],
            other=0.0,
        )
        w = tl.load(
            w_ptr + expert[None, :] * w_stride + c[:, None],
            mask=(expert < E)[None, :] & (c < C)[:, None],
            other=0.0,
        )
        if WIDEN:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
    tl.store(
        out_ptr + row[:, None] * E + expert[None, :],
        total.to(x_ptr.dtype.element_ty).to(tl.float32),
        mask=(row < M)[:, None] & (expert < E)[None, :],
    )


@triton.jit(do_not_specialize=["pairs"])
def _expert_gemm_kernel(
    a_ptr,
    w_ptr,
    sorted_ptr,
    expert_ids_ptr,
    count_ptr,
    out_ptr,
    pairs,
    a_stride,
    PAIRS_PER_ROW: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDEN: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    block = tl.program_id(1)
    expert = tl.load(expert_ids_ptr + block)
    if (block * BLOCK >= tl.load(count_ptr)) | (expert < 0):
        return
    lane = tl.arange(0, BLOCK_M)
    pair = tl.load(sorted_ptr + block * BLOCK + lane, mask=lane < BLOCK, other=pairs)
    real = pair < pairs
    row = tl.where(real, pair, 0) // PAIRS_PER_ROW
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Columns beyond N read column N - 1 again and are not stored: cheaper than a mask on every load.
    column = tl.minimum(n, N - 1)
    a_rows = a_ptr + row.to(tl.int64)[:, None] * a_stride
    matrices: tl.constexpr = 2 if GATED else 1
    w_columns = w_ptr + expert.to(tl.int64) * (matrices * N * C) + column[None, :] * C
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ups = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        if C % BLOCK_C == 0:
            a = tl.load(a_rows + c[None, :], mask=real[:, None], other=0.0)
            w = tl.load(w_columns + c[:, None])
        else:
            a = tl.load(a_rows + c[None, :], mask=real[:, None] & (c < C)[None, :], other=0.0)
            w = tl.load(w_columns + c[:, None], mask=(c < C)[:, None], other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            w = w.to(tl.float32)
        total = tl.dot(a, w, total, input_precision="ieee")
        if GATED:
            if C % BLOCK_C == 0:
                up = tl.load(w_columns + N * C + c[:, None])
            else:
                up = tl.load(w_columns + N * C + c[:, None], mask=(c < C)[:, None], other=0.0)
            if WIDEN:
                up = up.to(tl.float32)
            ups = tl.dot(a, up, ups, input_precision="ieee")
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * ups
    tl.store(
        out_ptr + pair.to(tl.int64)[:, None] * N + n[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & (n < N)[None, :],
    )


def interpreted(tensor: torch.Tensor) -> bool:
    """Whether a kernel on `tensor` runs in Triton's interpreter, whose tl.dot misreads bfloat16."""
    return tensor.device.type == "cpu"


@operation("router GEMM", "triton: router_gemm")
def router_gemm(hidden: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> None:
    """logits (M, E) float32 = hidden (M, H) @ weight (E, H).T, accumulated in float32, then rounded to
    the model's dtype, as the models' own routers do: near-ties of experts fall as they fall there.

    `hidden` and `weight` have one dtype and contiguous rows; `logits` is contiguous. For few tokens
    `weight` may be read while the kernel before is still running: that kernel must not write it.
    """
    m, c = hidden.shape
    e = weight.shape[0]
    if m <= ROWWISE_MAX:
        block_e, warps = router_rows(m, e)
        _router_rows_kernel[(triton.cdiv(e, block_e), m)](
            hidden,
            weight,
            logits,
            hidden.stride(0),
            weight.stride(0),
            e,
            C=c,
            BLOCK_E=block_e,
            BLOCK_C=min(triton.next_power_of_2(c), 2048),
            num_warps=warps,
            **pdl_options(hidden),
        )
        return
    tile = router_tile(c, hidden.element_size())
    _router_tiles_kernel[(triton.cdiv(e, tile.n), triton.cdiv(m, 16))](
        hidden,
        weight,
        logits,
        hidden.stride(0),
        weight.stride(0),
        m,
        e,
        C=c,
        BLOCK_M=16,
        BLOCK_N=tile.n,
        BLOCK_C=tile.k,
        WIDEN=interpreted(hidden),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@operation("fused_moe", "triton: expert_gemm")
def expert_gemm(
    a: torch.Tensor,
    weight: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded_count: torch.Tensor,
    out: torch.Tensor,
    pairs_per_row: int,
    block: int,
    tile: Tile | None = None,
    pdl: bool = False,
) -> None:
    """For every pair p in `sorted_ids`: out[p] = a[p // pairs_per_row] @ weight[expert of p].T.

    a (R, C), weight (E, N, C) contiguous, out (M*K, N) contiguous: one dtype, float32 accumulation.
    `sorted_ids`, `expert_ids` and `padded_count` are int32, as `align` writes them for this `block`.
    Rows of `out` whose pair was dropped keep what they held. `tile` None: `expert_tile`.
    """
    routing = (sorted_ids, expert_ids, padded_count)
    _launch_experts(a, weight, routing, out, pairs_per_row, block, tile, pdl, False)


@operation("fused_moe w1", "triton: gated_gemm")
def gated_gemm(
    a: torch.Tensor,
    weight: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded_count: torch.Tensor,
    out: torch.Tensor,
    pairs_per_row: int,
    block: int,
    tile: Tile | None = None,
    pdl: bool = False,
) -> None:
    """`expert_gemm` with silu_and_mul: out[p] (I,) = silu(gate) * up, weight (E, 2I, C) holding gate rows,
    then up rows. Accumulated in float32 and rounded once, at the end."""
    routing = (sorted_ids, expert_ids, padded_count)
    _launch_experts(a, weight, routing, out, pairs_per_row, block, tile, pdl, True)


def _launch_experts(
    a: torch.Tensor,
    weight: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    pairs_per_row: int,
    block: int,
    tile: Tile | None,
    pdl: bool,
    gated: bool,
) -> None:
    pairs, n = out.shape
    c = weight.shape[2]
    expert_ids = routing[1]
    blocks = min(pairs, expert_ids.shape[0])
    if tile is None:
        # Gate and up of a gated product are two tiles of weights.
        tile = expert_tile(pairs, blocks, n, c, a.element_size(), block)
        if gated:
            tile = tile._replace(n=max(16, tile.n // 2))
    _expert_gemm_kernel[(triton.cdiv(n, tile.n), blocks)](
        a,
        weight,
        *routing,
        out,
        pairs,
        a.stride(0),
        PAIRS_PER_ROW=pairs_per_row,
        N=n,
        C=c,
        BLOCK=block,
        BLOCK_M=max(16, triton.next_power_of_2(block)),
        BLOCK_N=tile.n,
        BLOCK_C=tile.k,
        WIDEN=interpreted(a),
        GATED=gated,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **(pdl_options(a) if pdl else {"PDL": False}),
    )
