# mypy: allow-untyped-defs
"""The operations of the decode step outside the MoE layer, in Triton and cuBLAS.

Norms live in `triton_norm`, attention in `triton_attention`, sampling in `triton_sampling`, the fused
layer in `triton_fused_linear` and `triton_fused_attention`. Every function writes into its
out-parameters, allocates nothing and never waits for the device.
"""

import torch
import triton
import triton.language as tl

from graphcap.decode.kernels.triton_attention import attention
from graphcap.decode.kernels.triton_fused_attention import attend
from graphcap.decode.kernels.triton_fused_linear import (
    norm_qkv,
    norm_router,
    output_residual,
    project,
)
from graphcap.decode.kernels.triton_norm import (
    fused_add_rms_norm,
    heads_per_program,
    rms_norm,
    warps,
)
from graphcap.decode.kernels.triton_sampling import advance, argmax
from graphcap.moe.kernels.triton import silu_and_mul
from graphcap.moe.kernels.triton_gemm import gated_gemm
from graphcap.operations import operation

__all__ = [
    "advance",
    "argmax",
    "attend",
    "attention",
    "cache_write",
    "embedding",
    "fused_add_rms_norm",
    "gated_gemm",
    "linear",
    "norm_qkv",
    "norm_router",
    "output_residual",
    "project",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
]


@triton.jit
def _embedding_kernel(
    ids_ptr, table_ptr, out_ptr, table_stride, out_stride, V, H: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(1)
    h = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row).to(tl.int64)
    readable = tl.where((token >= 0) & (token < V), H, 0)
    value = tl.load(table_ptr + token * table_stride + h, mask=h < readable, other=0.0)
    tl.store(out_ptr + row * out_stride + h, value, mask=h < H)


@triton.jit
def _rotate(
    ptr,
    head_stride,
    first,
    heads,
    cos,
    sin,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head = first + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    mask = (head < heads)[:, None] & (d < HALF)[None, :]
    left_at = ptr + head[:, None] * head_stride + d[None, :]
    left = tl.load(left_at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(left_at + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = ptr.dtype.element_ty
    tl.store(left_at, (left * cos[None, :] - right * sin[None, :]).to(dtype), mask=mask)
    tl.store(left_at + HALF, (right * cos[None, :] + left * sin[None, :]).to(dtype), mask=mask)


@triton.jit
def _rotary_embedding_kernel(
    positions_ptr,
    q_ptr,
    k_ptr,
    cos_sin_ptr,
    q_row,
    q_head,
    k_row,
    k_head,
    cos_sin_row,
    q_heads,
    k_heads,
    q_programs,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(1)
    part = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    angles = cos_sin_ptr + tl.load(positions_ptr + row) * cos_sin_row + d
    cos = tl.load(angles, mask=d < HALF, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=d < HALF, other=0.0).to(tl.float32)
    if part < q_programs:
        q_at = q_ptr + row * q_row
        _rotate(q_at, q_head, part * BLOCK_H, q_heads, cos, sin, HALF, BLOCK_H, BLOCK_D)
    else:
        k_at = k_ptr + row * k_row
        first = (part - q_programs) * BLOCK_H
        _rotate(k_at, k_head, first, k_heads, cos, sin, HALF, BLOCK_H, BLOCK_D)


@triton.jit
def _cache_write_kernel(
    k_ptr,
    v_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    k_row,
    k_head,
    v_row,
    v_head,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    heads,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < heads) & (d < D)
    block = slot // PAGE
    token = slot % PAGE
    key = tl.load(k_ptr + row * k_row + head * k_head + d, mask=mask)
    value = tl.load(v_ptr + row * v_row + head * v_head + d, mask=mask)
    key_at = key_cache_ptr + block * key_block + token * key_token
    value_at = value_cache_ptr + block * value_block + token * value_token
    tl.store(key_at + head * key_head + d, key, mask=mask)
    tl.store(value_at + head * value_head + d, value, mask=mask)


@operation("embedding", "triton: embedding")
def embedding(ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """out (M, H) = table (V, H)[ids (M,) int32]; an id outside the vocabulary gives zeros."""
    v, h = table.shape
    block = min(1024, triton.next_power_of_2(h))
    _embedding_kernel[(triton.cdiv(h, block), ids.shape[0])](
        ids, table, out, table.stride(0), out.stride(0), v, H=h, BLOCK=block, num_warps=4
    )


@operation("projections", "cuBLAS")
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out (M, N) = x (M, A) @ weight (N, A).T + bias (N,), all of the model's dtype."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


@operation("rotary_embedding", "triton: rotary_embedding")
def rotary_embedding(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    """Rotate q (M, Hq, D) and k (M, Hk, D) in place, neox style: halves, not neighbours, are pairs.

    positions (M,) int64; cos_sin (P, D) holds cosines in its first half, sines in its second. q and
    k may be views of a fused buffer; only their last dimension must be contiguous.
    """
    m, q_heads, d = q.shape
    k_heads = k.shape[1]
    half = d // 2
    block_d = triton.next_power_of_2(half)
    block_h = heads_per_program(q_heads, 2 * block_d)
    q_programs = triton.cdiv(q_heads, block_h)
    _rotary_embedding_kernel[(q_programs + triton.cdiv(k_heads, block_h), m)](
        positions,
        q,
        k,
        cos_sin,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        cos_sin.stride(0),
        q_heads,
        k_heads,
        q_programs,
        HALF=half,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=warps(block_h * block_d),
    )


@operation("cache write", "triton: cache_write")
def cache_write(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Put k and v (M, Hk, D) of one token a row into the paged caches (blocks, block_size, Hk, D).

    slot_mapping (M,) int64 is block * block_size + place in the block; a negative slot writes nothing.
    """
    m, heads, d = k.shape
    block_d = triton.next_power_of_2(d)
    block_h = heads_per_program(heads, block_d)
    _cache_write_kernel[(triton.cdiv(heads, block_h), m)](
        k,
        v,
        key_cache,
        value_cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        heads,
        PAGE=key_cache.shape[1],
        D=d,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=warps(block_h * block_d),
    )
