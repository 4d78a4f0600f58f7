"""The gated delta net of one token in plain torch: the oracle of the others, and what CPUs run.

Source: `causal_conv1d_update` and `torch_recurrent_gated_delta_rule` of transformers' Qwen3-Next, and
https://arxiv.org/abs/2412.06464. Roundings are theirs. Nothing allocates and nothing synchronises.

States are addressed by `slots` (M,) int64. A row with a negative row id is padding: it starts from zeros
whatever lies in its slot, gives zeros, and writes the state back as it was, which keeps shapes fixed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphcap.moe.kernels.constants import constant
from graphcap.operations import BufferSpec, operation

L2_EPS = 1e-6
"""Added to the sum of squares of queries and keys; fixed in the model's code."""


def _mark(
    row_ids: torch.Tensor, positions: torch.Tensor, is_pad: torch.Tensor, starts: torch.Tensor
) -> None:
    """is_pad (M,): padding; starts (M,): rows that do not look at what is in their slot."""
    device = row_ids.device
    torch.lt(row_ids, constant(0, device, row_ids.dtype), out=is_pad)
    torch.le(positions, constant(0, device, positions.dtype), out=starts)
    torch.logical_or(starts, is_pad, out=starts)


def _conv_scratch(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, *_: object
) -> Mapping[str, BufferSpec]:
    rows, (channels, width) = x.shape[0], weight.shape
    return {
        "is_pad": ((rows,), torch.bool),
        "starts": ((rows,), torch.bool),
        "kept": ((rows, channels, width - 1), state.dtype),
        "window": ((rows, channels, width), x.dtype),
        "products": ((rows, channels, width), torch.float32),
        "taps": ((channels, width), torch.float32),
        "total": ((rows, channels), torch.float32),
        "opened": ((rows, channels), torch.float32),
    }


@operation("conv update", scratch=_conv_scratch)
def conv_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    row_ids: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    is_pad: torch.Tensor,
    starts: torch.Tensor,
    kept: torch.Tensor,
    window: torch.Tensor,
    products: torch.Tensor,
    taps: torch.Tensor,
    total: torch.Tensor,
    opened: torch.Tensor,
) -> None:
    """out (M, C) = silu of the causal convolution of each channel over the last W tokens; x (M, C), a
    view, is the newest.

    weight (C, W), oldest token first; state (S, C, W - 1) of the model's dtype holds the tokens before, and
    afterwards the newest W - 1. row_ids (M,) int64 or int32, positions (M,) int64.
    """
    device = x.device
    _mark(row_ids, positions, is_pad, starts)
    torch.index_select(state, 0, slots, out=kept)
    window[..., :-1].copy_(kept)
    before = window[..., :-1]
    torch.where(starts[:, None, None], constant(0, device, x.dtype), before, out=before)
    window[..., -1].copy_(x)
    products.copy_(window)
    taps.copy_(weight)
    products.mul_(taps)
    torch.sum(products, -1, out=total)
    out.copy_(total)  # rounds to the model's dtype before the activation
    total.copy_(out)
    torch.sigmoid(total, out=opened)
    total.mul_(opened)
    nothing = constant(0, device, torch.float32)
    torch.where(is_pad[:, None], nothing, total, out=total)
    out.copy_(total)
    torch.where(is_pad[:, None, None], kept, window[..., 1:], out=kept)
    state.index_copy_(0, slots, kept)


def _delta_scratch(
    mixed: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    decay_log: torch.Tensor,
    time_bias: torch.Tensor,
    state: torch.Tensor,
    *_: object,
) -> Mapping[str, BufferSpec]:
    rows, (heads, key_dim, value_dim) = mixed.shape[0], state.shape[1:]
    wide, per_head = torch.float32, (rows, heads)
    return {
        "is_pad": ((rows,), torch.bool),
        "starts": ((rows,), torch.bool),
        "q": ((*per_head, key_dim), wide),
        "k": ((*per_head, key_dim), wide),
        "square": ((*per_head, key_dim), wide),
        "length": ((*per_head, 1), wide),
        "v": ((*per_head, value_dim), wide),
        "read": ((*per_head, value_dim), wide),
        "rounded": (per_head, mixed.dtype),
        "share": (per_head, wide),
        "kept_share": (per_head, wide),
        "bias": ((heads,), wide),
        "rate": ((heads,), wide),
        "current": ((*per_head, key_dim, value_dim), wide),
        "product": ((*per_head, key_dim, value_dim), wide),
    }


