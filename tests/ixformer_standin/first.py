"""Generation 0.4, with the MoE operations that its builds for BI-V100 lack."""

from __future__ import annotations

from typing import Any

import torch

from ixformer_standin import moe
from ixformer_standin.arithmetic import attend, check_attention, check_norm, norm, rotate
from ixformer_standin.checks import (
    MODEL_DTYPES,
    host_range,
    number,
    operation,
    rows_without_gaps,
    tensor,
)


@operation
def rms_norm(input: Any, weight: Any, output: Any = None, eps: Any = 1e-6) -> Any:
    check_norm(input, weight, eps)
    tensor("output", output, tuple(input.shape), input.dtype)
    output.copy_(norm(input, weight, eps))
    return output


@operation
def fused_add_rms_norm(
    input: Any, residual: Any, weight: Any, eps: Any = 1e-5, scale: Any = 1.0
) -> None:
    check_norm(input, weight, eps)
    tensor("residual", residual, tuple(input.shape), input.dtype)
    number("scale", scale, float, 1.0)
    residual.add_(input)
    input.copy_(norm(residual, weight, eps))


@operation
def vllm_rotary_embedding_neox(
    positions: Any, query: Any, key: Any, head_size: Any, cos_sin_cache: Any, is_neox: Any
) -> None:
    rotate(positions, query, key, head_size, cos_sin_cache, is_neox)


@operation
def vllm_cache_ops_reshape_and_cache(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any
) -> None:
    tensor("key", key, (None, None, None), *MODEL_DTYPES, dense=False)
    rows, heads, dim = key.shape
    tensor("value", value, (rows, heads, dim), key.dtype, dense=False)
    rows_without_gaps("key", key)
    rows_without_gaps("value", value)
    x = 16 // key.element_size()
    tensor("key_cache", key_cache, (None, heads, dim // x, None, x), key.dtype)
    blocks, block_size = key_cache.shape[0], key_cache.shape[3]
    tensor("value_cache", value_cache, (blocks, heads, dim, block_size), key.dtype)
    tensor("slot_mapping", slot_mapping, (rows,), torch.int32)
    host_range("slot_mapping", slot_mapping, 0, blocks * block_size)
    slots = slot_mapping.long()
    at = (slots // block_size, slots % block_size)
    key_cache.permute(0, 3, 1, 2, 4)[at] = key.reshape(rows, heads, dim // x, x)
    value_cache.permute(0, 3, 1, 2)[at] = value


@operation
def vllm_single_query_cached_kv_attention(
    output: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    head_mapping: Any,
    scale: Any,
    block_tables: Any,
    context_lens: Any,
    block_size: Any,
    max_context_len: Any,
    alibi_slopes: Any = None,
) -> None:
    tensor("query", query, (None, None, None), *MODEL_DTYPES)
    rows, heads, dim = query.shape
    x = 16 // query.element_size()
    tensor("key_cache", key_cache, (None, None, dim // x, block_size, x), query.dtype)
    blocks, kv_heads = key_cache.shape[:2]
    tensor("value_cache", value_cache, (blocks, kv_heads, dim, block_size), query.dtype)
    tensor("head_mapping", head_mapping, (heads,), torch.int32)
    host_range("head_mapping", head_mapping, 0, kv_heads)
    lengths = (block_size, max_context_len, alibi_slopes)
    check_attention(output, query, scale, block_tables, context_lens, *lengths, blocks)
    table = block_tables.long()
    keys = key_cache[table].permute(0, 2, 1, 4, 3, 5).reshape(rows, kv_heads, -1, dim)
    values = value_cache[table].permute(0, 2, 1, 4, 3).reshape(rows, kv_heads, -1, dim)
    output.copy_(attend(query, keys, values, head_mapping, context_lens, scale))


@operation
def vllm_invoke_fused_moe_kernel(
    A: Any,
    B: Any,
    C: Any,
    topk_weight: Any,
    topk_ids: Any,
    sorted_token_ids: Any,
    expert_ids: Any,
    num_tokens_post_padded: Any,
    mul_routed_weight: Any,
    top_k: Any,
    block_size_m: Any,
) -> None:
    """As the wrapper of vLLM 0.6.3 calls it."""
    lists = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    moe.fused_gemm(A, B, C, topk_weight, topk_ids, *lists, mul_routed_weight, top_k, block_size_m)


OPERATIONS = {
    function.__name__: function
    for function in (
        rms_norm,
        fused_add_rms_norm,
        vllm_rotary_embedding_neox,
        vllm_cache_ops_reshape_and_cache,
        vllm_single_query_cached_kv_attention,
        moe.silu_and_mul,
        moe.vllm_moe_topk_softmax,
        moe.vllm_moe_align_block_size,
        vllm_invoke_fused_moe_kernel,
    )
}
