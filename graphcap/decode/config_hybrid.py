"""Reads the config.json of Qwen models that mix gated delta nets with full attention.

Sources: `Qwen3NextConfig`, `Qwen3_5MoeTextConfig` and `Qwen3_5MoeConfig` of transformers 5.24 and their
modelling code. `qwen3_5_moe` (Qwen3.5 and Qwen3.6, which see) holds the text model's keys in `text_config`;
its images are not read. In text alone the three position ids of its RoPE are equal, so its
`mrope_section` changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphcap.decode.config_json import (
    NEUTRAL,
    check_model,
    check_neutral,
    common_fields,
    rope_theta,
)
from graphcap.decode.config_reader import Reader, check_float
from graphcap.decode.delta_shape import DeltaShape
from graphcap.errors import CheckpointError

_ARCHITECTURES = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}

HYBRID_TYPES = tuple(_ARCHITECTURES)

_HYBRID_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **{
        key: accepted
        for key, accepted in NEUTRAL.items()
        if key not in ("shared_expert_intermediate_size", "partial_rotary_factor")
    },
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "linear_conv_bias": (False,),
}

_ONLY_EXPERTS: Mapping[str, tuple[Any, ...]] = {
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "norm_topk_prob": (True,),  # its router always divides by the sum
}
"""What Qwen3.5 knows no other way of, so transformers does not look at it."""

_ROPE_KEYS = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
_INTERVAL = 4
"""`full_attention_interval` of a config that does not state it, as in transformers."""
_PARTIAL = 0.25
"""`partial_rotary_factor` of a config that does not state it, as in transformers."""


def _text_config(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The text model's config of a multimodal one, with what only the outer one states."""
    outer = Reader(config, name)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        cure = "Use the config.json that was published with the checkpoint."
        raise outer.refuse("text_config", text, "an object, as 'model_type' says", cure)
    check_neutral(
        outer, {key: NEUTRAL[key] for key in ("quantization_config", "compression_config")}
    )
    inner = Reader(text, name)
    key, model_type = inner.required("model_type")
    if model_type != "qwen3_5_moe_text":
        raise inner.refuse(f"text_config.{key}", model_type, "'qwen3_5_moe_text'", "Correct it.")
    merged = dict(text)
    merged.pop("architectures", None)
    # transformers ties the embedding by the outer config, and takes the dtype from either.
    tied = [c["tie_word_embeddings"] for c in (config, text) if "tie_word_embeddings" in c]
    if len(tied) == 2 and tied[0] != tied[1]:
        expected = f"the same as in 'text_config', {tied[1]!r}"
        raise outer.refuse("tie_word_embeddings", tied[0], expected, "Correct the wrong one.")
    merged["tie_word_embeddings"] = tied[0] if tied else False
    if all(text.get(key) is None for key in ("dtype", "torch_dtype")):
        merged["dtype"] = config.get("dtype", config.get("torch_dtype"))
    return merged


def _linear_layers(read: Reader) -> tuple[int, ...]:
    layers = read.integer("num_hidden_layers")
    _, types = read.value("layer_types")
    if types is None:
        key = "full_attention_interval"
        interval = read.integer(key) if read.value(key)[1] is not None else _INTERVAL
        return tuple(layer for layer in range(layers) if (layer + 1) % interval)
    expected = f"a list of {layers} 'linear_attention' or 'full_attention', one a layer"
    if not isinstance(types, list) or len(types) != layers:
        raise read.refuse("layer_types", types, expected, "Correct config.json.")
    for index, kind in enumerate(types):
        if kind not in ("linear_attention", "full_attention"):
            raise read.refuse(
                f"layer_types[{index}]", kind, expected, "Other kinds are not computed."
            )
    return tuple(layer for layer in range(layers) if types[layer] == "linear_attention")


def _rotary_dim(read: Reader, head_dim: int) -> int:
    """How many values of a head RoPE rotates: int(D * partial_rotary_factor), as in transformers."""
    stated: dict[str, Any] = {"partial_rotary_factor": read.config.get("partial_rotary_factor")}
    for source in ("rope_parameters", "rope_scaling"):
        rope = read.config.get(source)
        if isinstance(rope, Mapping):
            stated[f"{source}.partial_rotary_factor"] = rope.get("partial_rotary_factor")
    found = Reader(stated, read.name)
    key, factor = found.value(*stated, default=_PARTIAL)
    rotary = int(head_dim * check_float(read.label(key), factor, "Correct config.json."))
    if rotary > head_dim or rotary < 2 or rotary % 2:
        expected = f"a share of 'head_dim', {head_dim}, that makes an even number of values"
        raise read.refuse(key, factor, expected, "RoPE rotates pairs of values.")
    return rotary


def hybrid_fields(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arguments of `ModelShape` that a config.json of one of `HYBRID_TYPES` describes.

    Raises:
        CheckpointError: a key is missing, has the wrong type or sign, contradicts another, or asks
            for what the decode step does not compute. Names the key, what was found, the cure.
    """
    outer = str(config.get("model_type"))
    check_model(Reader(config, name), HYBRID_TYPES, _ARCHITECTURES[outer])
    read = Reader(_text_config(config, name) if outer == "qwen3_5_moe" else config, name)
    is_next = outer == "qwen3_next"
    check_neutral(read, _HYBRID_NEUTRAL if is_next else {**_HYBRID_NEUTRAL, **_ONLY_EXPERTS})
    read.integer("head_dim")  # its default in transformers is no quotient of other sizes
    fields = common_fields(read)
    if not fields["num_experts"]:
        cure = "Use a checkpoint with experts."
        raise CheckpointError(f"{read.label('num_experts')}: expected experts, found 0. {cure}")
    return {
        **fields,
        "model_type": "qwen3_next" if is_next else "qwen3_5_moe_text",
        # Qwen3.5 has no dense layers.
        "intermediate_size": read.integer("intermediate_size") if is_next else 0,
        "norm_topk_prob": read.flag("norm_topk_prob", default=None) if is_next else True,
        "rope_theta": rope_theta(read, also=_ROPE_KEYS),
        "rotary_dim": _rotary_dim(read, fields["head_dim"]),
        "shared_intermediate_size": read.integer("shared_expert_intermediate_size"),
        "linear_layers": _linear_layers(read),
        "delta": DeltaShape(
            num_key_heads=read.integer("linear_num_key_heads"),
            num_value_heads=read.integer("linear_num_value_heads"),
            key_dim=read.integer("linear_key_head_dim"),
            value_dim=read.integer("linear_value_head_dim"),
            conv_width=read.integer("linear_conv_kernel_dim"),
        ),
    }
