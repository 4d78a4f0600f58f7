"""The weights of a Qwen3-MoE model as plain tensors, fused the way the decode step reads them.

Shapes: H hidden, V vocabulary, Hq query heads, Hk kv heads, D head dim, E experts, I intermediate.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, fields

import torch

from graphcap.decode.shapes import ModelShape


# eq=False: comparing tensors has no single answer, so two weights are equal only if they are one.
@dataclass(eq=False)
class ExpertWeights:
    """A layer of routed experts. `gate_up` holds gate in rows 0..I-1 and up in rows I..2I-1.

    router (E, H), gate_up (E, 2I, H), down (E, H, I).
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(eq=False)
class DenseWeights:
    """A dense MLP. gate_up (2I, H), gate first; down (H, I)."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(eq=False)
class LayerWeights:
    """One decoder layer. `qkv` stacks q (Hq*D rows), k (Hk*D rows) and v (Hk*D rows).

    input_norm (H,), qkv ((Hq+2Hk)*D, H), qkv_bias ((Hq+2Hk)*D,) or None, q_norm (D,), k_norm (D,),
    output (H, Hq*D), output_bias (H,) or None, post_norm (H,).
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    mlp: ExpertWeights | DenseWeights


@dataclass(eq=False)
class ModelWeights:
    """All weights of a model: contiguous, of one dtype, on one device, without gradients.

    embedding (V, H), final_norm (H,), lm_head (V, H), which is `embedding` itself if the shape ties
    them.
    """

    shape: ModelShape
    embedding: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    lm_head: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every weight."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """The device of every weight."""
        return self.embedding.device

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; a tied lm head counts once."""
        return sum(tensor.nbytes for _, tensor in self.named_tensors())

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once, with its path, such as ``layers.3.mlp.gate_up``."""
        yield "embedding", self.embedding
        for index, layer in enumerate(self.layers):
            for part, prefix in ((layer, f"layers.{index}."), (layer.mlp, f"layers.{index}.mlp.")):
                for field in fields(part):
                    value = getattr(part, field.name)
                    if isinstance(value, torch.Tensor):
                        yield prefix + field.name, value
        yield "final_norm", self.final_norm
        if self.lm_head is not self.embedding:
            yield "lm_head", self.lm_head


def empty_weights(
    shape: ModelShape, *, device: torch.device | str, dtype: torch.dtype
) -> ModelWeights:
    """Weights of `shape` with undefined values; on device "meta" they take no memory."""

    def new(*size: int) -> torch.Tensor:
        return torch.empty(size, device=device, dtype=dtype)

    h, d = shape.hidden_size, shape.head_dim
    q_rows, kv_rows = shape.num_heads * d, shape.num_kv_heads * d
    bias = shape.attention_bias

    def new_mlp(layer: int) -> ExpertWeights | DenseWeights:
        if shape.is_sparse(layer):
            e, i = shape.num_experts, shape.moe_intermediate_size
            return ExpertWeights(router=new(e, h), gate_up=new(e, 2 * i, h), down=new(e, h, i))
        i = shape.intermediate_size
        return DenseWeights(gate_up=new(2 * i, h), down=new(h, i))

    embedding = new(shape.vocab_size, h)
    layers = [
        LayerWeights(
            input_norm=new(h),
            qkv=new(q_rows + 2 * kv_rows, h),
            qkv_bias=new(q_rows + 2 * kv_rows) if bias else None,
            q_norm=new(d),
            k_norm=new(d),
            output=new(h, q_rows),
            output_bias=new(h) if bias else None,
            post_norm=new(h),
            mlp=new_mlp(layer),
        )
        for layer in range(shape.num_layers)
    ]
    lm_head = embedding if shape.tie_word_embeddings else new(shape.vocab_size, h)
    return ModelWeights(shape, embedding, layers, final_norm=new(h), lm_head=lm_head)


def _mlp_views(
    prefix: str, gate_up: torch.Tensor, down: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    half = gate_up.shape[0] // 2
    yield f"{prefix}gate_proj.weight", gate_up[:half]
    yield f"{prefix}up_proj.weight", gate_up[half:]
    yield f"{prefix}down_proj.weight", down


def _expert_views(
    prefix: str, mlp: ExpertWeights, present: Container[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    stacked = {f"{prefix}gate_up_proj": mlp.gate_up, f"{prefix}down_proj": mlp.down}
    stacked = {name: tensor for name, tensor in stacked.items() if name in present}
    yield from stacked.items()
    for expert in range(mlp.gate_up.shape[0]):
        for name, view in _mlp_views(f"{prefix}{expert}.", mlp.gate_up[expert], mlp.down[expert]):
            kind = "down_proj" if name.endswith("down_proj.weight") else "gate_up_proj"
            if prefix + kind not in stacked:
                yield name, view


def _layer_views(
    prefix: str, layer: LayerWeights, shape: ModelShape, present: Container[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rows = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}
    yield f"{prefix}input_layernorm.weight", layer.input_norm
    for letter, part in rows.items():
        yield f"{prefix}self_attn.{letter}_proj.weight", layer.qkv[part]
        if layer.qkv_bias is not None:
            yield f"{prefix}self_attn.{letter}_proj.bias", layer.qkv_bias[part]
    yield f"{prefix}self_attn.q_norm.weight", layer.q_norm
    yield f"{prefix}self_attn.k_norm.weight", layer.k_norm
    yield f"{prefix}self_attn.o_proj.weight", layer.output
    if layer.output_bias is not None:
        yield f"{prefix}self_attn.o_proj.bias", layer.output_bias
    yield f"{prefix}post_attention_layernorm.weight", layer.post_norm
    if isinstance(layer.mlp, ExpertWeights):
        yield f"{prefix}mlp.gate.weight", layer.mlp.router
        yield from _expert_views(f"{prefix}mlp.experts.", layer.mlp, present)
    else:
        yield from _mlp_views(f"{prefix}mlp.", layer.mlp.gate_up, layer.mlp.down)


def checkpoint_views(
    weights: ModelWeights, present: Container[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Hugging Face checkpoint by its name there, as a view into `weights`.

    Writing into the views fills the weights; reading them saves them. Experts come one by one
    (``model.layers.N.mlp.experts.E.gate_proj.weight``), as the published checkpoints have them, but
    a layer's are one tensor, ``…experts.gate_up_proj`` (E, 2I, H) or ``…experts.down_proj``
    (E, H, I), where that name is in `present` (transformers 5 calls its parameters so).
    """
    yield "model.embed_tokens.weight", weights.embedding
    for index, layer in enumerate(weights.layers):
        yield from _layer_views(f"model.layers.{index}.", layer, weights.shape, present)
    yield "model.norm.weight", weights.final_norm
    if weights.lm_head is not weights.embedding:
        yield "lm_head.weight", weights.lm_head
