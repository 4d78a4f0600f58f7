# mypy: allow-untyped-defs
"""The gated delta net of one token in Triton: convolution with its state, the delta rule with its own.

A program of the delta rule takes all Dk rows of some columns of one head's state, so the state is read and
written once and no program waits for another. A row with a negative row id is padding: its programs write
zeros and stop.
"""

import torch
import triton
import triton.language as tl

from graphcap.decode.kernels.reference_delta import L2_EPS
from graphcap.decode.kernels.triton_norm import warps
from graphcap.operations import operation

STATE_COLUMNS = 32
"""Columns of a state that one program takes: at batch 1, 32 heads of 128 make 128 programs of 16 KiB."""


@triton.jit
def _conv_update_kernel(
    x_ptr,
    weight_ptr,
    state_ptr,
    slots_ptr,
    row_ids_ptr,
    positions_ptr,
    out_ptr,
    x_row,
    out_row,
    state_slot,
    C,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    dtype = out_ptr.dtype.element_ty
    out_at = out_ptr + row * out_row + c
    if tl.load(row_ids_ptr + row) < 0:
        tl.store(out_at, tl.zeros((BLOCK,), dtype), mask=inside)
        return
    slot = tl.load(slots_ptr + row)
    # What the slot holds of another sequence, NaN too, is not read at the start of one.
    known = c < tl.where(tl.load(positions_ptr + row) > 0, C, 0)
    state_at = state_ptr + slot * state_slot + c * (W - 1)
    newest = tl.load(x_ptr + row * x_row + c, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + c * W + (W - 1), mask=inside, other=0.0).to(tl.float32)
    total = newest.to(tl.float32) * weight
    for age in tl.static_range(W - 1):
        token = tl.load(state_at + age, mask=known, other=0.0)
        tap = tl.load(weight_ptr + c * W + age, mask=inside, other=0.0).to(tl.float32)
        total += token.to(tl.float32) * tap
        if age > 0:
            tl.store(state_at + (age - 1), token, mask=inside)
    tl.store(state_at + (W - 2), newest, mask=inside)
    total = total.to(dtype).to(tl.float32)
    tl.store(out_at, (total / (1.0 + tl.exp(-total))).to(dtype), mask=inside)


@triton.jit
def _unit(x, eps):
    return x / tl.sqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)); by its series where exp(x) would be lost beside 1."""
    power = tl.exp(tl.minimum(x, 20.0))
    series = power * (1.0 - power * (0.5 - power * 0.3333333333))
    return tl.where(x > 20.0, x, tl.where(power < 1e-2, series, tl.log(1.0 + power)))


@triton.jit
def _delta_rule_kernel(
    mixed_ptr,
    beta_ptr,
    decay_ptr,
    decay_log_ptr,
    time_bias_ptr,
    state_ptr,
    slots_ptr,
    row_ids_ptr,
    positions_ptr,
    out_ptr,
    scale,
    l2_eps,
    mixed_row,
    beta_row,
    decay_row,
    state_slot,
    out_row,
    keys,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    dtype = out_ptr.dtype.element_ty
    out_at = out_ptr + row * out_row + head * DV + v
    if tl.load(row_ids_ptr + row) < 0:
        tl.store(out_at, tl.zeros((BLOCK_V,), dtype), mask=v < DV)
        return
    slot = tl.load(slots_ptr + row)
    at = (k < DK)[:, None] & (v < DV)[None, :]
    state_at = state_ptr + slot * state_slot + (head * DK + k)[:, None] * DV + v[None, :]
    # What the slot holds of another sequence, NaN too, is not read at the start of one.
    known = (k < tl.where(tl.load(positions_ptr + row) > 0, DK, 0))[:, None] & (v < DV)[None, :]
    state = tl.load(state_at, mask=known, other=0.0)

    mixed_at = mixed_ptr + row * mixed_row
    key_at = mixed_at + (head // GROUP) * DK + k
    query = _unit(tl.load(key_at, mask=k < DK, other=0.0).to(tl.float32), l2_eps) * scale
    key = _unit(tl.load(key_at + keys, mask=k < DK, other=0.0).to(tl.float32), l2_eps)
    value_at = mixed_at + 2 * keys + head * DV + v
    value = tl.load(value_at, mask=v < DV, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + row * beta_row + head).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-beta))).to(dtype).to(tl.float32)
    decay = tl.load(decay_ptr + row * decay_row + head).to(tl.float32)
    time_bias = tl.load(time_bias_ptr + head).to(tl.float32)
    rate = tl.exp(tl.load(decay_log_ptr + head).to(tl.float32))

    state = state * tl.exp(-rate * _softplus(decay + time_bias))
    expected = tl.sum(state * key[:, None], 0)
    state += key[:, None] * ((value - expected) * share)[None, :]
    tl.store(state_at, state, mask=at)
    tl.store(out_at, tl.sum(state * query[:, None], 0).to(dtype), mask=v < DV)


@operation("conv update", "triton: conv_update")
def conv_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    row_ids: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out (M, C) = silu of the causal convolution of each channel over the last W tokens; x (M, C), a
    view with contiguous rows, is the newest.

    weight (C, W), oldest token first; state (S, C, W - 1) of the model's dtype holds the tokens before, and
    afterwards the newest W - 1. slots and positions (M,) int64, row_ids (M,) int64 or int32. Rounded to the
    model's dtype before the activation.
    """
    m, c = out.shape
    block = min(256, triton.next_power_of_2(c))
    _conv_update_kernel[(triton.cdiv(c, block), m)](
        x,
        weight,
        state,
        slots,
        row_ids,
        positions,
        out,
        x.stride(0),
        out.stride(0),
        state.stride(0),
        c,
        W=weight.shape[1],
        BLOCK=block,
        num_warps=warps(4 * block),
    )


@operation("delta rule", "triton: delta_rule")
def delta_rule(
    mixed: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    decay_log: torch.Tensor,
    time_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    row_ids: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """One token of the gated delta rule: out (M, Gv, Dv), and state (S, Gv, Dk, Dv) float32 in place.

    With q and k of unit length, q over sqrt(Dk), β = sigmoid(beta), α = exp(-exp(decay_log) *
    softplus(decay + time_bias)):  S ← α S;  S ← S + k (β (v - kᵀ S))ᵀ;  out = Sᵀ q.

    mixed (M, C) holds queries, keys and values in contiguous rows; beta and decay (M, Gv) are views of the
    projection; decay_log and time_bias (Gv,); slots and positions (M,) int64, row_ids (M,) int64 or int32;
    out and state are contiguous. Computed in float32 but for β, which is rounded to the model's dtype.
    """
    m, heads, dv = out.shape
    dk = state.shape[2]
    keys = (mixed.shape[1] - heads * dv) // 2
    block_k, block_v = triton.next_power_of_2(dk), min(STATE_COLUMNS, triton.next_power_of_2(dv))
    _delta_rule_kernel[(triton.cdiv(dv, block_v), heads, m)](
        mixed,
        beta,
        decay,
        decay_log,
        time_bias,
        state,
        slots,
        row_ids,
        positions,
        out,
        dk**-0.5,
        L2_EPS,
        mixed.stride(0),
        beta.stride(0),
        decay.stride(0),
        state.stride(0),
        out.stride(0),
        keys,
        GROUP=heads * dk // keys,
        DK=dk,
        DV=dv,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=min(4, warps(block_k * block_v)),
    )
