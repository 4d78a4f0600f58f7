"""The weights of a Qwen model with experts as plain tensors, fused the way the decode step reads them.

Shapes: H hidden, V vocabulary, Hq query heads, Hk kv heads, D head dim, E experts, I intermediate.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass

import torch

from graphcap.decode.delta_weights import (
    DeltaWeights,
    Grouped,
    SharedWeights,
    delta_views,
    empty_delta,
)
from graphcap.decode.model_shape import ModelShape

Views = Iterator[tuple[str, "torch.Tensor | Grouped"]]


# eq=False: comparing tensors has no single answer, so two weights are equal only if they are one.
@dataclass(eq=False)
class ExpertWeights:
    """A layer of routed experts. `gate_up` holds gate in rows 0..I-1 and up in rows I..2I-1.

    router (E, H), gate_up (E, 2I, H), down (E, H, I); shared: the shared expert of a hybrid, or None.
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: SharedWeights | None = None


@dataclass(eq=False)
class DenseWeights:
    """A dense MLP. gate_up (2I, H), gate first; down (H, I)."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(eq=False)
class LayerWeights:
    """One decoder layer with attention. `qkv` stacks q (Hq*D rows), k (Hk*D rows) and v (Hk*D rows).

    In a hybrid q has 2*Hq*D rows: of each head its query, then its output gate.

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
class DeltaLayerWeights:
    """One decoder layer with a gated delta net. input_norm (H,), post_norm (H,)."""

    input_norm: torch.Tensor
    delta: DeltaWeights
    post_norm: torch.Tensor
    mlp: ExpertWeights | DenseWeights


@dataclass(eq=False)
class ModelWeights:
    """All weights of a model: contiguous, of one dtype, on one device, without gradients.

    embedding (V, H), final_norm (H,), lm_head (V, H), which is `embedding` itself if the shape ties
    them. `left_out` counts by kind the tensors of the checkpoint that the next token does not depend
    on and that were not read (``vision``, ``other``).
    """

    shape: ModelShape
    embedding: torch.Tensor
    layers: list[LayerWeights | DeltaLayerWeights]
    final_norm: torch.Tensor
    lm_head: torch.Tensor
    left_out: Mapping[str, int] = field(default_factory=dict)

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
            yield from _tensors_of(layer, f"layers.{index}.")
        yield "final_norm", self.final_norm
        if self.lm_head is not self.embedding:
            yield "lm_head", self.lm_head


