"""The newer generation."""

from __future__ import annotations

from typing import Any

import torch

from ixformer_standin import moe
from ixformer_standin.arithmetic import attend, check_attention, check_norm, norm, rotate
from ixformer_standin.checks import (
    MODEL_DTYPES,
    Misuse,
    host_range,
    number,
    operation,
    rows_without_gaps,
    tensor,
)


@operation
def rms_norm(input: Any, weight: Any, eps: Any = 1e-5, output: Any = None) -> Any:
    check_norm(input, weight, eps)
    tensor("output", output, tuple(input.shape), input.dtype)
    output.copy_(norm(input, weight, eps))
    return output


@operation
def residual_rms_norm(
    input: Any,
    weight: Any,
    eps: Any = 1e-5,
    residual_alpha: Any = 1.0,
    residual: Any = None,
    residual_bias: Any = None,
    output: Any = None,
    residual_output: Any = None,
    is_post: Any = False,
) -> Any:
    check_norm(input, weight, eps)
    number("residual_alpha", residual_alpha, float, 1.0)
    shape = tuple(input.shape)
    for name, value in (
        ("residual", residual),
        ("output", output),
        ("residual_output", residual_output),
    ):
        tensor(name, value, shape, input.dtype)
    if residual_bias is not None:
        raise Misuse("residual_bias: expected None")
    number("is_post", is_post, bool, False)
    total = input + residual
    residual_output.copy_(total)
    output.copy_(norm(total, weight, eps))
    return output, residual_output


@operation
def vllm_rotary_embedding(
    positions: Any,
    query: Any,
    key: Any,
    head_size: Any,
    cos_sin_cache: Any,
    is_neox_style: Any = True,
) -> None:
    rotate(positions, query, key, head_size, cos_sin_cache, is_neox_style)


@operation
def reshape_and_cache_flash(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: Any,
    k_scale: Any,
    v_scale: Any,
) -> None:
    number("kv_cache_dtype", kv_cache_dtype, str, "auto")
    number("k_scale", k_scale, float, 1.0)
    number("v_scale", v_scale, float, 1.0)
    tensor("key", key, (None, None, None), *MODEL_DTYPES, dense=False)
    rows, heads, dim = key.shape
    tensor("value", value, (rows, heads, dim), key.dtype, dense=False)
    rows_without_gaps("key", key)
    rows_without_gaps("value", value)
    tensor("key_cache", key_cache, (None, heads, None, dim), key.dtype)
    tensor("value_cache", value_cache, tuple(key_cache.shape), key.dtype)
    tensor("slot_mapping", slot_mapping, (rows,), torch.int64)
    blocks, block_size = key_cache.shape[0], key_cache.shape[2]
    host_range("slot_mapping", slot_mapping, 0, blocks * block_size)
    at = (slot_mapping // block_size, slot_mapping % block_size)
    key_cache.transpose(1, 2)[at] = key
    value_cache.transpose(1, 2)[at] = value


@operation
def vllm_paged_attention(
    output: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    num_kv_heads: Any,
    scale: Any,
    block_tables: Any,
    context_lens: Any,
    block_size: Any,
    max_context_len: Any,
    alibi_slopes: Any = None,
    softcap: Any = 0.0,
    causal: Any = True,
    window_left: Any = -1,
    window_right: Any = -1,
    use_cuda_graph: Any = False,
    use_sqrt_alibi: Any = False,
) -> Any:
    tensor("query", query, (None, None, None), *MODEL_DTYPES)
    rows, heads, dim = query.shape
    number("num_kv_heads", num_kv_heads, int)
    tensor("key_cache", key_cache, (None, num_kv_heads, block_size, dim), query.dtype)
    tensor("value_cache", value_cache, tuple(key_cache.shape), query.dtype)
    number("softcap", softcap, float, 0.0)
    number("causal", causal, bool, True)
    number("window_left", window_left, int, -1)
    number("window_right", window_right, int, -1)
    number("use_cuda_graph", use_cuda_graph, bool, True)
    number("use_sqrt_alibi", use_sqrt_alibi, bool, False)
    lengths = (block_size, max_context_len, alibi_slopes)
    blocks = key_cache.shape[0]
    check_attention(output, query, scale, block_tables, context_lens, *lengths, blocks)
    table = block_tables.long()
    keys, values = (
        cache[table].transpose(1, 2).reshape(rows, num_kv_heads, -1, dim)
        for cache in (key_cache, value_cache)
    )
    each = torch.arange(heads, device=query.device) // (heads // num_kv_heads)
    output.copy_(attend(query, keys, values, each, context_lens, scale))
    return output


def paged_attention_of_ixformer(
    output: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    num_kv_heads: Any,
    scale: Any,
    block_tables: Any,
    context_lens: Any,
    block_size: Any,
    max_context_len: Any,
    alibi_slopes: Any = None,
    softcap: Any = 0.0,
    use_sqrt_alibi: Any = False,
    need_view: Any = True,
) -> Any:
    """What is called ``vllm_paged_attention`` under ``IXFORMER_PAGED_ATTENTION_ALGO=ixformer``."""
    number("softcap", softcap, float, 0.0)
    number("use_sqrt_alibi", use_sqrt_alibi, bool, False)
    number("need_view", need_view, bool, True)
    table = (block_tables, context_lens, block_size, max_context_len, alibi_slopes)
    caches = (key_cache, value_cache, num_kv_heads)
    return vllm_paged_attention(
        output, query, *caches, scale, *table, 0.0, True, -1, -1, use_cuda_graph=True
    )


OPERATIONS = {
    **moe.OPERATIONS,
    **{
        function.__name__: function
        for function in (
            rms_norm,
            residual_rms_norm,
            vllm_rotary_embedding,
            reshape_and_cache_flash,
            vllm_paged_attention,
        )
    },
}
