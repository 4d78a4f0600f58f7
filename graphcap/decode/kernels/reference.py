"""Kernels of the decode step in plain torch: the oracle of the others, and what CPUs run.

They round where transformers' Qwen3-MoE rounds, so that bfloat16 results can be compared. Nothing
allocates (temporaries are scratch from the pool) and nothing synchronises.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphcap.moe.kernels.constants import constant
from graphcap.operations import BufferSpec, operation


@operation("embedding")
def embedding(ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """out (M, H) = table (V, H)[ids (M,) int32]."""
    torch.index_select(table, 0, ids, out=out)


@operation("projections")
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out (M, N) = x (M, A) @ weight (N, A).T + bias (N,)."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _norm_scratch(x: torch.Tensor, *_: object) -> Mapping[str, BufferSpec]:
    shape = tuple(x.shape)
    return {
        "wide": (shape, torch.float32),
        "square": (shape, torch.float32),
        "scale": ((*shape[:-1], 1), torch.float32),
    }


def _normalise(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    wide: torch.Tensor,
    square: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    wide.copy_(x)
    torch.mul(wide, wide, out=square)
    torch.sum(square, -1, keepdim=True, out=scale)
    width = constant(x.shape[-1], x.device, torch.float32)
    torch.addcdiv(constant(eps, x.device, torch.float32), scale, width, out=scale)
    scale.rsqrt_()
    wide.mul_(scale)
    out.copy_(wide)  # rounds to the model's dtype before the weight is applied
    out.mul_(weight)


@operation("rms_norm", scratch=_norm_scratch)
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    **scratch: torch.Tensor,
) -> None:
    """out = x / sqrt(mean(x²) + eps) * weight over the last dimension. `out` may be `x`."""
    _normalise(x, weight, out, eps, **scratch)


@operation("fused_add_rms_norm", scratch=_norm_scratch)
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    **scratch: torch.Tensor,
) -> None:
    """In place: residual (M, H) += x; x (M, H) = rms_norm(residual) * weight."""
    residual.add_(x)
    _normalise(residual, weight, x, eps, **scratch)


def _rotary_scratch(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor
) -> Mapping[str, BufferSpec]:
    rows, heads, dim = q.shape
    return {
        "angles": ((rows, dim), cos_sin.dtype),
        "first": ((rows, heads, dim // 2), q.dtype),
        "second": ((rows, heads, dim // 2), q.dtype),
    }


@operation("rotary_embedding", scratch=_rotary_scratch)
def rotary_embedding(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    angles: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
) -> None:
    """Rotate q (M, Hq, D) and k (M, Hk, D) in place, neox style.

    cos_sin: (P, D) in the model's dtype: cosines of position p in [p, :D/2], sines in [p, D/2:].
    """
    torch.index_select(cos_sin, 0, positions, out=angles)
    half = q.shape[-1] // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    for x in (q, k):
        a, b = x[..., :half], x[..., half:]
        first_part, second_part = first[:, : x.shape[1]], second[:, : x.shape[1]]
        torch.mul(b, sin, out=first_part)
        torch.mul(a, sin, out=second_part)
        a.mul_(cos).sub_(first_part)
        b.mul_(cos).add_(second_part)


def _write_scratch(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> Mapping[str, BufferSpec]:
    rows = k.shape[0]
    return {
        "slots": ((rows,), torch.int64),
        "is_pad": ((rows,), torch.bool),
        "kept": (tuple(k.shape), k.dtype),
    }


@operation("cache write", scratch=_write_scratch)
def cache_write(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    slots: torch.Tensor,
    is_pad: torch.Tensor,
    kept: torch.Tensor,
) -> None:
    """Store k, v (M, Hk, D) at slot_mapping (M,) of caches (blocks, block_size, Hk, D).

    Rows with a negative slot store nothing: they write slot 0 of the reserved null block back as it
    was, which keeps the shapes fixed.
    """
    torch.lt(slot_mapping, constant(0, k.device, slot_mapping.dtype), out=is_pad)
    torch.clamp(slot_mapping, min=0, out=slots)
    for new, cache in ((k, key_cache), (v, value_cache)):
        flat = cache.view(-1, *cache.shape[2:])
        torch.index_select(flat, 0, slots, out=kept)
        torch.where(is_pad[:, None, None], kept, new, out=kept)
        flat.index_copy_(0, slots, kept)


def _attention_scratch(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> Mapping[str, BufferSpec]:
    rows, heads, dim = q.shape
    block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    blocks = block_tables.shape[1]
    context = blocks * block_size
    gathered = (rows * blocks, block_size, kv_heads, dim)
    scores = (kv_heads * rows * (heads // kv_heads) * context,)
    return {
        "table": ((rows * blocks,), torch.int32),
        "keys": (gathered, q.dtype),
        "values": (gathered, q.dtype),
        "scores": (scores, q.dtype),
        "wide": (scores, torch.float32),
        "probabilities": (scores, torch.float32),
        "reach": ((context,), torch.int32),
        "beyond": ((rows * context,), torch.bool),
        "head_out": ((kv_heads, rows, heads // kv_heads, dim), q.dtype),
    }


@operation("attention", scratch=_attention_scratch)
def attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    *,
    table: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scores: torch.Tensor,
    wide: torch.Tensor,
    probabilities: torch.Tensor,
    reach: torch.Tensor,
    beyond: torch.Tensor,
    head_out: torch.Tensor,
) -> None:
    """out (M, Hq, D): each row's query attends to the first seq_lens[m] >= 1 tokens of its blocks.

    block_tables: (M, blocks) int32; entries beyond a sequence hold 0, the null block. What the cache
    holds beyond seq_lens is masked, NaN included.
    """
    rows, heads, dim = q.shape
    block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    group, blocks = heads // kv_heads, block_tables.shape[1]
    if q.device.type == "cpu":  # lengths are host memory: no more than the longest row is looked at
        blocks = min(blocks, -(-max(seq_lens.tolist()) // block_size))
    context = blocks * block_size
    grid = (kv_heads, rows, group, context)
    size = kv_heads * rows * group * context
    scores, wide = scores[:size].view(grid), wide[:size].view(grid)
    probabilities, reach = probabilities[:size].view(grid), reach[:context]
    beyond, table = beyond[: rows * context].view(rows, context), table[: rows * blocks]
    keys, values = keys[: rows * blocks], values[: rows * blocks]

    table.view(rows, blocks).copy_(block_tables[:, :blocks])
    torch.index_select(key_cache, 0, table, out=keys)
    torch.index_select(value_cache, 0, table, out=values)
    torch.arange(context, out=reach)
    torch.ge(reach[None, :], seq_lens[:, None], out=beyond)
    zero = constant(0, q.device, q.dtype)
    # where, not masked_fill_: that reads its value on the host.
    by_token = values.view(rows, context, kv_heads, dim)
    torch.where(beyond[:, :, None, None], zero, by_token, out=by_token)
    for head in range(kv_heads):
        head_keys = keys.view(rows, context, kv_heads, dim)[:, :, head]
        queries = q[:, head * group : (head + 1) * group]
        torch.baddbmm(
            scores[head],
            queries,
            head_keys.transpose(1, 2),
            beta=0,
            alpha=scale,
            out=scores[head],
        )
    wide.copy_(scores)
    lowest = constant(float("-inf"), q.device, torch.float32)
    torch.where(beyond[None, :, None, :], lowest, wide, out=wide)
    torch.softmax(wide, -1, out=probabilities)
    scores.copy_(probabilities)
    for head in range(kv_heads):
        head_values = values.view(rows, context, kv_heads, dim)[:, :, head]
        torch.bmm(scores[head], head_values, out=head_out[head])
        out[:, head * group : (head + 1) * group].copy_(head_out[head])


def _argmax_scratch(logits: torch.Tensor, out: torch.Tensor) -> Mapping[str, BufferSpec]:
    return {"index": (tuple(out.shape), torch.int64)}


@operation("sampling", scratch=_argmax_scratch)
def argmax(logits: torch.Tensor, out: torch.Tensor, *, index: torch.Tensor) -> None:
    """out (M,) int32 = index of the largest logit (M, V); of equal ones the lowest."""
    torch.argmax(logits, -1, out=index)
    out.copy_(index)


def _advance_scratch(
    sampled: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> Mapping[str, BufferSpec]:
    rows = sampled.shape[0]
    return {
        "is_real": ((rows,), torch.bool),
        "one": ((rows,), torch.int32),
        "wide_one": ((rows,), torch.int64),
        "block": ((rows, 1), torch.int64),
        "entry": ((rows, 1), torch.int32),
        "slot": ((rows,), torch.int64),
        "next_slot": ((rows,), slot_mapping.dtype),
        "offset": ((rows,), torch.int64),
        "beyond": ((rows,), torch.bool),
        "unowned": ((rows, 1), torch.bool),
    }


@operation("advance", scratch=_advance_scratch)
def advance(
    sampled: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    *,
    is_real: torch.Tensor,
    one: torch.Tensor,
    wide_one: torch.Tensor,
    block: torch.Tensor,
    entry: torch.Tensor,
    slot: torch.Tensor,
    next_slot: torch.Tensor,
    offset: torch.Tensor,
    beyond: torch.Tensor,
    unowned: torch.Tensor,
) -> None:
    """Make the slots those of the next token, in place, for rows with slot_mapping >= 0.

    token_ids (M,) int32 = sampled; positions (M,) int64 and seq_lens (M,) int32 grow by one;
    slot_mapping (M,) int64 or int32 is where the new position lies in the cache, or -1 beyond the blocks of
    the sequence (past the end of its row of block_tables, or where that holds the null block 0).
    """
    device, blocks = sampled.device, block_tables.shape[1]
    size = constant(block_size, device, torch.int64)
    torch.ge(slot_mapping, constant(0, device, slot_mapping.dtype), out=is_real)
    torch.where(is_real, sampled, token_ids, out=token_ids)
    one.copy_(is_real)
    wide_one.copy_(is_real)
    positions.add_(wide_one)  # operands of one dtype: mixed ones make torch allocate
    seq_lens.add_(one)
    torch.div(positions, size, rounding_mode="floor", out=block[:, 0])
    torch.ge(block[:, 0], constant(blocks, device, torch.int64), out=beyond)
    block.clamp_(max=blocks - 1)
    torch.gather(block_tables, 1, block, out=entry)
    torch.eq(entry, constant(0, device, torch.int32), out=unowned)
    torch.logical_or(beyond, unowned[:, 0], out=beyond)
    torch.remainder(positions, size, out=offset)
    slot.copy_(entry[:, 0])
    slot.mul_(size).add_(offset)
    torch.where(beyond, constant(-1, device, torch.int64), slot, out=slot)
    next_slot.copy_(slot)  # of one dtype with the mapping, which may be int32
    torch.where(is_real, next_slot, slot_mapping, out=slot_mapping)
