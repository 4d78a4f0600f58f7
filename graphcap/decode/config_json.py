"""Reads the config.json of a Qwen3-MoE checkpoint and refuses, by name, what it cannot honour.

Sources: `Qwen3MoeConfig` and `modeling_qwen3_moe.py` of transformers 4.51 (keys `rope_theta`,
`rope_scaling`, `torch_dtype`, `num_experts`) and 5.x (`rope_parameters`, `dtype`,
`num_local_experts`). A key that is unknown and cannot change the maths is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from graphcap.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
"""The dtypes of weights that the decode step has kernels for."""

# Keys that other models use to change the maths. Qwen3-MoE knows none of them, so the checkpoint is
# only what we compute if each is absent, null, or one of the values that mean "not used".
_NEUTRAL: dict[str, tuple[Any, ...]] = {
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


def _same(found: Any, accepted: Any) -> bool:
    # In Python True == 1 and False == 0; in a config they are different statements.
    return isinstance(found, bool) == isinstance(accepted, bool) and bool(found == accepted)


def refuse(label: str, found: Any, expected: str, cure: str) -> CheckpointError:
    """The error for one value: what it is called, what was expected, what was found, the cure."""
    kind = type(found).__name__
    return CheckpointError(f"{label}: expected {expected}, found {found!r} ({kind}). {cure}")


def check_int(label: str, value: Any, minimum: int, cure: str) -> int:
    """`value` if it is an int (not a bool) of at least `minimum`; otherwise CheckpointError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise refuse(label, value, f"an integer >= {minimum}", cure)
    return value


def check_float(label: str, value: Any, cure: str) -> float:
    """`value` as a float if it is a finite number > 0 (not a bool); otherwise CheckpointError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refuse(label, value, "a number > 0", cure)
    if not (math.isfinite(value) and value > 0):
        raise refuse(label, value, "a finite number > 0", cure)
    return float(value)


def check_bool(label: str, value: Any, cure: str) -> bool:
    """`value` if it is True or False; otherwise CheckpointError."""
    if not isinstance(value, bool):
        raise refuse(label, value, "true or false", cure)
    return value


def check_ints(label: str, value: Any, cure: str) -> tuple[int, ...]:
    """`value` as a tuple if it is a list or tuple of integers >= 0; otherwise CheckpointError."""
    if not isinstance(value, (list, tuple)):
        raise refuse(label, value, "a list of integers >= 0", cure)
    return tuple(check_int(f"{label}[{i}]", item, 0, cure) for i, item in enumerate(value))


class _Reader:
    """Typed access to one config; every error names the model, the key, and the cure."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name

    def label(self, key: str) -> str:
        return f"config of {self.name}: '{key}'"

    def refuse(self, key: str, found: Any, expected: str, cure: str) -> CheckpointError:
        return refuse(self.label(key), found, expected, cure)

    def value(self, *keys: str, default: Any = None) -> tuple[str, Any]:
        """The first present key of several spellings of one value; they must not disagree."""
        present = [(k, self.config[k]) for k in keys if self.config.get(k) is not None]
        for key, value in present[1:]:
            if not _same(value, present[0][1]):
                raise self.refuse(
                    key,
                    value,
                    f"the same as '{present[0][0]}', {present[0][1]!r}",
                    "Remove the wrong one.",
                )
        return present[0] if present else (keys[0], default)

    def required(self, *keys: str) -> tuple[str, Any]:
        key, value = self.value(*keys)
        if value is None:
            raise CheckpointError(
                f"config of {self.name}: '{key}' is missing. Qwen3-MoE cannot be computed without it;"
                " add it to config.json with the value the model was trained with."
            )
        return key, value

    def integer(self, *keys: str, minimum: int = 1) -> int:
        key, value = self.required(*keys)
        return check_int(self.label(key), value, minimum, "Correct config.json.")

    def number(self, key: str) -> float:
        return check_float(self.label(key), self.required(key)[1], "Correct config.json.")

    def flag(self, key: str, default: bool | None) -> bool:
        value = self.required(key)[1] if default is None else self.value(key, default=default)[1]
        return check_bool(self.label(key), value, "Correct config.json.")


def _check_model(read: _Reader) -> None:
    cure = "Use a Qwen3-MoE checkpoint; other models need an engine that implements them."
    key, model_type = read.required("model_type")
    if model_type != "qwen3_moe":
        raise read.refuse(key, model_type, "'qwen3_moe'", cure)
    _, architectures = read.value("architectures", default=["Qwen3MoeForCausalLM"])
    if architectures != ["Qwen3MoeForCausalLM"]:
        raise read.refuse("architectures", architectures, "['Qwen3MoeForCausalLM']", cure)
    _, auto_map = read.value("auto_map", default={})
    if not isinstance(auto_map, Mapping) or any(k.startswith("AutoModel") for k in auto_map):
        expected = "no model code of the checkpoint's own (no AutoModel entry)"
        raise read.refuse("auto_map", auto_map, expected, cure)