def _spread(source: torch.Tensor, out: torch.Tensor, key_heads: int) -> None:
    """out (M, Gv, Dk) float32 = source (M, Gk * Dk), each key head for its value heads in a row."""
    rows, heads, dim = out.shape
    by_head = source.unflatten(1, (key_heads, 1, dim))
    out.view(rows, key_heads, heads // key_heads, dim).copy_(by_head)


def _unit(x: torch.Tensor, square: torch.Tensor, length: torch.Tensor) -> None:
    """x /= its length, in place."""
    torch.mul(x, x, out=square)
    torch.sum(square, -1, keepdim=True, out=length)
    length.add_(constant(L2_EPS, x.device, torch.float32))
    length.rsqrt_()
    x.mul_(length)


@operation("delta rule", scratch=_delta_scratch)
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
    *,
    is_pad: torch.Tensor,
    starts: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    square: torch.Tensor,
    length: torch.Tensor,
    v: torch.Tensor,
    read: torch.Tensor,
    rounded: torch.Tensor,
    share: torch.Tensor,
    kept_share: torch.Tensor,
    bias: torch.Tensor,
    rate: torch.Tensor,
    current: torch.Tensor,
    product: torch.Tensor,
) -> None:
    """One token of the gated delta rule: out (M, Gv, Dv), and state (S, Gv, Dk, Dv) float32 in place.

    With q and k of unit length, q over sqrt(Dk), β = sigmoid(beta), α = exp(-exp(decay_log) *
    softplus(decay + time_bias)):  S ← α S;  S ← S + k (β (v - kᵀ S))ᵀ;  out = Sᵀ q.

    mixed (M, C) holds queries, keys and values; beta and decay (M, Gv) are views of the projection;
    decay_log and time_bias (Gv,); row_ids (M,) int64 or int32, positions (M,) int64. Computed in float32
    but for β, which is rounded to the model's dtype.
    """
    device, (heads, key_dim, value_dim) = mixed.device, state.shape[1:]
    values = heads * value_dim
    keys = (mixed.shape[1] - values) // 2
    _mark(row_ids, positions, is_pad, starts)
    for source, x in ((mixed[:, :keys], q), (mixed[:, keys : 2 * keys], k)):
        _spread(source, x, keys // key_dim)
        _unit(x, square, length)
    q.mul_(constant(key_dim**-0.5, device, torch.float32))
    v.copy_(mixed[:, 2 * keys :].unflatten(1, (heads, value_dim)))
    torch.sigmoid(beta, out=rounded)
    share.copy_(rounded)
    kept_share.copy_(decay)
    bias.copy_(time_bias)
    kept_share.add_(bias)
    torch.ops.aten.softplus.out(kept_share, 1, 20, out=kept_share)
    rate.copy_(decay_log)
    rate.exp_().neg_()
    kept_share.mul_(rate)
    kept_share.exp_()

    torch.index_select(state, 0, slots, out=current)
    nothing = constant(0, device, torch.float32)
    torch.where(starts[:, None, None, None], nothing, current, out=current)
    current.mul_(kept_share[..., None, None])
    torch.mul(current, k[..., None], out=product)
    torch.sum(product, -2, out=read)
    v.sub_(read)
    v.mul_(share[..., None])
    torch.mul(k[..., None], v[..., None, :], out=product)
    current.add_(product)
    torch.mul(current, q[..., None], out=product)
    torch.sum(product, -2, out=read)
    torch.where(is_pad[:, None, None], nothing, read, out=read)
    out.copy_(read)
    torch.index_select(state, 0, slots, out=product)
    torch.where(is_pad[:, None, None, None], product, current, out=current)
    state.index_copy_(0, slots, current)
