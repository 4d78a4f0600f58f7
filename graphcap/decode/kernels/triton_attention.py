# mypy: allow-untyped-defs
"""Decode attention over a paged cache: flash decoding, the sequence split among programs.

One program takes all query heads of one key-value head (so the cache is read once) and one split.
The number of splits depends on static shapes only; each sequence is shared out among them by its
length, so short sequences in a long table stay balanced. A second launch joins the splits.
"""

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl

from graphcap.moe.kernels.triton_gemm import interpreted
from graphcap.operations import BufferSpec, operation

MAX_SPLITS = 64
TOKENS_PER_SPLIT = 128
"""A split should have at least this many tokens when the table is full."""

LOG2_E = 1.4426950408889634


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; elsewhere the H200's, so that the same plan is tested."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 132


def split_count(rows: int, kv_heads: int, capacity: int, multiprocessors: int) -> int:
    """Into how many splits `attention` divides a sequence; 1 means a single launch.

    Enough for two programs a multiprocessor, no more than the table's capacity is worth.
    """
    if capacity <= 2 * TOKENS_PER_SPLIT:
        return 1
    wanted = 2 * multiprocessors // (rows * kv_heads)
    return max(1, min(wanted, triton.cdiv(capacity, TOKENS_PER_SPLIT), MAX_SPLITS))


def attention_scratch(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    *_: object,
) -> Mapping[str, BufferSpec]:
    """Partial results (M, Hq, splits, D) and their log2-sum-exp; nothing where one split does."""
    rows, heads, d = q.shape
    page, kv_heads = key_cache.shape[1:3]
    capacity = block_tables.shape[1] * page
    splits = split_count(rows, kv_heads, capacity, processors(q.device))
    if splits == 1:
        return {}
    return {
        "partial": ((rows, heads, splits, d), torch.float32),
        "lse": ((rows, heads, splits), torch.float32),
    }


@triton.jit(do_not_specialize=["splits"])
def _attention_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    lengths_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    q_row,
    q_head,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    tables_row,
    out_row,
    out_head,
    heads,
    splits,
    capacity,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDEN: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    # A sequence that has outgrown its row of the table must not read the next row's blocks.
    length = tl.minimum(tl.load(lengths_ptr + row), capacity)
    share = tl.cdiv(tl.cdiv(length, splits), BLOCK_T) * BLOCK_T
    begin = split * share
    end = tl.minimum(begin + share, length)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    t = tl.arange(0, BLOCK_T)
    head = kv_head * GROUP + g
    q_mask = (g < GROUP)[:, None] & (d < D)[None, :]
    q_at = q_ptr + row * q_row + head[:, None] * q_head + d[None, :]
    q = tl.load(q_at, mask=q_mask, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    top = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    weight = tl.zeros((BLOCK_G,), tl.float32)
    total = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_T):
        position = start + t
        valid = position < end
        page = tl.load(tables_ptr + row * tables_row + position // PAGE, mask=valid, other=0)
        page = page.to(tl.int64)
        place = position % PAGE
        key_at = key_ptr + page * key_block + place * key_token + kv_head * key_head
        # Beyond the sequence the cache may hold anything, NaN too: neither keys nor values are read.
        key = tl.load(
            key_at[None, :] + d[:, None], mask=valid[None, :] & (d < D)[:, None], other=0.0
        )
        value_at = value_ptr + page * value_block + place * value_token + kv_head * value_head
        value = tl.load(
            value_at[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0
        )
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
        top = higher

    # A split without tokens (and a sequence of length 0) has weight 0: its result is 0, not 0 / 0.
    some = weight > 0.0
    safe = tl.where(some, weight, 1.0)
    result = total / safe[:, None]
    if SPLIT:
        at = (row * heads + head) * splits + split
        lse = tl.where(some, top + tl.log2(safe), -float("inf"))
        tl.store(lse_ptr + at, lse, mask=g < GROUP)
        partial_at = partial_ptr + at[:, None] * D + d[None, :]
        tl.store(partial_at, result, mask=q_mask & some[:, None])
    else:
        out_at = out_ptr + row * out_row + head[:, None] * out_head + d[None, :]
        tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["splits"])
def _join_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    out_row,
    out_head,
    heads,
    splits,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    first = (row * heads + head) * splits
    lse = tl.load(lse_ptr + first + s, mask=s < splits, other=-float("inf"))
    some = lse > -float("inf")
    weight = tl.where(some, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    partial_at = partial_ptr + (first + s)[:, None] * D + d[None, :]
    partial = tl.load(partial_at, mask=some[:, None] & (d < D)[None, :], other=0.0)
    # The heaviest split weighs 1, so only a sequence of length 0 has a sum below that.
    result = tl.sum(partial * weight[:, None], 0) / tl.maximum(tl.sum(weight, 0), 1.0)
    out_at = out_ptr + row * out_row + head * out_head + d
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=d < D)


@operation("attention", "triton: flash_decoding", scratch=attention_scratch)
def attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    partial: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """out (M, Hq, D): each row's query q (M, Hq, D) attends to its own sequence in the cache.

    key_cache and value_cache (blocks, block_size, Hk, D), block_tables (M, nb) int32, seq_lens (M,)
    int32 with the newest token included. q and out may be strided views with contiguous rows.
    Without the scratch buffers the whole sequence is one split.
    """
    rows, heads, d = q.shape
    page, kv_heads = key_cache.shape[1:3]
    group = heads // kv_heads
    splits = 1 if partial is None else partial.shape[2]
    block_d = max(16, triton.next_power_of_2(d))
    wide = q.element_size() > 2
    _attention_kernel[(kv_heads, splits, rows)](
        q,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        out,
        partial,
        lse,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        heads,
        splits,
        block_tables.shape[1] * page,
        GROUP=group,
        D=d,
        PAGE=page,
        SPLIT=splits > 1,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_D=block_d,
        BLOCK_T=32 if wide else 64,
        WIDEN=interpreted(q),
        num_warps=4,
        num_stages=1 if wide else 2,
    )
    if splits > 1:
        block_s = triton.next_power_of_2(splits)
        _join_kernel[(heads, rows)](
            partial,
            lse,
            out,
            out.stride(0),
            out.stride(1),
            heads,
            splits,
            D=d,
            BLOCK_S=block_s,
            BLOCK_D=block_d,
            num_warps=min(8, max(1, block_s * block_d // 1024)),
        )
