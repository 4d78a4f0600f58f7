"""Attention of one new token in CUDA C++ (``cuda/attend.cu``); signatures as in `triton_fused_attention`.

The parts are made here, by tensor cores whose operands are loaded in the order in which they are given to
them. Few are joined here as well, by a cluster of blocks that read one another's shared memory; the kernel
that joins many is Triton's. Where there is no Triton this module says whom it would serve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch

from graphcap.cuda.source import CudaKernel, as_constants, function, obstacle
from graphcap.errors import InputError
from graphcap.operations import BufferSpec, operation

HEAD_DIMS = (64, 128, 256)
"""Values of a head that there can be."""

MOST_GROUP = 16
"""Query heads of a key-value head: a block takes 8, and two share one."""

WARPS = (1, 2, 4, 8)
"""Warps of a block that there can be."""

MOST_SPLITS = 128
"""Parts of a head that a program of the join takes at once, but for the new token's."""

MOST_TOKENS = 256
"""Of a tile, whose scores a thread holds a quarter of for one head."""

MOST_VALUES = 64 * 64
"""Tokens of a warp by values of a head: a thread holds 64 registers of keys, and as many of values."""

COLUMNS = 8
"""Query heads of one block."""


MOST_CLUSTER = 8
"""Blocks of a cluster that every device of compute capability 9.0 takes (CUDA C++ programming guide)."""


class CudaAttend(NamedTuple):
    """Into how many splits the cached tokens are divided at the most, tokens of one iteration, warps of a
    block; for one token. `splits` and `tokens` mean what they mean in an `AttendTile`.

    Attributes:
        cluster: 1: the parts of a head are the blocks of a cluster, which joins them itself: one kernel. 0:
            they are left to be joined by another one.
    """

    splits: int
    tokens: int
    warps: int
    cluster: int = 0