def _tensors_of(part: object, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a dataclass of weights, its own before those of its parts."""
    assert is_dataclass(part)
    values = [(prefix + member.name, getattr(part, member.name)) for member in fields(part)]
    for name, value in values:
        if isinstance(value, torch.Tensor):
            yield name, value
    for name, value in values:
        if is_dataclass(value):
            yield from _tensors_of(value, f"{name}.")


def empty_weights(
    shape: ModelShape, *, device: torch.device | str, dtype: torch.dtype
) -> ModelWeights:
    """Weights of `shape` with undefined values; on device "meta" they take no memory."""

    def new(*size: int) -> torch.Tensor:
        return torch.empty(size, device=device, dtype=dtype)

    h, d = shape.hidden_size, shape.head_dim
    q_rows, kv_rows = shape.query_rows, shape.num_kv_heads * d
    bias = shape.attention_bias

    def new_mlp(layer: int) -> ExpertWeights | DenseWeights:
        if shape.is_sparse(layer):
            e, i, s = shape.num_experts, shape.moe_intermediate_size, shape.shared_intermediate_size
            shared = SharedWeights(new(2 * s, h), new(h, s), new(1, h)) if s else None
            return ExpertWeights(new(e, h), new(e, 2 * i, h), new(e, h, i), shared)
        i = shape.intermediate_size
        return DenseWeights(gate_up=new(2 * i, h), down=new(h, i))

    def new_layer(layer: int) -> LayerWeights | DeltaLayerWeights:
        if shape.is_linear(layer):
            assert shape.delta is not None
            delta = empty_delta(new, shape.delta, h)
            return DeltaLayerWeights(new(h), delta, new(h), new_mlp(layer))
        return LayerWeights(
            input_norm=new(h),
            qkv=new(q_rows + 2 * kv_rows, h),
            qkv_bias=new(q_rows + 2 * kv_rows) if bias else None,
            q_norm=new(d),
            k_norm=new(d),
            output=new(h, shape.num_heads * d),
            output_bias=new(h) if bias else None,
            post_norm=new(h),
            mlp=new_mlp(layer),
        )

    embedding = new(shape.vocab_size, h)
    layers = [new_layer(layer) for layer in range(shape.num_layers)]
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


def _attention_views(prefix: str, layer: LayerWeights, shape: ModelShape) -> Views:
    q, kv = shape.query_rows, shape.num_kv_heads * shape.head_dim
    rows = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}
    for letter, part in rows.items():
        yield f"{prefix}{letter}_proj.weight", layer.qkv[part]
        if layer.qkv_bias is not None:
            yield f"{prefix}{letter}_proj.bias", layer.qkv_bias[part]
    yield f"{prefix}q_norm.weight", layer.q_norm
    yield f"{prefix}k_norm.weight", layer.k_norm
    yield f"{prefix}o_proj.weight", layer.output
    if layer.output_bias is not None:
        yield f"{prefix}o_proj.bias", layer.output_bias


def _layer_views(
    prefix: str,
    layer: LayerWeights | DeltaLayerWeights,
    shape: ModelShape,
    present: Container[str],
) -> Views:
    yield f"{prefix}input_layernorm.weight", layer.input_norm
    if isinstance(layer, LayerWeights):
        yield from _attention_views(f"{prefix}self_attn.", layer, shape)
    else:
        assert shape.delta is not None
        interleaved = shape.model_type == "qwen3_next"
        yield from delta_views(f"{prefix}linear_attn.", layer.delta, shape.delta, interleaved)
    yield f"{prefix}post_attention_layernorm.weight", layer.post_norm
    mlp = layer.mlp
    if isinstance(mlp, DenseWeights):
        yield from _mlp_views(f"{prefix}mlp.", mlp.gate_up, mlp.down)
        return
    yield f"{prefix}mlp.gate.weight", mlp.router
    yield from _expert_views(f"{prefix}mlp.experts.", mlp, present)
    if mlp.shared is not None:
        shared = mlp.shared
        yield from _mlp_views(f"{prefix}mlp.shared_expert.", shared.gate_up, shared.down)
        yield f"{prefix}mlp.shared_expert_gate.weight", shared.gate


def body_prefix(shape: ModelShape, present: Container[str] = ()) -> str:
    """What the names of all tensors but the lm head begin with: a multimodal checkpoint has its text
    model beside others, under ``model.language_model.``."""
    nested = "model.language_model."
    if shape.is_hybrid and f"{nested}embed_tokens.weight" in present:
        return nested
    return "model."


def checkpoint_views(weights: ModelWeights, present: Container[str] = ()) -> Views:
    """Every tensor of a Hugging Face checkpoint by its name there, as a view into `weights`.

    Writing into the views fills the weights; reading them saves them. Where a checkpoint orders rows
    as no view can, there is a `Grouped` instead. Experts come one by one
    (``model.layers.N.mlp.experts.E.gate_proj.weight``), as the published checkpoints have them, but
    a layer's are one tensor, ``…experts.gate_up_proj`` (E, 2I, H) or ``…experts.down_proj``
    (E, H, I), where that name is in `present` (transformers 5 calls its parameters so, and Qwen3.5
    was published so). See `body_prefix` for what names begin with.
    """
    prefix = body_prefix(weights.shape, present)
    yield f"{prefix}embed_tokens.weight", weights.embedding
    for index, layer in enumerate(weights.layers):
        yield from _layer_views(f"{prefix}layers.{index}.", layer, weights.shape, present)
    yield f"{prefix}norm.weight", weights.final_norm
    if weights.lm_head is not weights.embedding:
        yield "lm_head.weight", weights.lm_head
