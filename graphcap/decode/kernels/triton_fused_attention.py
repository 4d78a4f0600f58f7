# mypy: allow-untyped-defs
"""One new token's attention in one kernel: norms of queries and keys, RoPE, cache write, flash decoding.

A program takes all query heads of one key-value head and one split of the tokens that the cache already
holds; it norms and rotates its queries itself. The new token never passes through the cache: split 0 has
it in registers, attends to it and stores it. So no program reads what another one writes, and keys and
values of the first tile are on their way while the projection before is still finishing.

Splits are joined by the program of a key-value head that arrives last, which counters of the step
tell (the kernel before has zeroed them), or, where they are many, by a second launch over all heads.
Either way they are summed in their order, whichever arrived when.

Annotations are not postponed in this module: Triton reads ``tl.constexpr`` from them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphcap.decode.kernels.triton_attention import LOG2_E, MAX_SPLITS, processors
from graphcap.moe.kernels.triton_gemm import interpreted
from graphcap.moe.kernels.triton_pdl import let_next_start, pdl_options, wait_for_previous
from graphcap.operations import BufferSpec, operation

JOIN_INSIDE = 16
"""Up to this many splits are joined by the last program. Not measured yet: see bench/fused_layer.py."""


class AttendTile(NamedTuple):
    """Into how many splits the cached tokens are divided, tokens of one iteration, warps, and whether
    the splits are joined in the same launch."""

    splits: int
    tokens: int
    warps: int
    inside: bool


def attend_tile(
    rows: int, kv_heads: int, capacity: int, head_bytes: int, multiprocessors: int
) -> AttendTile:
    """The tile of `attend` for block tables of `capacity` tokens; it depends on static shapes only.

    As many splits as give every multiprocessor two programs, but none of less than one iteration, whose
    keys and values (`head_bytes` a token each) registers must hold.
    """
    tokens = 32 if head_bytes <= 512 else 16
    wanted = 2 * multiprocessors // (rows * kv_heads)
    splits = max(1, min(wanted, triton.cdiv(capacity, tokens), MAX_SPLITS))
    if head_bytes <= 256 and splits <= 4 and capacity > 64 * splits:
        tokens = 64  # long loops: fewer, larger iterations
    return AttendTile(splits, tokens, 4 if head_bytes <= 512 else 8, splits <= JOIN_INSIDE)


def _tile(qkv: torch.Tensor, key_cache: torch.Tensor, block_tables: torch.Tensor) -> AttendTile:
    page, kv_heads, d = key_cache.shape[1:4]
    return attend_tile(
        qkv.shape[0],
        kv_heads,
        block_tables.shape[1] * page,
        d * qkv.element_size(),
        processors(qkv.device),
    )


def scratch_of(tile: AttendTile, out: torch.Tensor) -> Mapping[str, BufferSpec]:
    """Partial results (M, Hq, splits, D) and their log2-sum-exp; nothing where one split does."""
    rows, heads, d = out.shape
    if tile.splits == 1:
        return {}
    return {
        "partial": ((rows, heads, tile.splits, d), torch.float32),
        "lse": ((rows, heads, tile.splits), torch.float32),
    }


def attend_scratch(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    *_: object,
) -> Mapping[str, BufferSpec]:
    return scratch_of(_tile(qkv, key_cache, block_tables), out)


@triton.jit
def _shares(length, splits, BLOCK_T: tl.constexpr):
    """Of a sequence of `length` tokens, the last of them new: cached tokens of one split, and how many
    splits have any. Split 0 always has the new one."""
    cached = length - 1
    share = tl.maximum(tl.cdiv(tl.cdiv(cached, splits), BLOCK_T), 1) * BLOCK_T
    return share, tl.maximum(tl.cdiv(cached, share), 1)


@triton.jit
def _cached_tile(
    key_ptr,
    value_ptr,
    table,
    position,
    valid,
    key_block,
    key_token,
    value_block,
    value_token,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys (BLOCK_D, BLOCK_T) and values (BLOCK_T, BLOCK_D) of one head; where not `valid` the cache may
    hold anything, NaN too, and is not read."""
    d = tl.arange(0, BLOCK_D)
    page = tl.load(table + position // PAGE, mask=valid, other=0).to(tl.int64)
    place = position % PAGE
    key_at = (page * key_block + place * key_token)[None, :] + d[:, None]
    key = tl.load(key_ptr + key_at, mask=valid[None, :] & (d < D)[:, None], other=0.0)
    value_at = (page * value_block + place * value_token)[:, None] + d[None, :]
    value = tl.load(value_ptr + value_at, mask=valid[:, None] & (d < D)[None, :], other=0.0)
    return key, value


@triton.jit
def _attend_tile(q, key, value, valid, scale, top, weight, total, WIDEN: tl.constexpr):
    """Take one tile of keys and values into a softmax that is under way."""
    if WIDEN:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
    score = tl.dot(q, key, input_precision="ieee") * scale
    score = tl.where(valid[None, :], score, -float("inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    shrink = tl.exp2(top - higher)
    p = tl.exp2(score - higher[:, None])
    weight = weight * shrink + tl.sum(p, 1)
    total = tl.dot(p.to(value.dtype), value, total * shrink[:, None], input_precision="ieee")
    return higher, weight, total


@triton.jit
def _heads(
    ptr,
    head,
    exists,
    norm,
    norm_partner,
    partner,
    cos,
    sin,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Heads (rows, BLOCK_D) of one token's projection, normed, then rotated; in the model's dtype.

    The rotation needs each value's partner, which is loaded (and normed) beside it.
    """
    dtype: tl.constexpr = ptr.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (d < D)[None, :]
    at = ptr + head[:, None] * D
    x = tl.load(at + d[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(at + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = (1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps))[:, None]
    x = ((x * scale).to(dtype).to(tl.float32) * norm[None, :]).to(dtype).to(tl.float32)
    other = (other * scale).to(dtype).to(tl.float32) * norm_partner[None, :]
    other = other.to(dtype).to(tl.float32)
    return (x * cos[None, :] + other * sin[None, :]).to(dtype)


@triton.jit
def _join(
    partial_ptr,
    lse_ptr,
    out_ptr,
    row_head,
    splits,
    active,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[row_head] = its `active` partial results, each by its share of the softmax."""
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    first = row_head * splits
    # Written by other programs, maybe of this launch: not from the first-level cache.
    lse = tl.load(lse_ptr + first + s, mask=s < active, other=-float("inf"), cache_modifier=".cg")
    weight = tl.exp2(lse - tl.max(lse, 0))
    mask = (s < active)[:, None] & (d < D)[None, :]
    at = partial_ptr + (first + s)[:, None] * D + d[None, :]
    partial = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    result = tl.sum(partial * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + row_head * D + d, result.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["splits", "capacity"])
def _attend_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    tables_ptr,
    lengths_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    counters_ptr,
    partial_ptr,
    lse_ptr,
    eps,
    scale,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    tables_row,
    splits,
    capacity,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    INSIDE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    HALF: tl.constexpr = ROTARY // 2
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    t = tl.arange(0, BLOCK_T)
    one = tl.arange(0, 1)

    # All of this is older than the previous kernel, which has let this one start only after its own
    # wait: slots of the step, the cache as earlier steps left it, weights.
    slot = tl.load(slots_ptr + row).to(tl.int64)
    # A sequence that has outgrown its row of the table must not read the next row's blocks.
    length = tl.minimum(tl.load(lengths_ptr + row), capacity)
    length = tl.where(slot < 0, 1, length)
    share, active = _shares(length, splits, BLOCK_T)
    begin = split * share
    end = tl.minimum(begin + share, length - 1)
    table = tables_ptr + row * tables_row
    key_of_head = key_ptr + kv_head * key_head
    value_of_head = value_ptr + kv_head * value_head
    key, value = _cached_tile(
        key_of_head,
        value_of_head,
        table,
        begin + t,
        begin + t < end,
        key_block,
        key_token,
        value_block,
        value_token,
        D,
        PAGE,
        BLOCK_D,
    )
    partner = tl.where(d < HALF, d + HALF, tl.where(d < ROTARY, d - HALF, d))
    q_norm = tl.load(q_norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    q_norm_partner = tl.load(q_norm_ptr + partner, mask=d < D, other=0.0).to(tl.float32)
    angles = cos_sin_ptr + tl.load(positions_ptr + row) * ROTARY + d % HALF
    cos = tl.load(angles, mask=d < ROTARY, other=1.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=d < ROTARY, other=0.0).to(tl.float32)
    sin = tl.where(d < HALF, -sin, sin)
    wait_for_previous(PDL)
    let_next_start(PDL)

    head_out = row * HEADS + kv_head * GROUP + g
    out_at = out_ptr + head_out[:, None] * D + d[None, :]
    head_mask = (g < GROUP)[:, None] & (d < D)[None, :]
    if slot < 0:
        if split == 0:
            tl.store(out_at, tl.zeros((BLOCK_G, BLOCK_D), out_ptr.dtype.element_ty), mask=head_mask)
        return
    if split >= active:
        return

    projected = qkv_ptr + row * ((HEADS + 2 * KV_HEADS) * D)
    q = _heads(
        projected,
        kv_head * GROUP + g,
        g < GROUP,
        q_norm,
        q_norm_partner,
        partner,
        cos,
        sin,
        eps,
        D,
        BLOCK_D,
    )
    if WIDEN:
        q = q.to(tl.float32)
    top = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    weight = tl.zeros((BLOCK_G,), tl.float32)
    total = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    if split == 0:
        k_norm = tl.load(k_norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        k_norm_partner = tl.load(k_norm_ptr + partner, mask=d < D, other=0.0).to(tl.float32)
        new_key = _heads(
            projected,
            HEADS + kv_head + one,
            one == 0,
            k_norm,
            k_norm_partner,
            partner,
            cos,
            sin,
            eps,
            D,
            BLOCK_D,
        )
        value_from = projected + (HEADS + KV_HEADS + kv_head) * D + d
        new_value = tl.load(value_from, mask=d < D, other=0.0)
        key_to = key_of_head + slot // PAGE * key_block + slot % PAGE * key_token
        value_to = value_of_head + slot // PAGE * value_block + slot % PAGE * value_token
        tl.store(key_to + d[None, :], new_key, mask=(d < D)[None, :])
        tl.store(value_to + d, new_value, mask=d < D)
        top = tl.sum(q.to(tl.float32) * new_key.to(tl.float32), 1) * scale
        weight = tl.full((BLOCK_G,), 1.0, tl.float32)
        total += new_value.to(tl.float32)[None, :]

    top, weight, total = _attend_tile(
        q, key, value, begin + t < end, scale, top, weight, total, WIDEN
    )
    for start in range(begin + BLOCK_T, end, BLOCK_T):
        key, value = _cached_tile(
            key_of_head,
            value_of_head,
            table,
            start + t,
            start + t < end,
            key_block,
            key_token,
            value_block,
            value_token,
            D,
            PAGE,
            BLOCK_D,
        )
        top, weight, total = _attend_tile(
            q, key, value, start + t < end, scale, top, weight, total, WIDEN
        )

    result = total / weight[:, None]
    if not SPLIT:
        tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=head_mask)
    else:
        if active == 1:
            tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=head_mask)
            return
        at = head_out * splits + split
        tl.store(lse_ptr + at, top + tl.log2(weight), mask=g < GROUP)
        tl.store(partial_ptr + at[:, None] * D + d[None, :], result, mask=head_mask)
        if INSIDE:
            # All threads have stored before one of them says so; who arrives last sees all of it.
            tl.debug_barrier()
            counter = counters_ptr + row * KV_HEADS + kv_head
            before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if before == active - 1:
                first = row * HEADS + kv_head * GROUP
                for i in tl.static_range(GROUP):
                    _join(
                        partial_ptr,
                        lse_ptr,
                        out_ptr,
                        first + i,
                        splits,
                        active,
                        D,
                        BLOCK_S,
                        BLOCK_D,
                    )


@triton.jit(do_not_specialize=["splits", "capacity"])
def _attend_join_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    slots_ptr,
    lengths_ptr,
    splits,
    capacity,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    length = tl.minimum(tl.load(lengths_ptr + row), capacity)
    _share, active = _shares(tl.where(slot < 0, 1, length), splits, BLOCK_T)
    wait_for_previous(PDL)
    let_next_start(PDL)
    if active == 1:  # written already
        return
    row_head = row * HEADS + tl.program_id(0)
    _join(partial_ptr, lse_ptr, out_ptr, row_head, splits, active, D, BLOCK_S, BLOCK_D)


@operation("attend", "triton: fused_attention", scratch=attend_scratch)
def attend(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    counters: torch.Tensor,
    eps: float,
    scale: float,
    partial: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    tile: AttendTile | None = None,
    pdl: bool = True,
) -> None:
    """out (M, Hq, D): norm and rotate queries and keys, write the cache, attend to it; one token a row.

    Must directly follow the `norm_qkv` that wrote `qkv` and zeroed `counters`: everything else is read
    while that may still be running. A row with a negative slot is padding: its projection and its
    block table are not read, it writes no cache, and its `out` is zero.

    Args:
        qkv: (M, (Hq + 2 Hk) * D), contiguous: queries, keys, values.
        q_norm, k_norm: (D,).
        cos_sin: (P, R), contiguous, cosines in the first half, sines in the second; the first R of D
            values are rotated, neox style, the others left alone.
        positions: (M,) int64, rows of `cos_sin`.
        slots: (M,) int64 or int32, where token seq_lens - 1 of the row lies in the cache: block *
            block_size + place.
        block_tables: (M, nb) int32.
        seq_lens: (M,) int32, the new token included, at least 1.
        key_cache, value_cache: (blocks, block_size, Hk, D).
        out: contiguous.
        counters: (M * Hk,) int32, zeros; counted up.
        eps, scale: of the norms; of the scores.
        partial, lse: see `scratch_of`; given where and only where the tile has several splits.
        tile: None: `attend_tile`.
        pdl: use programmatic dependent launch where the device has it.
    """
    rows, heads, d = out.shape
    page, kv_heads = key_cache.shape[1:3]
    tile = _tile(qkv, key_cache, block_tables) if tile is None else tile
    assert (partial is None) == (tile.splits == 1), "scratch of another tile"
    capacity = block_tables.shape[1] * page
    group = heads // kv_heads
    block_d = max(16, triton.next_power_of_2(d))
    block_s = triton.next_power_of_2(tile.splits)
    options = pdl_options(qkv) if pdl else {"PDL": False}
    _attend_kernel[(kv_heads, tile.splits, rows)](
        qkv,
        q_norm,
        k_norm,
        cos_sin,
        positions,
        slots,
        block_tables,
        seq_lens,
        key_cache,
        value_cache,
        out,
        counters,
        partial,
        lse,
        eps,
        scale * LOG2_E,
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        block_tables.stride(0),
        tile.splits,
        capacity,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=d,
        ROTARY=cos_sin.shape[1],
        PAGE=page,
        SPLIT=tile.splits > 1,
        INSIDE=tile.inside,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_D=block_d,
        BLOCK_T=tile.tokens,
        BLOCK_S=block_s,
        WIDEN=interpreted(qkv),
        num_warps=tile.warps,
        num_stages=2,
        **options,
    )
    if tile.splits > 1 and not tile.inside:
        _attend_join_kernel[(heads, rows)](
            partial,
            lse,
            out,
            slots,
            seq_lens,
            tile.splits,
            capacity,
            HEADS=heads,
            D=d,
            BLOCK_T=tile.tokens,
            BLOCK_S=block_s,
            BLOCK_D=block_d,
            num_warps=min(8, max(1, block_s * block_d // 1024)),
            **options,
        )