def _check_neutral(read: _Reader) -> None:
    for key, accepted in _NEUTRAL.items():
        found = read.config.get(key)
        if found is None or any(_same(found, value) for value in accepted):
            continue
        if key in ("quantization_config", "compression_config"):
            cure = "Quantised weights are not supported; use the bfloat16 or float16 checkpoint."
        else:
            cure = "It changes the maths and is not supported; use a checkpoint without it."
        expected = " or ".join([*(repr(value) for value in accepted), "absent"])
        raise read.refuse(key, found, expected, cure)
    _, layer_types = read.value("layer_types", default=[])
    if not isinstance(layer_types, list) or any(t != "full_attention" for t in layer_types):
        cure = "Only full attention is supported."
        raise read.refuse("layer_types", layer_types, "only 'full_attention'", cure)


def _rope_theta(read: _Reader) -> float:
    """The base of RoPE, wherever it stands, once nothing but the default RoPE is asked for."""
    thetas: dict[str, Any] = {}
    for source in ("rope_parameters", "rope_scaling"):
        _, rope = read.value(source, default={})
        if not isinstance(rope, Mapping):
            raise read.refuse(source, rope, "an object or null", "Correct config.json.")
        for key, found in rope.items():
            where = f"{source}.{key}"
            if found is None:
                continue
            if key == "rope_theta":
                thetas[where] = found
            elif key in ("rope_type", "type"):
                if found != "default":
                    cure = "Scaled RoPE is not supported; use the model within its trained length."
                    raise read.refuse(where, found, "'default'", cure)
            elif not (key == "partial_rotary_factor" and _same(found, 1)):
                # Qwen2-VL's `mrope_section`, a nested object per layer type, a scaling factor …
                cure = f"It has no meaning for default RoPE; remove it, or {source}, if unused."
                raise read.refuse(where, found, "absent", cure)
    if read.config.get("rope_theta") is not None:
        thetas["rope_theta"] = read.config["rope_theta"]
    found = _Reader(thetas, read.name)
    key, theta = found.value(*thetas) if thetas else read.required("rope_theta")
    return check_float(read.label(key), theta, "Correct config.json.")


def parse_dtype(label: str, value: Any) -> torch.dtype:
    """A dtype of `DTYPES`, given as a torch.dtype or as its name with or without "torch."."""
    name = str(value).removeprefix("torch.")
    if not isinstance(value, (str, torch.dtype)) or name not in DTYPES:
        cure = "Convert the weights, or ask for one of these dtypes."
        raise refuse(label, value, "one of " + ", ".join(DTYPES), cure)
    return DTYPES[name]


def expert_fields(config: Mapping[str, Any], name: str) -> dict[str, int]:
    """What a config.json says of its experts: num_experts, top_k, hidden_size, moe_intermediate_size.

    Of any model whose config spells them as Qwen's do, also those that the decode step does not
    compute (other attention, quantised weights, a text model inside another): nothing else is looked at.

    Raises:
        CheckpointError: a key is missing, or no positive integer. Names the key, what was found, the cure.
    """
    text = config.get("text_config")
    read = _Reader({**config, **text} if isinstance(text, Mapping) else config, name)
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


def shape_fields(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arguments of `ModelShape` that a config.json describes.

    Raises:
        CheckpointError: a key is missing, has the wrong type or sign, contradicts another, or asks
            for what the decode step does not compute. Names the key, what was found, the cure.
    """
    read = _Reader(config, name)
    _check_model(read)
    _check_neutral(read)
    num_experts = read.integer("num_experts", "num_local_experts", minimum=0)
    hidden_size = read.integer("hidden_size")
    num_heads = read.integer("num_attention_heads")
    if read.config.get("head_dim") is not None:
        head_dim = read.integer("head_dim")
    elif hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads  # as Qwen3MoeAttention does without the key
    else:
        expected = f"a divisor of 'hidden_size', {hidden_size}, as 'head_dim' is absent"
        raise read.refuse("num_attention_heads", num_heads, expected, "Add 'head_dim'.")
    _, mlp_only = read.value("mlp_only_layers", default=[])
    _, eos = read.value("eos_token_id", default=[])
    eos = eos if isinstance(eos, (list, tuple)) else [eos]
    dtype_key, dtype = read.value("dtype", "torch_dtype")
    step = "decoder_sparse_step"
    return {
        "name": name,
        "num_layers": read.integer("num_hidden_layers"),
        "hidden_size": hidden_size,
        "vocab_size": read.integer("vocab_size"),
        "num_heads": num_heads,
        "num_kv_heads": read.integer("num_key_value_heads"),
        "head_dim": head_dim,
        "num_experts": num_experts,
        # A model without experts may leave out what describes them.
        "top_k": read.integer("num_experts_per_tok") if num_experts else 0,
        "moe_intermediate_size": read.integer("moe_intermediate_size") if num_experts else 0,
        "intermediate_size": read.integer("intermediate_size"),
        "norm_topk_prob": read.flag("norm_topk_prob", default=None),
        "decoder_sparse_step": read.integer(step) if read.value(step)[1] is not None else 1,
        "mlp_only_layers": check_ints(read.label("mlp_only_layers"), mlp_only, "Correct it."),
        "attention_bias": read.flag("attention_bias", default=False),
        "tie_word_embeddings": read.flag("tie_word_embeddings", default=False),
        "rope_theta": _rope_theta(read),
        "rms_norm_eps": read.number("rms_norm_eps"),
        "max_position_embeddings": read.integer("max_position_embeddings"),
        "dtype": None if dtype is None else parse_dtype(read.label(dtype_key), dtype),
        "eos_token_ids": check_ints(read.label("eos_token_id"), eos, "Correct it."),
    }
