"""The two functions of vLLM 0.6.3's compiled flash-attention package, and its cache operator, in torch.

With them its own FlashAttention backend runs: one operator that reads the step's metadata on the host.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from v0.absent import CausalBlocks, attention
from v0.kernels import calls, paged_attention_v1

_library = torch.library.Library("_C_cache_ops", "FRAGMENT")  # operators live as long as it does


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: Any,
    alibi_slopes: Any,
    softcap: float,
) -> torch.Tensor:
    assert causal
    assert (alibi_slopes, softcap, list(window_size)) == (None, 0, [-1, -1])
    calls["flash_attn_varlen_func"] += 1
    group = q.shape[1] // k.shape[1]
    heads = [t[None].repeat_interleave(group, 2) for t in (k, v)]
    lengths = CausalBlocks(cu_seqlens_q.diff().tolist())
    return attention(q[None], *heads, lengths, 0.0, softmax_scale)[0]


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    alibi_slopes: Any,
    softcap: float,
) -> torch.Tensor:
    assert causal
    assert (alibi_slopes, softcap) == (None, 0)
    calls["flash_attn_with_kvcache"] += 1
    size, heads, longest = (
        k_cache.shape[1],
        k_cache.shape[2],
        block_table.shape[1] * k_cache.shape[1],
    )
    keys = k_cache.permute(0, 2, 3, 1)[..., None]  # (blocks, heads, head size, tokens, 1)
    values = v_cache.permute(0, 2, 3, 1)
    out = torch.empty_like(q[:, 0])
    paged_attention_v1(
        *(out, q[:, 0], keys, values, heads, softmax_scale, block_table, cache_seqlens, size),
        *(longest, None, "auto", 1.0, 1.0),
    )
    return out[:, None]


def _reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: float,
    v_scale: float,
) -> None:
    assert (kv_cache_dtype, k_scale, v_scale) == ("auto", 1.0, 1.0)
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, key_cache.shape[1])
            key_cache[block, offset] = key[row]
            value_cache[block, offset] = value[row]


def install() -> None:
    """Have vLLM choose FlashAttention. Before a worker is made."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    module = ModuleType("vllm.vllm_flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    sys.modules["vllm.vllm_flash_attn"] = module
    _library.define(
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, str kv_cache_dtype, float k_scale, float v_scale) -> ()"
    )
    _library.impl("reshape_and_cache_flash", _reshape_and_cache_flash, "CompositeExplicitAutograd")
    ninety = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    type(current_platform).get_device_capability = ninety
