# mypy: allow-untyped-defs
"""The experts of few tokens in Triton: two kernels that take the (token, expert) pairs one by one.

With few tokens a pair seldom shares its expert, so nothing is gained by sorting pairs into groups:
each pair multiplies vectors, not matrices, and the time is that of reading its weights. Programs are
single warps, many to a multiprocessor, whose reductions need no barrier; the choice of experts is
cheap enough to be made again in each of them, which saves the kernels of top-k and of sorting.

Tile sizes depend on static shapes only.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from graphcap.moe.kernels.triton_pdl import let_next_start, pdl_options, wait_for_previous
from graphcap.moe.kernels.triton_topk import REMOVED, choose_experts, first_of, rank_keys
from graphcap.operations import operation


class PairTile(NamedTuple):
    """How much one warp takes: `rows` of a pair's weights (of all K pairs in `pair_down`), `depth`
    elements of each at a time, and the registers a thread may use, 0 as many as it likes."""

    rows: int
    depth: int
    registers: int = 0


def gate_up_tile(h: int, itemsize: int) -> PairTile:
    """The tile of `pair_gate_up`: 4 KiB of gate and as much of up, one row where rows are long."""
    wanted = 4096 // itemsize
    depth = _reach(h, wanted)
    # With 64 registers a multiprocessor takes 32 programs, its most.
    return PairTile(min(16, wanted // depth), depth, 64)


def down_tile(tokens: int, k: int, i: int, itemsize: int) -> PairTile:
    """The tile of `pair_down`: 8 KiB of the weights of one token's pairs; 16 KiB where there are tokens
    enough to fill the device with such programs."""
    wanted = 8192 // itemsize // triton.next_power_of_2(k)
    depth = _reach(i, max(16, wanted))
    whole = depth * triton.cdiv(i, depth)
    rows = (wanted if tokens == 1 else 2 * wanted) // whole
    return PairTile(max(1, min(16, rows)), depth)


def routes_early(tokens: int, pdl: bool) -> bool:
    """Whether `pair_down` chooses the experts again, before it waits for `pair_gate_up`, to have its
    weights on the way meanwhile. With more tokens the registers that takes cost more than it gains."""
    return pdl and tokens == 1


def _reach(size: int, depth: int) -> int:
    """`depth`, or less where `size` is short; rather a loop than a tile that is mostly mask."""
    depth = min(triton.next_power_of_2(size), depth)
    while size % depth and depth > 256:
        depth //= 2
    return depth


@triton.jit
def _pair_gate_up_kernel(
    x_ptr,
    logits_ptr,
    row_ids_ptr,
    w_ptr,
    act_ptr,
    weights_ptr,
    ids_ptr,
    x_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    INNER: tl.constexpr,
    E_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    # Pairs are the faster axis: those that share an expert find its rows in the cache.
    pair = tl.program_id(0)
    row = pair // K
    slot = pair % K
    part = tl.program_id(1) - 1
    wait_for_previous(PDL)
    let_next_start(PDL)
    if part < 0:
        if slot == 0:
            real = tl.load(row_ids_ptr + row) >= 0
            ids, weights = choose_experts(
                logits_ptr + row * E, real, E, K, E_PAD, K_PAD, RENORMALIZE
            )
            k = tl.arange(0, K_PAD)
            tl.store(weights_ptr + row * K + k, weights, mask=k < K)
            tl.store(ids_ptr + row * K + k, ids, mask=k < K)
        return

    # The logits of a pad may be anything, but are there: both loads go out together.
    candidate = tl.arange(0, E_PAD)
    logit = tl.load(logits_ptr + row * E + candidate, mask=candidate < E, other=0.0)
    if tl.load(row_ids_ptr + row) < 0:
        return
    key = rank_keys(logit, candidate < E)
    for _ in range(slot):
        _best, taken = first_of(key, candidate)
        key = tl.where(candidate == taken, REMOVED, key)
    _best, expert = first_of(key, candidate)

    i = part * ROWS + tl.arange(0, ROWS)
    # Rows beyond the end read the last one again and are not stored.
    w_row = w_ptr + expert.to(tl.int64) * (2 * INNER * H) + tl.minimum(i, INNER - 1)[:, None] * H
    gates = tl.zeros((ROWS,), tl.float32)
    ups = tl.zeros((ROWS,), tl.float32)
    for start in tl.static_range(0, H, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        at = w_row + h[None, :]
        # Read once: these bytes must not drive the activations out of the cache.
        if H % BLOCK_H == 0:
            gate = tl.load(at, eviction_policy="evict_first")
            up = tl.load(at + INNER * H, eviction_policy="evict_first")
            x = tl.load(x_ptr + row.to(tl.int64) * x_stride + h)
        else:
            inside = (h < H)[None, :]
            gate = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
            up = tl.load(at + INNER * H, mask=inside, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + row.to(tl.int64) * x_stride + h, mask=h < H, other=0.0)
        x = x.to(tl.float32)[None, :]
        gates += tl.sum(gate.to(tl.float32) * x, 1)
        ups += tl.sum(up.to(tl.float32) * x, 1)
    act = gates / (1.0 + tl.exp(-gates)) * ups
    act_at = act_ptr + pair.to(tl.int64) * INNER + i
    tl.store(act_at, act.to(act_ptr.dtype.element_ty), mask=i < INNER)


@triton.jit
def _down_weights(
    w_ptr, ids, h, start, H: tl.constexpr, INNER: tl.constexpr, BLOCK_I: tl.constexpr
):
    """(K_PAD, ROWS, BLOCK_I) of the experts `ids`; 0 where an id is negative, whose weights are not
    read."""
    i = start + tl.arange(0, BLOCK_I)
    mask = (ids >= 0)[:, None, None]
    if INNER % BLOCK_I != 0:
        mask = mask & (i < INNER)[None, None, :]
    at = w_ptr + tl.maximum(ids, 0).to(tl.int64)[:, None, None] * (H * INNER)
    at += tl.minimum(h, H - 1)[None, :, None] * INNER + i[None, None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _down_sum(
    act_ptr,
    w,
    weights,
    ids,
    h,
    start,
    K_PAD: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """(ROWS, BLOCK_I): products with the activations, weighted and summed over the pairs."""
    i = start + tl.arange(0, BLOCK_I)
    slot = tl.arange(0, K_PAD)
    mask = (ids >= 0)[:, None, None]
    if INNER % BLOCK_I != 0:
        mask = mask & (i < INNER)[None, None, :]
    # Every row has its own copy of the activations, so that they come in the layout of the weights.
    at = act_ptr + slot[:, None, None] * INNER + (h * 0)[None, :, None] + i[None, None, :]
    act = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return tl.sum(w.to(tl.float32) * (act * weights[:, None, None]), 0)


@triton.jit
def _pair_down_kernel(
    act_ptr,
    logits_ptr,
    row_ids_ptr,
    weights_ptr,
    ids_ptr,
    w_ptr,
    out_ptr,
    out_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    INNER: tl.constexpr,
    E_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    UNROLL: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    h = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    slot = tl.arange(0, K_PAD)
    if EARLY:
        # Logits and row ids are older than the previous kernel, which has let this one start only
        # after its own wait: they are complete.
        real = tl.load(row_ids_ptr + row) >= 0
        ids, weights = choose_experts(logits_ptr + row * E, real, E, K, E_PAD, K_PAD, RENORMALIZE)
        ids = tl.where(slot < K, ids, -1)
    else:
        wait_for_previous(PDL)
        let_next_start(PDL)
        ids = tl.load(ids_ptr + row * K + slot, mask=slot < K, other=-1)
        weights = tl.load(weights_ptr + row * K + slot, mask=slot < K, other=0.0)
    w = _down_weights(w_ptr, ids, h, 0, H, INNER, BLOCK_I)
    if EARLY:
        wait_for_previous(PDL)
        let_next_start(PDL)
    act = act_ptr + row.to(tl.int64) * (K * INNER)
    total = _down_sum(act, w, weights, ids, h, 0, K_PAD, INNER, BLOCK_I)
    if UNROLL:
        for start in tl.static_range(BLOCK_I, INNER, BLOCK_I):
            w = _down_weights(w_ptr, ids, h, start, H, INNER, BLOCK_I)
            total += _down_sum(act, w, weights, ids, h, start, K_PAD, INNER, BLOCK_I)
    else:
        for start in range(BLOCK_I, INNER, BLOCK_I):
            w = _down_weights(w_ptr, ids, h, start, H, INNER, BLOCK_I)
            total += _down_sum(act, w, weights, ids, h, start, K_PAD, INNER, BLOCK_I)
    value = tl.sum(total, 1)
    tl.store(out_ptr + row * out_stride + h, value.to(out_ptr.dtype.element_ty), mask=h < H)


@operation("pair_gate_up", "triton: pair_gate_up")
def pair_gate_up(
    hidden: torch.Tensor,
    logits: torch.Tensor,
    row_ids: torch.Tensor,
    gate_up: torch.Tensor,
    act: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    renormalize: bool,
    pdl: bool = True,
    tile: PairTile | None = None,
) -> None:
    """`topk_softmax`, the first expert product and silu_and_mul, for every pair by itself.

    With e the expert that token m chooses as its k-th: act[m*K + k] = silu(gate[e] @ hidden[m]) *
    (up[e] @ hidden[m]). Accumulated in float32 and rounded once, at the end: unlike in `expert_gemm`
    and `silu_and_mul` the products themselves are not rounded to the model's dtype.

    Args:
        hidden: (M, H), model dtype, contiguous rows.
        logits: (M, E) float32, contiguous.
        row_ids: (M,) int64; a row with a negative value is padding.
        gate_up: (E, 2I, H), model dtype, contiguous: gate rows, then up rows.
        act: (M*K, I), model dtype, contiguous; rows of padding are not written.
        weights, ids: (M, K) float32 and int32, contiguous, written as `topk_softmax` writes them.
        renormalize: make the weights of a token sum to 1.
    """
    e = logits.shape[1]
    m, k = ids.shape
    h, inner = gate_up.shape[2], act.shape[1]
    tile = gate_up_tile(h, hidden.element_size()) if tile is None else tile
    options: dict[str, Any] = pdl_options(hidden) if pdl else {"PDL": False}
    if tile.registers and pdl_options(hidden)["PDL"]:  # an NVIDIA device
        options["maxnreg"] = tile.registers
    _pair_gate_up_kernel[(m * k, 1 + triton.cdiv(inner, tile.rows))](
        hidden,
        logits,
        row_ids,
        gate_up,
        act,
        weights,
        ids,
        hidden.stride(0),
        E=e,
        K=k,
        H=h,
        INNER=inner,
        E_PAD=triton.next_power_of_2(e),
        K_PAD=triton.next_power_of_2(k),
        RENORMALIZE=renormalize,
        ROWS=tile.rows,
        BLOCK_H=tile.depth,
        num_warps=1,
        **options,
    )


@operation("pair_down", "triton: pair_down")
def pair_down(
    act: torch.Tensor,
    logits: torch.Tensor,
    row_ids: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    renormalize: bool,
    pdl: bool = True,
    tile: PairTile | None = None,
) -> None:
    """The second expert product and the merge: out[m] = sum over k of weights[m, k] * down[ids[m, k]] @
    act[m*K + k], in float32 and in a fixed order; zeros for padding.

    Must directly follow the `pair_gate_up` that wrote `act`, `weights` and `ids` from these `logits`,
    `row_ids` and `renormalize`: where `routes_early`, both are read while it may still be running.

    Args:
        act: (M*K, I), model dtype, contiguous; rows of padding are not read.
        logits, row_ids, weights, ids: as in `pair_gate_up`.
        down: (E, H, I), model dtype, contiguous.
        out: (M, H), model dtype, contiguous rows.
    """
    m, k = ids.shape
    e, h, inner = down.shape
    k_pad = triton.next_power_of_2(k)
    tile = down_tile(m, k, inner, act.element_size()) if tile is None else tile
    options: dict[str, Any] = pdl_options(act) if pdl else {"PDL": False}
    if tile.registers and pdl_options(act)["PDL"]:
        options["maxnreg"] = tile.registers
    _pair_down_kernel[(m, triton.cdiv(h, tile.rows))](
        act,
        logits,
        row_ids,
        weights,
        ids,
        down,
        out,
        out.stride(0),
        E=e,
        K=k,
        H=h,
        INNER=inner,
        E_PAD=triton.next_power_of_2(e),
        K_PAD=k_pad,
        RENORMALIZE=renormalize,
        ROWS=tile.rows,
        BLOCK_I=tile.depth,
        # The compiler moves all loads of an unrolled loop to its front: no more than registers hold.
        UNROLL=tile.rows * inner * k_pad * act.element_size() <= 16384,
        EARLY=routes_early(m, options["PDL"]),
        num_warps=1,
        **options,
    )
