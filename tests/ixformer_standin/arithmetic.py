"""Norm, rotation and attention in torch, for both generations."""

from __future__ import annotations

from typing import Any

import torch

from ixformer_standin.checks import MODEL_DTYPES, host_range, number, tensor


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def check_norm(input: Any, weight: Any, eps: Any) -> None:
    if isinstance(input, torch.Tensor):
        tensor("input", input, (None,) * input.dim(), *MODEL_DTYPES)
    else:
        tensor("input", input, (None, None), *MODEL_DTYPES)
    tensor("weight", weight, (input.shape[-1],), input.dtype)
    number("eps", eps, float)


def rotate(
    positions: Any, query: Any, key: Any, head_size: Any, cos_sin_cache: Any, is_neox: Any
) -> None:
    tensor("positions", positions, (None,), torch.int64)
    rows = positions.shape[0]
    tensor("query", query, (rows, None), *MODEL_DTYPES)
    tensor("key", key, (rows, None), query.dtype)
    number("head_size", head_size, int)
    tensor("cos_sin_cache", cos_sin_cache, (None, head_size), query.dtype)
    number("is_neox", is_neox, bool, True)
    host_range("positions", positions, 0, cos_sin_cache.shape[0])
    cos, sin = cos_sin_cache[positions].float()[:, None].chunk(2, -1)
    for x in (query, key):
        a, b = x.view(rows, -1, head_size).float().chunk(2, -1)
        x.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(1))


def check_attention(
    output: Any,
    query: Any,
    scale: Any,
    block_tables: Any,
    context_lens: Any,
    block_size: Any,
    max_context_len: Any,
    alibi_slopes: Any,
    blocks: int,
) -> None:
    tensor("query", query, (None, None, None), *MODEL_DTYPES)
    tensor("output", output, tuple(query.shape), query.dtype)
    number("scale", scale, float)
    tensor("block_tables", block_tables, (query.shape[0], None), torch.int32)
    tensor("context_lens", context_lens, (query.shape[0],), torch.int32)
    number("block_size", block_size, int)
    number("max_context_len", max_context_len, int)
    assert alibi_slopes is None
    host_range("block_tables", block_tables, 0, blocks)
    reach = min(max_context_len, block_tables.shape[1] * block_size)
    host_range("context_lens", context_lens, 1, reach + 1)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    head_mapping: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """query (M, Hq, D); keys, values (M, Hk, T, D), anything beyond a row's length masked."""
    if query.is_cpu:
        longest = int(context_lens.max())
        keys, values = keys[:, :, :longest], values[:, :, :longest]
    beyond = torch.arange(keys.shape[2], device=query.device) >= context_lens[:, None]
    keys, values = keys[:, head_mapping.long()].float(), values[:, head_mapping.long()].float()
    scores = torch.einsum("mhd,mhtd->mht", query.float(), keys) * scale
    scores = scores.masked_fill(beyond[:, None], float("-inf"))
    values = values.masked_fill(beyond[:, None, :, None], 0)
    return torch.einsum("mht,mhtd->mhd", scores.softmax(-1), values)
