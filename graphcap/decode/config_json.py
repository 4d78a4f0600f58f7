"""Reads the config.json of a Qwen3-MoE checkpoint and refuses, by name, what it cannot honour.

Models that mix linear with full attention are read by `config_hybrid`, with the checks of this module.

Sources: `Qwen3MoeConfig` and `modeling_qwen3_moe.py` of transformers 4.51 (keys `rope_theta`,
`rope_scaling`, `torch_dtype`, `num_experts`) and 5.x (`rope_parameters`, `dtype`,
`num_local_experts`). A key that is unknown and cannot change the maths is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphcap.decode.config_reader import (
    Reader,
    check_float,
    check_ints,
    parse_dtype,
    same,
)
from graphcap.errors import CheckpointError

# Keys that other models use to change the maths. Qwen3-MoE knows none of them, so the checkpoint is
# only what we compute if each is absent, null, or one of the values that mean "not used".
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "use_sliding_window": (False,),
    "shared_expert_intermediate_size": (0,),
    "moe_shared_expert_intermediate_size": (0,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "n_group": (0, 1),
    "topk_group": (0, 1),
    "routed_scaling_factor": (1,),
    "scoring_func": ("softmax",),
    "zero_expert_num": (0,),
    "use_qk_norm": (True,),
    "qk_norm": (True,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "attn_output_gate": (False,),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rope_interleave": (False,),
    "attn_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "swiglu_limit": (0,),
    "clip_qkv": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
}


MODEL_TYPES = ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
"""Values of `model_type` that are computed; all but the first are read by `config_hybrid`."""


def check_model(read: Reader, model_types: tuple[str, ...], architecture: str) -> None:
    """Raise unless the config is of one of `model_types` and `architecture`, without code of its own."""
    cure = "Use a Qwen3-MoE checkpoint; other models need an engine that implements them."
    key, model_type = read.required("model_type")
    if model_type not in model_types:
        raise read.refuse(key, model_type, " or ".join(map(repr, MODEL_TYPES)), cure)
    _, architectures = read.value("architectures", default=[architecture])
    if architectures != [architecture]:
        raise read.refuse("architectures", architectures, f"['{architecture}']", cure)
    _, auto_map = read.value("auto_map", default={})
    if not isinstance(auto_map, Mapping) or any(k.startswith("AutoModel") for k in auto_map):
        expected = "no model code of the checkpoint's own (no AutoModel entry)"
        raise read.refuse("auto_map", auto_map, expected, cure)


def check_neutral(read: Reader, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> None:
    """Raise if a key of `neutral` has a value that is none of those given for it."""
    for key, accepted in neutral.items():
        found = read.config.get(key)
        if found is None or any(same(found, value) for value in accepted):
            continue
        if key in ("quantization_config", "compression_config"):
            cure = "Quantised weights are not supported; use the bfloat16 or float16 checkpoint."
        else:
            cure = "It changes the maths and is not supported; use a checkpoint without it."
        expected = " or ".join([*(repr(value) for value in accepted), "absent"])
        raise read.refuse(key, found, expected, cure)


def _check_layer_types(read: Reader) -> None:
    _, layer_types = read.value("layer_types", default=[])
    if not isinstance(layer_types, list) or any(t != "full_attention" for t in layer_types):
        cure = "Only full attention is supported."
        raise read.refuse("layer_types", layer_types, "only 'full_attention'", cure)


def rope_theta(read: Reader, also: tuple[str, ...] = ()) -> float:
    """The base of RoPE, wherever it stands, once nothing but the default RoPE is asked for.

    Args:
        also: further keys of its object that are read elsewhere, or do not matter.
    """
    thetas: dict[str, Any] = {}
    for source in ("rope_parameters", "rope_scaling"):
        _, rope = read.value(source, default={})
        if not isinstance(rope, Mapping):
            raise read.refuse(source, rope, "an object or null", "Correct config.json.")
        for key, found in rope.items():
            where = f"{source}.{key}"
            if found is None or key in also:
                continue
            if key == "rope_theta":
                thetas[where] = found
            elif key in ("rope_type", "type"):
                if found != "default":
                    cure = "Scaled RoPE is not supported; use the model within its trained length."
                    raise read.refuse(where, found, "'default'", cure)
            elif not (key == "partial_rotary_factor" and same(found, 1)):
                # Qwen2-VL's `mrope_section`, a nested object per layer type, a scaling factor …
                cure = f"It has no meaning for default RoPE; remove it, or {source}, if unused."
                raise read.refuse(where, found, "absent", cure)
    if read.config.get("rope_theta") is not None:
        thetas["rope_theta"] = read.config["rope_theta"]
    found = Reader(thetas, read.name)
    key, theta = found.value(*thetas) if thetas else read.required("rope_theta")
    return check_float(read.label(key), theta, "Correct config.json.")


def expert_fields(config: Mapping[str, Any], name: str) -> dict[str, int]:
    """What a config.json says of its experts: num_experts, top_k, hidden_size, moe_intermediate_size.

    Of any model whose config spells them as Qwen's do, also those that the decode step does not
    compute (other attention, quantised weights, a text model inside another): nothing else is looked at.

    Raises:
        CheckpointError: a key is missing, or no positive integer. Names the key, what was found, the cure.
    """
    text = config.get("text_config")
    read = Reader({**config, **text} if isinstance(text, Mapping) else config, name)
    try:
        num_experts = read.integer("num_experts", "num_local_experts", minimum=0)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Experts are looked for under Qwen's names.") from None
    return {
        "num_experts": num_experts,
        "top_k": read.integer("num_experts_per_tok") if num_experts else 0,
        "hidden_size": read.integer("hidden_size"),
        "moe_intermediate_size": read.integer("moe_intermediate_size") if num_experts else 0,
    }


def _head_dim(read: Reader, hidden_size: int, num_heads: int) -> int:
    if read.config.get("head_dim") is not None:
        return read.integer("head_dim")
    if hidden_size % num_heads == 0:
        return hidden_size // num_heads  # as Qwen3MoeAttention does without the key
    expected = f"a divisor of 'hidden_size', {hidden_size}, as 'head_dim' is absent"
    raise read.refuse("num_attention_heads", num_heads, expected, "Add 'head_dim'.")


def common_fields(read: Reader) -> dict[str, Any]:
    """The arguments of `ModelShape` that every model's config states under the same keys."""
    num_experts = read.integer("num_experts", "num_local_experts", minimum=0)
    hidden_size = read.integer("hidden_size")
    num_heads = read.integer("num_attention_heads")
    _, mlp_only = read.value("mlp_only_layers", default=[])
    _, eos = read.value("eos_token_id", default=[])
    eos = eos if isinstance(eos, (list, tuple)) else [eos]
    dtype_key, dtype = read.value("dtype", "torch_dtype")
    step = "decoder_sparse_step"
    return {
        "name": read.name,
        "num_layers": read.integer("num_hidden_layers"),
        "hidden_size": hidden_size,
        "vocab_size": read.integer("vocab_size"),
        "num_heads": num_heads,
        "num_kv_heads": read.integer("num_key_value_heads"),
        "head_dim": _head_dim(read, hidden_size, num_heads),
        "num_experts": num_experts,
        # A model without experts may leave out what describes them.
        "top_k": read.integer("num_experts_per_tok") if num_experts else 0,
        "moe_intermediate_size": read.integer("moe_intermediate_size") if num_experts else 0,
        "decoder_sparse_step": read.integer(step) if read.value(step)[1] is not None else 1,
        "mlp_only_layers": check_ints(read.label("mlp_only_layers"), mlp_only, "Correct it."),
        "attention_bias": read.flag("attention_bias", default=False),
        "tie_word_embeddings": read.flag("tie_word_embeddings", default=False),
        "rms_norm_eps": read.number("rms_norm_eps"),
        "max_position_embeddings": read.integer("max_position_embeddings"),
        "dtype": None if dtype is None else parse_dtype(read.label(dtype_key), dtype),
        "eos_token_ids": check_ints(read.label("eos_token_id"), eos, "Correct it."),
    }


def shape_fields(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arguments of `ModelShape` that a config.json of Qwen3-MoE describes.

    Raises:
        CheckpointError: a key is missing, has the wrong type or sign, contradicts another, or asks
            for what the decode step does not compute. Names the key, what was found, the cure.
    """
    read = Reader(config, name)
    check_model(read, ("qwen3_moe",), "Qwen3MoeForCausalLM")
    check_neutral(read)
    _check_layer_types(read)
    return {
        **common_fields(read),
        "intermediate_size": read.integer("intermediate_size"),
        "norm_topk_prob": read.flag("norm_topk_prob", default=None),
        "rope_theta": rope_theta(read),
    }
