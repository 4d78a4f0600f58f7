"""The decode step in plain torch, written for itself: nothing of graphcap but the weights.

In the model's dtype it is the peer of the benchmarks, run eagerly, in a CUDA graph and by torch.compile;
in a wider one (`compute`) it is the reference that tokens are held against. It follows transformers'
Qwen3-MoE, Qwen3-Next and Qwen3.5-MoE. Nothing synchronises and shapes do not depend on values, so that
it can be captured. Needs torch 2.4 (rms_norm), and `torch._grouped_mm` for "grouped" experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from graphcap.decode.weights import (
    DeltaLayerWeights,
    DenseWeights,
    ExpertWeights,
    LayerWeights,
    ModelWeights,
)

EXPERTS = ("grouped", "gathered")
"""How routed experts are multiplied: one grouped product over pairs sorted by expert, or a batched
product over a copy of the experts' weights for each pair."""


class PlainStep:
    """One token for each of `rows` sequences, fed back inside.

    Args:
        weights: shared, not copied.
        max_context: tokens that the cache, one contiguous tensor a layer, holds a sequence.
        compute: the dtype of everything but the weights; None: that of the weights.
        experts: one of `EXPERTS`.

    Attributes:
        token_ids, positions: int64 (rows,), of the next step; each step advances them.
        chosen: give it a list, and each step appends the experts of every sparse layer, (rows, K).
    """

    def __init__(
        self,
        weights: ModelWeights,
        rows: int,
        max_context: int,
        *,
        compute: torch.dtype | None = None,
        experts: str = "grouped",
    ) -> None:
        shape, device = weights.shape, weights.device
        dtype = compute or weights.dtype
        room = -(-max_context // 16) * 16  # attention kernels want aligned masks
        self.weights, self.dtype = weights, dtype
        self.token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.chosen: list[torch.Tensor] | None = None
        self.reach = torch.arange(room, device=device)
        steps = torch.arange(0, shape.rotated, 2, dtype=torch.float64, device=device)
        angles = self.reach[:, None] / shape.rope_theta ** (steps / shape.rotated)
        angles = torch.cat([angles, angles], 1)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.final_norm = norm_factor(weights.final_norm, shape.is_hybrid, dtype)
        self.layers = [
            PlainLayer(weights, index, rows, room, dtype, experts)
            for index in range(shape.num_layers)
        ]

    def own(self) -> list[torch.Tensor]:
        """Every tensor that it has besides the weights, each always at the same address."""
        tensors = [tensor for layer in self.layers for tensor in layer.state]
        for part in (self, *self.layers):
            tensors += [each for each in vars(part).values() if isinstance(each, torch.Tensor)]
        return tensors

    def __call__(self) -> torch.Tensor:
        """One step: logits (rows, V)."""
        shape, weights = self.weights.shape, self.weights
        hidden = F.embedding(self.token_ids, weights.embedding).to(self.dtype)
        cos, sin = self.cos[self.positions][:, None], self.sin[self.positions][:, None]
        beyond = self.reach > self.positions[:, None]
        mask = torch.zeros(beyond.shape, dtype=self.dtype, device=beyond.device)
        mask = mask.masked_fill(beyond, float("-inf"))[:, None, None]
        for layer in self.layers:
            hidden, ids = layer(hidden, self.positions, cos, sin, mask)
            if self.chosen is not None and ids is not None:
                self.chosen.append(ids)
        hidden = rms_norm(hidden, self.final_norm, shape.rms_norm_eps)
        logits = linear(hidden, weights.lm_head)
        self.token_ids.copy_(logits.argmax(-1))
        self.positions.add_(1)
        return logits


class PlainLayer:
    """One layer with its keys and values, or with the states of its gated delta net."""

    def __init__(
        self,
        weights: ModelWeights,
        index: int,
        rows: int,
        room: int,
        dtype: torch.dtype,
        experts: str,
    ) -> None:
        shape, layer, device = weights.shape, weights.layers[index], weights.device
        self.shape, self.layer = shape, layer
        self.multiply = {"grouped": grouped, "gathered": gathered}[experts]
        self.input_norm = norm_factor(layer.input_norm, shape.is_hybrid, dtype)
        self.post_norm = norm_factor(layer.post_norm, shape.is_hybrid, dtype)
        self.rows = torch.arange(rows, device=device)
        self.state: tuple[torch.Tensor, torch.Tensor]
        if isinstance(layer, LayerWeights):
            self.q_norm = norm_factor(layer.q_norm, shape.is_hybrid, dtype)
            self.k_norm = norm_factor(layer.k_norm, shape.is_hybrid, dtype)
            size = (rows, room, shape.num_kv_heads, shape.head_dim)
            keys, values = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
            self.state = keys, values
        else:
            delta = shape.delta
            assert delta is not None
            self.net_norm = norm_factor(layer.delta.norm, False, dtype)
            wide = torch.promote_types(dtype, torch.float32)
            conv = (rows, delta.channels, delta.conv_width - 1)
            recurrent = (rows, delta.num_value_heads, delta.key_dim, delta.value_dim)
            self.state = (
                torch.zeros(conv, dtype=dtype, device=device),
                torch.zeros(recurrent, dtype=wide, device=device),
            )

    def __call__(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream (M, H) after the layer, and the experts chosen (M, K)."""
        layer, eps = self.layer, self.shape.rms_norm_eps
        normed = rms_norm(hidden, self.input_norm, eps)
        if isinstance(layer, LayerWeights):
            hidden = hidden + self._attention(layer, normed, positions, cos, sin, mask)
        else:
            hidden = hidden + self._delta_net(layer, normed)
        normed = rms_norm(hidden, self.post_norm, eps)
        mlp = layer.mlp
        if isinstance(mlp, DenseWeights):
            return hidden + gated_mlp(normed, mlp.gate_up, mlp.down), None
        added, ids = self._experts(mlp, normed)
        return hidden + added, ids

    def _attention(
        self,
        layer: LayerWeights,
        x: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        shape, rows = self.shape, x.shape[0]
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        qkv = linear(x, layer.qkv, layer.qkv_bias).view(rows, -1, dim)
        q, k, v = qkv.split((shape.query_rows // dim, kv_heads, kv_heads), 1)
        gate = None
        if shape.is_hybrid:  # of each head its query, then its gate
            q, gate = q.unflatten(1, (heads, 2)).unbind(2)
        q = turned(rms_norm(q, self.q_norm, shape.rms_norm_eps), cos, sin)
        k = turned(rms_norm(k, self.k_norm, shape.rms_norm_eps), cos, sin)
        keys, values = self.state
        keys[self.rows, positions] = k
        values[self.rows, positions] = v
        # The heads of a group are queries to the same keys: no copy of keys for each of them.
        out = F.scaled_dot_product_attention(
            q.reshape(rows, kv_heads, heads // kv_heads, dim),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
        ).reshape(rows, heads, dim)
        if gate is not None:
            out = out * gate.sigmoid()
        return linear(out.flatten(1), layer.output, layer.output_bias)

    def _delta_net(self, layer: DeltaLayerWeights, x: torch.Tensor) -> torch.Tensor:
        net, sizes = layer.delta, self.shape.delta
        assert sizes is not None
        heads, (conv, recurrent) = sizes.num_value_heads, self.state
        wide = recurrent.dtype
        new, z, beta, decay = linear(x, net.projection).split(
            (sizes.channels, sizes.values, heads, heads), 1
        )
        window = torch.cat([conv, new[..., None]], -1)
        conv.copy_(window[..., 1:])
        mixed = F.silu((window.to(wide) * net.conv.to(wide)).sum(-1))
        q, k, v = mixed.split((sizes.keys, sizes.keys, sizes.values), 1)
        v = v.unflatten(1, (heads, -1))
        group = heads // sizes.num_key_heads
        q, k = (
            (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 1)
            for part in (half.unflatten(1, (-1, sizes.key_dim)) for half in (q, k))
        )
        rate = F.softplus(decay.to(wide) + net.time_bias.to(wide))
        kept = (-net.decay_log.to(wide).exp() * rate).exp()[..., None, None]
        state = recurrent * kept
        missing = v - (state * k[..., None]).sum(-2)
        state = state + k[..., None] * (missing * beta.to(wide).sigmoid()[..., None])[..., None, :]
        recurrent.copy_(state)
        read = ((state * q[..., None]).sum(-2) * sizes.key_dim**-0.5).to(x.dtype)
        out = rms_norm(read, self.net_norm, self.shape.rms_norm_eps)
        out = out * F.silu(z.unflatten(1, (heads, -1)))
        return linear(out.flatten(1), net.output)

    def _experts(self, mlp: ExpertWeights, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = linear(x, mlp.router)
        scores = logits.to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
        best, ids = scores.topk(self.shape.top_k)
        if self.shape.norm_topk_prob:
            best = best / best.sum(-1, keepdim=True)
        by_pair = self.multiply(x, ids, mlp.gate_up, mlp.down)
        out = torch.bmm(best.to(x.dtype)[:, None], by_pair)[:, 0]
        if mlp.shared is not None:
            shared = gated_mlp(x, mlp.shared.gate_up, mlp.shared.down)
            out = out + shared * linear(x, mlp.shared.gate).sigmoid()
        return out, ids


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias in the dtype of `x`."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def norm_factor(weight: torch.Tensor, zero_centred: bool, dtype: torch.dtype) -> torch.Tensor:
    """What a norm multiplies by: hybrids store their weight minus one."""
    return (weight.float() + 1).to(dtype) if zero_centred else weight.to(dtype)


def rms_norm(x: torch.Tensor, factor: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), factor, eps)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE, neox style, on the first values of each head (M, heads, D); cos and sin (M, 1, R)."""
    part, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
    first, second = part.chunk(2, -1)
    part = part * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([part, rest], -1) if rest.shape[-1] else part


def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = linear(x, gate_up).chunk(2, -1)
    return linear(F.silu(gate) * up, down)


def grouped(
    x: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """What each of its experts makes of each row: (M, K, H). Reads each chosen expert once."""
    rows, top_k = ids.shape
    by_expert, order = ids.flatten().sort()
    experts = torch.arange(gate_up.shape[0], device=x.device)
    ends = torch.searchsorted(by_expert, experts, right=True).int()
    both = torch._grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends)
    gate, up = both.chunk(2, -1)
    sorted_out = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    return torch.empty_like(sorted_out).index_copy_(0, order, sorted_out).view(rows, top_k, -1)


def gathered(
    x: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The same: (M, K, H). Copies the weights of the expert of each pair."""
    rows, top_k = ids.shape
    pairs = ids.flatten()
    both = torch.bmm(gate_up[pairs].to(x.dtype), x.repeat_interleave(top_k, 0)[..., None])
    gate, up = both.chunk(2, 1)
    return torch.bmm(down[pairs].to(x.dtype), F.silu(gate) * up).view(rows, top_k, -1)