def cuda_attend_tile(capacity: int, kv_heads: int, multiprocessors: int = 132) -> CudaAttend:
    """The tile for sequences of up to `capacity` tokens: one iteration each, as far as two blocks for every
    multiprocessor can do that."""
    most = min(MOST_SPLITS, max(1, 2 * multiprocessors // kv_heads - 1))
    return CudaAttend(min(most, max(1, -(-capacity // 64))), 64, 4)


def no_such_tile(tile: CudaAttend) -> str:
    """Why there is no such tile for heads of any size; empty where there is one."""
    whys = [tile_obstacle(tile, head_dim) for head_dim in HEAD_DIMS]
    return whys[-1] if all(whys) else ""


def tile_obstacle(tile: CudaAttend, head_dim: int) -> str:
    """Why there is no such tile for heads of `head_dim` values; empty where there is one."""
    splits, tokens, warps, cluster = tile
    if cluster not in (0, 1):
        return f"expected 0 or 1 for cluster, found {cluster}"
    if cluster and splits >= MOST_CLUSTER:
        return f"expected at most {MOST_CLUSTER - 1} splits for a cluster, found {splits}"
    if not 1 <= splits <= MOST_SPLITS:
        return f"expected 1 to {MOST_SPLITS} splits, found {splits}"
    if warps not in WARPS or head_dim % (16 * warps):
        fitting = " or ".join(str(n) for n in WARPS if head_dim % (16 * n) == 0)
        return f"expected {fitting} warps for heads of {head_dim} values, found {warps}"
    most = min(MOST_TOKENS, MOST_VALUES // head_dim * warps)
    if tokens % (16 * warps) or not 1 <= tokens <= most:
        return (
            f"expected a multiple of {16 * warps} tokens up to {most} for {warps} warps and heads of "
            f"{head_dim} values, found {tokens}"
        )
    return ""


def why_not(
    head_dim: int,
    rotated: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    tile: CudaAttend | None = None,
) -> str:
    """Why this kernel cannot take one token's attention; empty where it can.

    Args:
        rotated: values of a head that are rotated, the first ones.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, found {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"it needs heads of 64, 128 or 256 values, found {head_dim}"
    if rotated % 16 or not 16 <= rotated <= head_dim:
        return f"it needs a multiple of 16 rotated values up to {head_dim}, found {rotated}"
    if heads % kv_heads or not 1 <= heads // kv_heads <= MOST_GROUP:
        return (
            f"it needs 1 to {MOST_GROUP} query heads for each key-value head, found {heads} for "
            f"{kv_heads}"
        )
    return ("" if tile is None else tile_obstacle(tile, head_dim)) or obstacle(device)


def cache_obstacle(cache: torch.Tensor) -> str:
    """Why keys or values (blocks, block_size, Hk, D) cannot be read 16 bytes at a time; empty where they
    can."""
    *strides, last = cache.stride()
    if last != 1 or any(stride % 8 for stride in strides) or cache.data_ptr() % 16:
        return (
            f"expected heads of adjacent values that begin at multiples of 16 bytes, found strides "
            f"{cache.stride()} and address {cache.data_ptr():#x}"
        )
    return ""


@cache
def _kernel(
    device: torch.device,
    half: bool,
    kv_heads: int,
    group: int,
    head_dim: int,
    rotated: int,
    page: int,
    capacity: int,
    keys: tuple[int, ...],
    values: tuple[int, ...],
    slot: str,
    tile: CudaAttend,
    pdl: bool,
) -> CudaKernel:
    strides = {
        f"{name}_{of}": stride
        for name, each in (("KEY", keys), ("VALUE", values))
        for of, stride in zip(("BLOCK", "TOKEN", "HEAD"), each, strict=True)
    }
    constants = as_constants(
        {
            "HALF": half,
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "D": head_dim,
            "ROTARY": rotated,
            "PAGE": page,
            "CAPACITY": capacity,
            **strides,
            "SPLITS": tile.splits,
            "TOKENS": tile.tokens,
            "WARPS": tile.warps,
            "slot_t": slot,
            "CLUSTER": tile.cluster,
            "PDL": pdl,
        }
    )
    found = function("attend.cu", "attend", constants, device, 0)
    blocks = kv_heads * -(-group // COLUMNS) * (1 + tile.splits)
    return CudaKernel("attend", found, blocks, 32 * tile.warps, pdl=pdl)


def _launch(
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
    partial: torch.Tensor | None,
    lse: torch.Tensor | None,
    out: torch.Tensor | None,
    heads: int,
    eps: float,
    scale: float,
    tile: CudaAttend,
    pdl: bool,
) -> None:
    """Into `partial` and `lse`, or by a cluster into `out`."""
    page, kv_heads = key_cache.shape[1:3]
    assert seq_lens.shape[0] == 1, "for one token; see LayerPlan"
    assert cos_sin.dtype == qkv.dtype, "the rotary table is of the model's dtype"
    for cache_ in (key_cache, value_cache):
        if why := cache_obstacle(cache_):
            raise InputError(
                f"attention in CUDA C++, cache: {why}; take a plan without a CudaAttend tile"
            )
    kernel = _kernel(
        qkv.device,
        qkv.dtype == torch.float16,
        kv_heads,
        heads // kv_heads,
        key_cache.shape[3],
        cos_sin.shape[1],
        page,
        block_tables.shape[1] * page,
        key_cache.stride()[:3],
        value_cache.stride()[:3],
        "int" if slots.dtype == torch.int32 else "long long",
        tile,
        pdl,
    )
    kernel.launch(
        qkv.device,
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
        out,
        float(eps),
        scale * math.log2(math.e),
    )


def _own_tile(block_tables: torch.Tensor, key_cache: torch.Tensor) -> CudaAttend:
    page, kv_heads = key_cache.shape[1:3]
    return cuda_attend_tile(block_tables.shape[1] * page, kv_heads)


def scratch_of(tile: CudaAttend, out: torch.Tensor) -> Mapping[str, BufferSpec]:
    """As `triton_fused_attention.scratch_of`; a cluster needs none."""
    if tile.cluster:
        return {}
    from graphcap.decode.kernels import triton_fused_attention

    return triton_fused_attention.scratch_of(tile, out)


def _scratch(*args: torch.Tensor) -> Mapping[str, BufferSpec]:
    return scratch_of(_own_tile(args[6], args[8]), args[10])


@operation("attend", "cuda: attend", scratch=_scratch)
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
    partial: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    tile: CudaAttend | None = None,
    pdl: bool = True,
) -> None:
    """As `triton_fused_attention.attend`, for one token and where `why_not` is empty; `cos_sin` is of the
    dtype of `qkv`.

    Args:
        partial, lse: None where the tile has a cluster.
        tile: None: `cuda_attend_tile`.

    Raises:
        InputError: the cache cannot be read 16 bytes at a time (see `cache_obstacle`).
    """
    tile = _own_tile(block_tables, key_cache) if tile is None else tile
    given = (qkv, q_norm, k_norm, cos_sin, positions, slots, block_tables, seq_lens)
    caches = (key_cache, value_cache)
    heads = out.shape[1]
    if tile.cluster:
        _launch(*given, *caches, None, None, out, heads, eps, scale, tile, pdl)
        return
    from graphcap.decode.kernels.triton_fused_attention import join

    assert partial is not None and lse is not None, "see scratch_of"  # noqa: PT018
    assert partial.shape[2] == 1 + tile.splits, "scratch of another tile"
    _launch(*given, *caches, partial, lse, None, heads, eps, scale, tile, pdl)
    capacity = block_tables.shape[1] * key_cache.shape[1]
    join(partial, lse, out, slots, seq_lens, tile.splits, tile.tokens, capacity, pdl)
