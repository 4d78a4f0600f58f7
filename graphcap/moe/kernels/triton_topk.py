# mypy: allow-untyped-defs
"""Softmax and top-k of the router's logits in Triton."""

import torch
import triton
import triton.language as tl

from graphcap.moe.kernels.triton_pdl import let_next_start, pdl_options, wait_for_previous
from graphcap.operations import operation

REMOVED = tl.constexpr(-2147483648)
"""A key below that of every logit."""


@triton.jit
def rank_keys(logit, exists):
    """Integers in the order of the logits; `REMOVED` where not `exists`.

    A maximum over integers is exact, and a NaN logit, which ranks last, cannot yield an expert that
    does not exist. Equal logits must have equal keys: -0 is 0.
    """
    clean = tl.where(logit == logit, logit, -float("inf"))
    bits = tl.where(clean == 0.0, 0.0, clean).to(tl.int32, bitcast=True)
    return tl.where(exists, bits ^ ((bits >> 31) & 0x7FFFFFFF), REMOVED)


@triton.jit
def ranked_logit(key):
    """The logit of a key of `rank_keys`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def first_of(key, expert):
    """The highest key and its expert, the lowest of those that share it."""
    best = tl.max(key, 0)
    return best, tl.min(tl.where(key == best, expert, 2147483647), 0)


@triton.jit
def choose_experts(
    logits_ptr,
    real,
    E: tl.constexpr,
    K: tl.constexpr,
    E_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Ids (K_PAD,) int32 and weights (K_PAD,) float32 of one row; -1 and 0 where it is not `real`."""
    expert = tl.arange(0, E_PAD)
    slot = tl.arange(0, K_PAD)
    logit = tl.load(logits_ptr + expert, mask=expert < tl.where(real, E, 0), other=0.0)
    logit = tl.where(expert < E, logit, -float("inf"))
    top = tl.max(logit, 0)
    total = tl.sum(tl.exp(logit - top), 0)

    key = rank_keys(logit, expert < E)
    chosen = tl.zeros((K_PAD,), tl.int32)
    value = tl.zeros((K_PAD,), tl.float32)
    for k in tl.static_range(K):
        best, index = first_of(key, expert)
        chosen = tl.where(slot == k, index, chosen)
        value = tl.where(slot == k, ranked_logit(best), value)
        key = tl.where(expert == index, REMOVED, key)

    weight = tl.where(slot < K, tl.exp(value - top) / total, 0.0)
    if RENORMALIZE:
        weight = weight / tl.sum(weight, 0)
    return tl.where(real, chosen, -1), tl.where(real, weight, 0.0)


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
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    wait_for_previous(PDL)
    let_next_start(PDL)
    real = tl.load(row_ids_ptr + row) >= 0
    ids, weights = choose_experts(logits_ptr + row * stride, real, E, K, E_PAD, K_PAD, RENORMALIZE)
    slot = tl.arange(0, K_PAD)
    tl.store(weights_ptr + row * K + slot, weights, mask=slot < K)
    tl.store(ids_ptr + row * K + slot, ids, mask=slot < K)


@operation("topk_softmax", "triton: topk_softmax")
def topk_softmax(
    logits: torch.Tensor,
    row_ids: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    renormalize: bool,
    pdl: bool = False,
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
        **(pdl_options(logits) if pdl else {"PDL": False}),
    )
