# mypy: allow-untyped-defs
"""One new token's attention: norms of queries and keys, RoPE, cache write, flash decoding in two kernels.

A program of the first takes all query heads of one key-value head and one split of the tokens that the
cache already holds, or the new token. It norms and rotates its queries itself. The new token never
passes through the cache: its program stores it there and is a split of its own, so no program reads
what another one writes, and keys and values of a split are on their way while the projection before is
still finishing. After its wait a program has a chain of few short links: that chain is the time of this
kernel at small batches, where it has next to nothing to read.

The second kernel joins the splits in their order, whichever ended first. Joining by the program that
arrives last was measured (H200): counter, fence and the reading of other programs' results cost 5 µs
more than the launch.

Annotations are not postponed in this module: Triton reads ``tl.constexpr`` from them.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from graphcap.decode.kernels.triton_attention import LOG2_E, processors
from graphcap.moe.kernels.triton_gemm import interpreted
from graphcap.moe.kernels.triton_pdl import let_next_start, pdl_options, wait_for_previous
from graphcap.operations import BufferSpec, operation

MAX_SPLITS = 128


class AttendTile(NamedTuple):
    """Into how many splits the cached tokens are divided at the most, tokens of one iteration, warps."""

    splits: int
    tokens: int
    warps: int


class HasSplits(Protocol):
    """A tile of attention, whoever makes the parts."""

    @property
    def splits(self) -> int: ...


def attend_tile(
    rows: int, kv_heads: int, capacity: int, head_bytes: int, multiprocessors: int
) -> AttendTile:
    """The tile of `attend` for block tables of `capacity` tokens; it depends on static shapes only.

    As many splits as give every multiprocessor two programs, but none of less than one iteration, whose
    keys and values (`head_bytes` a token each) registers must hold. Short tables take short iterations:
    fewer links in the chain.
    """
    tokens = 16 if head_bytes > 512 else 64 if capacity >= 2048 and head_bytes <= 256 else 32
    wanted = max(1, 2 * multiprocessors // (rows * kv_heads))
    splits = max(1, min(wanted, triton.cdiv(capacity, tokens), MAX_SPLITS))
    return AttendTile(splits, tokens, 4 if head_bytes <= 512 else 8)


def _tile(qkv: torch.Tensor, key_cache: torch.Tensor, block_tables: torch.Tensor) -> AttendTile:
    page, kv_heads, d = key_cache.shape[1:4]
    return attend_tile(
        qkv.shape[0],
        kv_heads,
        block_tables.shape[1] * page,
        d * qkv.element_size(),
        processors(qkv.device),
    )


def scratch_of(tile: HasSplits, out: torch.Tensor) -> Mapping[str, BufferSpec]:
    """Results (M, Hq, 1 + splits, D) of the new token and of every split, and their log2-sum-exp."""
    rows, heads, d = out.shape
    return {
        "partial": ((rows, heads, 1 + tile.splits, d), torch.float32),
        "lse": ((rows, heads, 1 + tile.splits), torch.float32),
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
    splits have any."""
    cached = length - 1
    share = tl.maximum(tl.cdiv(tl.cdiv(cached, splits), BLOCK_T), 1) * BLOCK_T
    return share, tl.cdiv(cached, share)


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
    HALF: tl.constexpr,
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
    x = ((x * scale).to(dtype).to(tl.float32) * norm.to(tl.float32)).to(dtype).to(tl.float32)
    other = (other * scale).to(dtype).to(tl.float32) * norm_partner.to(tl.float32)
    other = other.to(dtype).to(tl.float32)
    sin = tl.where((d < HALF)[None, :], -sin.to(tl.float32), sin.to(tl.float32))
    return (x * cos.to(tl.float32) + other * sin).to(dtype)


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
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    part = tl.program_id(1)  # 0: the new token; otherwise split part - 1
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
    position = tl.load(positions_ptr + row)
    # A sequence that has outgrown its row of the table must not read the next row's blocks.
    length = tl.minimum(tl.load(lengths_ptr + row), capacity)
    length = tl.where(slot < 0, 1, length)
    share, active = _shares(length, splits, BLOCK_T)
    begin = (part - 1) * share
    # The program of the new token reads no other one.
    end = tl.where(part == 0, 0, tl.minimum(begin + share, length - 1))
    table = tables_ptr + row * tables_row
    key_of_head = key_ptr + kv_head * key_head
    value_of_head = value_ptr + kv_head * value_head
    valid = (begin + t >= 0) & (begin + t < end)
    key, value = _cached_tile(
        key_of_head,
        value_of_head,
        table,
        begin + t,
        valid,
        key_block,
        key_token,
        value_block,
        value_token,
        D,
        PAGE,
        BLOCK_D,
    )
    partner = tl.where(d < HALF, d + HALF, tl.where(d < ROTARY, d - HALF, d))
    # Of the shape in which they are used: every other one would be brought into its layout through
    # shared memory, a barrier after each load, and so one load would wait for the other.
    wide = tl.zeros((BLOCK_G, 1), tl.int32)
    q_norm = tl.load(q_norm_ptr + (wide + d[None, :]), mask=(d < D)[None, :], other=0.0)
    q_norm_partner = tl.load(
        q_norm_ptr + (wide + partner[None, :]), mask=(d < D)[None, :], other=0.0
    )
    angles = cos_sin_ptr + position * ROTARY + (wide + (d % HALF)[None, :])
    cos = tl.load(angles, mask=(d < ROTARY)[None, :], other=1.0)
    sin = tl.load(angles + HALF, mask=(d < ROTARY)[None, :], other=0.0)
    k_norm = tl.load(k_norm_ptr + d[None, :], mask=(d < D)[None, :], other=0.0)
    k_norm_partner = tl.load(k_norm_ptr + partner[None, :], mask=(d < D)[None, :], other=0.0)
    k_angles = cos_sin_ptr + position * ROTARY + (d % HALF)[None, :]
    k_cos = tl.load(k_angles, mask=(d < ROTARY)[None, :], other=1.0)
    k_sin = tl.load(k_angles + HALF, mask=(d < ROTARY)[None, :], other=0.0)
    wait_for_previous(PDL)
    let_next_start(PDL)
    if (slot < 0) | (part > active):
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
        HALF,
        BLOCK_D,
    )
    head_out = row * HEADS + kv_head * GROUP + g
    head_mask = (g < GROUP)[:, None] & (d < D)[None, :]
    at = head_out * (1 + splits) + part
    partial_at = partial_ptr + at[:, None] * D + d[None, :]
    if part == 0:
        new_key = _heads(
            projected,
            HEADS + kv_head + one,
            one == 0,
            k_norm,
            k_norm_partner,
            partner,
            k_cos,
            k_sin,
            eps,
            D,
            HALF,
            BLOCK_D,
        )
        value_from = projected + (HEADS + KV_HEADS + kv_head) * D + d
        new_value = tl.load(value_from, mask=d < D, other=0.0)
        key_to = key_of_head + slot // PAGE * key_block + slot % PAGE * key_token
        value_to = value_of_head + slot // PAGE * value_block + slot % PAGE * value_token
        tl.store(key_to + d[None, :], new_key, mask=(d < D)[None, :])
        tl.store(value_to + d, new_value, mask=d < D)
        score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32), 1) * scale
        tl.store(lse_ptr + at, score, mask=g < GROUP)
        # A softmax over one token is 1.
        alone = tl.zeros((BLOCK_G, BLOCK_D), tl.float32) + new_value.to(tl.float32)[None, :]
        tl.store(partial_at, alone, mask=head_mask)
        return

    if WIDEN:
        q = q.to(tl.float32)
        key = key.to(tl.float32)
        value = value.to(tl.float32)
    # The first tile has a valid token: nothing is under way that it would have to be joined with.
    score = tl.dot(q, key, input_precision="ieee") * scale
    score = tl.where(valid[None, :], score, -float("inf"))
    top = tl.max(score, 1)
    p = tl.exp2(score - top[:, None])
    weight = tl.sum(p, 1)
    total = tl.dot(p.to(value.dtype), value, input_precision="ieee")
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
        if WIDEN:
            key = key.to(tl.float32)
            value = value.to(tl.float32)
        score = tl.dot(q, key, input_precision="ieee") * scale
        score = tl.where((start + t < end)[None, :], score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - higher)
        p = tl.exp2(score - higher[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        total = tl.dot(p.to(value.dtype), value, total * shrink[:, None], input_precision="ieee")
        top = higher
    tl.store(lse_ptr + at, top + tl.log2(weight), mask=g < GROUP)
    tl.store(partial_at, total / weight[:, None], mask=head_mask)


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
    """out of one head, BLOCK_D of its values: every part by its share of the softmax."""
    row = tl.program_id(2)
    head = row * HEADS + tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    slot = tl.load(slots_ptr + row)
    length = tl.minimum(tl.load(lengths_ptr + row), capacity)
    _share, active = _shares(length, splits, BLOCK_T)
    parts = tl.where(slot < 0, 0, 1 + active)
    first = head * (1 + splits)
    at = partial_ptr + (first + s)[:, None] * D + d[None, :]
    wait_for_previous(PDL)
    let_next_start(PDL)
    lse = tl.load(lse_ptr + first + s, mask=s < parts, other=-float("inf"))
    partial = tl.load(at, mask=(s < parts)[:, None] & (d < D)[None, :], other=0.0)
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(parts > 0, top, 0.0))  # of padding: zeros, and so is its result
    result = tl.sum(partial * weight[:, None], 0) / tl.where(parts > 0, tl.sum(weight, 0), 1.0)
    tl.store(out_ptr + head * D + d, result.to(out_ptr.dtype.element_ty), mask=d < D)


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
    eps: float,
    scale: float,
    partial: torch.Tensor,
    lse: torch.Tensor,
    tile: AttendTile | None = None,
    pdl: bool = True,
) -> None:
    """out (M, Hq, D): norm and rotate queries and keys, write the cache, attend to it; one token a row.

    Everything but `qkv` is read while the kernel before may still be running: that kernel may write
    `qkv` alone. A row with a negative slot is padding: its projection and its block table are not read,
    it writes no cache, and its `out` is zero.

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
        eps, scale: of the norms; of the scores.
        partial, lse: see `scratch_of`.
        tile: None: `attend_tile`.
        pdl: use programmatic dependent launch where the device has it.
    """
    rows, heads, d = out.shape
    page, kv_heads = key_cache.shape[1:3]
    tile = _tile(qkv, key_cache, block_tables) if tile is None else tile
    assert partial.shape[2] == 1 + tile.splits, "scratch of another tile"
    capacity = block_tables.shape[1] * page
    group = heads // kv_heads
    block_d = max(16, triton.next_power_of_2(d))
    options = pdl_options(qkv) if pdl else {"PDL": False}
    _attend_kernel[(kv_heads, 1 + tile.splits, rows)](
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
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_D=block_d,
        BLOCK_T=tile.tokens,
        WIDEN=interpreted(qkv),
        num_warps=tile.warps,
        num_stages=2,
        **options,
    )
    join(partial, lse, out, slots, seq_lens, tile.splits, tile.tokens, capacity, pdl)


def join(
    partial: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    splits: int,
    tokens: int,
    capacity: int,
    pdl: bool = True,
) -> None:
    """out (M, Hq, D) of the parts that `splits` and `tokens` of a tile, and the tokens of a block table,
    `capacity`, make of each sequence; padding is zero."""
    rows, heads, d = out.shape
    block_s = triton.next_power_of_2(1 + splits)
    options = pdl_options(out) if pdl else {"PDL": False}
    # 16 KiB of partial results a program at the most, but no less than a sector of each.
    columns = min(max(16, triton.next_power_of_2(d)), max(8, 4096 // block_s))
    _attend_join_kernel[(heads, triton.cdiv(d, columns), rows)](
        partial,
        lse,
        out,
        slots,
        seq_lens,
        splits,
        capacity,
        HEADS=heads,
        D=d,
        BLOCK_T=tokens,
        BLOCK_S=block_s,
        BLOCK_D=columns,
        num_warps=min(4, max(1, block_s * columns // 1024)),
        **options,
    )
