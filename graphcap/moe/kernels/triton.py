# mypy: allow-untyped-defs
"""The operations of the MoE layer in Triton, each one launch.

The matrix products live in `triton_gemm`, the sorting of pairs in `triton_align`. Every function
writes into its out-parameters, allocates nothing and never waits for the device.
"""

import torch
import triton
import triton.language as tl

from graphcap.moe.kernels.triton_align import align
from graphcap.moe.kernels.triton_gemm import expert_gemm, router_gemm
from graphcap.operations import operation

__all__ = ["align", "expert_gemm", "merge", "router_gemm", "silu_and_mul", "topk_softmax"]


@triton.jit
def _topk_softmax_kernel(
    logits_ptr,
    row_ids_ptr,
    weights_ptr,
    ids_ptr,
    stride,
    E: tl.constexpr,
    K: tl.constexpr,
    E_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    row = tl.program_id(0)
    expert = tl.arange(0, E_PAD)
    slot = tl.arange(0, K_PAD)
    real = tl.load(row_ids_ptr + row) >= 0
    readable = tl.where(real, E, 0)
    logit = tl.load(logits_ptr + row * stride + expert, mask=expert < readable, other=0.0)
    logit = tl.where(expert < E, logit, -float("inf"))
    top = tl.max(logit, 0)
    total = tl.sum(tl.exp(logit - top), 0)

    # Integers in the order of the floats: a maximum over them is exact, and a NaN logit, which ranks
    # last, cannot yield an expert that does not exist. Equal logits must have equal keys: -0 is 0.
    clean = tl.where(logit == logit, logit, -float("inf"))
    bits = tl.where(clean == 0.0, 0.0, clean).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(expert < E, key, -2147483648)
    chosen = tl.zeros((K_PAD,), tl.int32)
    value = tl.zeros((K_PAD,), tl.float32)
    for k in tl.static_range(K):
        best = tl.max(key, 0)
        index = tl.min(tl.where(key == best, expert, E_PAD), 0)
        best_logit = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        chosen = tl.where(slot == k, index, chosen)
        value = tl.where(slot == k, best_logit, value)
        key = tl.where(expert == index, -2147483648, key)

    weight = tl.where(slot < K, tl.exp(value - top) / total, 0.0)
    if RENORMALIZE:
        weight = weight / tl.sum(weight, 0)
    at = row * K + slot
    tl.store(weights_ptr + at, tl.where(real, weight, 0.0), mask=slot < K)
    tl.store(ids_ptr + at, tl.where(real, chosen, -1), mask=slot < K)


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, x_stride, out_stride, WIDTH, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x_row = x_ptr + row * x_stride
    gate = tl.load(x_row + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(x_row + WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * out_stride + i, value.to(out_ptr.dtype.element_ty), mask=i < WIDTH)


@triton.jit
def _merge_kernel(
    pairs_ptr,
    weights_ptr,
    ids_ptr,
    out_ptr,
    out_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1)
    h = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        pair = row * K + k
        # A dropped pair was never computed: its row is not read, for 0 * NaN is NaN.
        kept = tl.load(ids_ptr + pair) >= 0
        weight = tl.load(weights_ptr + pair, mask=kept, other=0.0)
        at = pairs_ptr + pair.to(tl.int64) * H + h
        total += weight * tl.load(at, mask=h < tl.where(kept, H, 0), other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + h, total.to(out_ptr.dtype.element_ty), mask=h < H)


@operation("topk_softmax", "triton: topk_softmax")
def topk_softmax(
    logits: torch.Tensor,
    row_ids: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    renormalize: bool,
) -> None:
    """Softmax of logits (M, E) float32 over E, then its top K: weights (M, K) float32, ids int32.

    Ties go to the lowest expert id. With `renormalize` a row of weights sums to 1. Where row_ids (M,)
    int64 is negative the row is padding: ids -1, weights 0, its logits are not read.
    """
    m, e = logits.shape
    k = ids.shape[1]
    _topk_softmax_kernel[(m,)](
        logits,
        row_ids,
        weights,
        ids,
        logits.stride(0),
        E=e,
        K=k,
        E_PAD=triton.next_power_of_2(e),
        K_PAD=triton.next_power_of_2(k),
        RENORMALIZE=renormalize,
        num_warps=1,  # reductions then stay inside a warp
    )


@operation("silu_and_mul", "triton: silu_and_mul")
def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out (R, I) = silu(gate_up[:, :I]) * gate_up[:, I:], computed in float32; gate_up (R, 2I)."""
    rows, width = out.shape
    block = min(512, triton.next_power_of_2(width))
    _silu_and_mul_kernel[(triton.cdiv(width, block), rows)](
        gate_up, out, gate_up.stride(0), out.stride(0), width, BLOCK=block, num_warps=2
    )


@operation("merge", "triton: merge")
def merge(pairs: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    """out (M, H) = sum over k of weights (M, K) float32 * pairs (M, K, H), float32 accumulation.

    Only pairs with ids (M, K) int32 >= 0 are read; a row without any gives zeros. `pairs`, `weights`
    and `ids` are contiguous.
    """
    m, k, h = pairs.shape
    block = min(256, triton.next_power_of_2(h))
    _merge_kernel[(triton.cdiv(h, block), m)](
        pairs, weights, ids, out, out.stride(0), H=h, K=k, BLOCK=block, num_warps=2
    )
