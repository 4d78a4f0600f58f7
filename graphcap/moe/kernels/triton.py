# mypy: allow-untyped-defs
"""The operations of the MoE layer in Triton, each one launch.

The matrix products live in `triton_gemm`, the choice of experts in `triton_topk`, the sorting of
pairs in `triton_align`, the kernels for pairs one by one in `triton_pairs`. Every function
writes into its out-parameters, allocates nothing and never waits for the device.
"""

import torch
import triton
import triton.language as tl

from graphcap.moe.kernels.triton_align import align
from graphcap.moe.kernels.triton_gemm import expert_gemm, router_gemm
from graphcap.moe.kernels.triton_pairs import pair_down, pair_gate_up
from graphcap.moe.kernels.triton_pdl import let_next_start, pdl_options, wait_for_previous
from graphcap.moe.kernels.triton_topk import topk_softmax
from graphcap.operations import operation

__all__ = [
    "align",
    "expert_gemm",
    "merge",
    "pair_down",
    "pair_gate_up",
    "router_gemm",
    "silu_and_mul",
    "topk_softmax",
]


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
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
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


@operation("silu_and_mul", "triton: silu_and_mul")
def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out (R, I) = silu(gate_up[:, :I]) * gate_up[:, I:], computed in float32; gate_up (R, 2I)."""
    rows, width = out.shape
    block = min(512, triton.next_power_of_2(width))
    _silu_and_mul_kernel[(triton.cdiv(width, block), rows)](
        gate_up, out, gate_up.stride(0), out.stride(0), width, BLOCK=block, num_warps=2
    )


@operation("merge", "triton: merge")
def merge(
    pairs: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
    pdl: bool = False,
) -> None:
    """out (M, H) = sum over k of weights (M, K) float32 * pairs (M, K, H), float32 accumulation.

    Only pairs with ids (M, K) int32 >= 0 are read; a row without any gives zeros. `pairs`, `weights`
    and `ids` are contiguous.
    """
    m, k, h = pairs.shape
    block = min(256, triton.next_power_of_2(h))
    _merge_kernel[(triton.cdiv(h, block), m)](
        pairs,
        weights,
        ids,
        out,
        out.stride(0),
        H=h,
        K=k,
        BLOCK=block,
        num_warps=2,
        **(pdl_options(out) if pdl else {"PDL": False}),
    )
