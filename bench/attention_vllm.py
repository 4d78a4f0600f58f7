"""vLLM's attention of one decode step, called as its backends of version 0.26 call it in a full CUDA graph.

By two of its backends: FlashAttention, of the version that vLLM takes for the device (3 on Hopper), as
`v1/attention/backends/flash_attn.py`, and its Triton kernel, as `v1/attention/backends/triton_attn.py`.
Each once alone, its query and the new token in the cache given, and once with what
`models/qwen3_moe.py` runs between the two projections: norms of queries and keys, RoPE and cache write. What
vLLM prepares once a step for all layers (FlashAttention's scheduler metadata) is made beforehand and not
timed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from attention_load import AttentionLoad
from attention_ways import AttentionWay, PagedStore, UnavailableError, new_outs

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]
"""(query (M, Hq, D), key cache, value cache, out)"""

FLASH_SPLITS = 32
"""`AttentionConfig.flash_attn_max_num_splits_for_cuda_graph`."""

TRITON_SEGMENTS = 16
"""`NUM_PAR_SOFTMAX_SEGMENTS`."""

TRITON_GRID = 128
"""`MIN_LAUNCH_GRID_SIZE_2D`: up to so many sequences times key-value heads a sequence is split."""


def vllm_version() -> str | None:
    """None: it cannot be imported."""
    try:
        import vllm

        return str(vllm.__version__)
    except Exception:  # whatever its libraries raise while they load
        return None


def vllm_ways(load: AttentionLoad) -> tuple[list[AttentionWay], dict[str, str]]:
    """The ways that run here, each after its first call, and why the others do not, by name."""
    ways: list[AttentionWay] = []
    missing: dict[str, str] = {}
    caches: list[tuple[torch.Tensor, torch.Tensor]] = []
    for kind, make in (("flash", flash_kernel), ("triton", triton_kernel)):
        names = (kind, f"{kind}, whole")
        try:
            from vllm import _custom_ops as ops

            kernel, facts = make(load)
            caches = caches or packed_caches(load)
        except Exception as error:
            missing.update(dict.fromkeys(names, reason(error)))
            continue
        for way in (
            alone(names[0], load, kernel, caches, facts),
            whole(names[1], load, kernel, caches, facts, ops),
        ):
            try:
                way.run(0)
                if load.device.type == "cuda":
                    torch.cuda.synchronize(load.device)
                ways.append(way)
            except Exception as error:
                missing[way.name] = reason(error)
    return ways, missing


def reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    if isinstance(error, UnavailableError):
        return text[0]
    return f"{type(error).__name__}: {text[0] if text else ''}"


def packed_caches(load: AttentionLoad) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer as vLLM lays them out: one tensor (blocks, block size, Hk, 2 D), of
    which both are views."""
    found = []
    for keys, values in zip(load.cache.keys, load.cache.values, strict=True):
        packed = torch.cat([keys, values], -1)
        found.append((packed[..., : load.shape.head_dim], packed[..., load.shape.head_dim :]))
    return found


def alone(
    name: str,
    load: AttentionLoad,
    kernel: Kernel,
    caches: list[tuple[torch.Tensor, torch.Tensor]],
    facts: dict[str, Any],
) -> AttentionWay:
    query, outs = load.expected(0).query.to(load.dtype), new_outs(load)
    store = PagedStore(load, *map(list, zip(*caches, strict=True)))
    return AttentionWay(
        name, False, lambda layer: kernel(query, *caches[layer], outs[layer]), outs, store, facts
    )


def whole(
    name: str,
    load: AttentionLoad,
    kernel: Kernel,
    caches: list[tuple[torch.Tensor, torch.Tensor]],
    facts: dict[str, Any],
    ops: ModuleType,
) -> AttentionWay:
    shape, outs = load.shape, new_outs(load)
    projected_query, projected_key, new_value = load.heads()
    query, key = (torch.empty_like(x.contiguous()) for x in (projected_query, projected_key))
    one = torch.ones((), device=load.device)

    def run(layer: int) -> None:
        ops.rms_norm(query, projected_query, load.q_norms[layer], shape.rms_norm_eps)
        ops.rms_norm(key, projected_key, load.k_norms[layer], shape.rms_norm_eps)
        ops.rotary_embedding(
            load.positions, query.flatten(1), key.flatten(1), shape.head_dim, load.cos_sin, True
        )
        ops.reshape_and_cache_flash(key, new_value, *caches[layer], load.slots, "auto", one, one)
        kernel(query, *caches[layer], outs[layer])

    store = PagedStore(load, *map(list, zip(*caches, strict=True)))
    return AttentionWay(name, True, run, outs, store, facts)


def flash_kernel(load: AttentionLoad) -> tuple[Kernel, dict[str, Any]]:
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
        get_scheduler_metadata,
    )

    shape = load.shape
    version = get_flash_attn_version(head_size=shape.head_dim)
    if version is None:
        from vllm.vllm_flash_attn import fa_version_unsupported_reason

        why = (fa_version_unsupported_reason(version) for version in (3, 2))
        raise UnavailableError(f"vLLM has no FlashAttention that runs here: {'; '.join(why)}")
    starts = torch.arange(load.rows + 1, device=load.device, dtype=torch.int32)
    scales = torch.ones((), device=load.device).expand(load.rows, shape.num_kv_heads)
    metadata = None
    if version == 3:
        metadata = get_scheduler_metadata(
            batch_size=load.rows,
            max_seqlen_q=1,
            max_seqlen_k=load.context,
            num_heads_q=shape.num_heads,
            num_heads_kv=shape.num_kv_heads,
            headdim=shape.head_dim,
            cache_seqlens=load.lengths,
            qkv_dtype=load.dtype,
            cu_seqlens_q=starts,
            page_size=load.cache.block_size,
            causal=True,
            window_size=(-1, -1),
            num_splits=FLASH_SPLITS,
        )

    def run(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=load.lengths,
            max_seqlen_k=load.capacity,
            softmax_scale=shape.head_dim**-0.5,
            causal=True,
            alibi_slopes=None,
            window_size=[-1, -1],
            block_table=load.tables,
            softcap=0,
            scheduler_metadata=metadata,
            fa_version=version,
            q_descale=scales,
            k_descale=scales,
            v_descale=scales,
            num_splits=FLASH_SPLITS if version == 3 else 0,
        )

    return run, {"version": version}


def triton_kernel(load: AttentionLoad) -> tuple[Kernel, dict[str, Any]]:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    shape = load.shape
    starts = torch.arange(load.rows + 1, device=load.device, dtype=torch.int32)
    scales = torch.ones((), device=load.device).expand(load.rows, shape.num_kv_heads)
    most = TRITON_GRID // shape.num_kv_heads
    size = (most, shape.num_heads, TRITON_SEGMENTS)
    width = 1 << (shape.head_dim - 1).bit_length()
    partial = torch.empty((*size, width), device=load.device)
    tops, sums = torch.empty(size, device=load.device), torch.empty(size, device=load.device)

    def run(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        unified_attention(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=load.lengths,
            max_seqlen_k=load.capacity,
            softmax_scale=shape.head_dim**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=load.tables,
            softcap=0,
            q_descale=None,
            k_descale=scales,
            v_descale=scales,
            seq_threshold_3D=most,
            num_par_softmax_segments=TRITON_SEGMENTS,
            softmax_segm_output=partial,
            softmax_segm_max=tops,
            softmax_segm_expsum=sums,
        )

    return run, {}
