"""config.json: what is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest
from shape_data import QWEN3_30B_A3B, config, without

from graphcap.decode.shapes import ModelShape
from graphcap.errors import CheckpointError

REQUIRED = [
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "intermediate_size",
    "norm_topk_prob",
    "rope_theta",
    "rms_norm_eps",
    "max_position_embeddings",
]


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("how", ["absent", "null"])
def test_missing_key_is_named(key: str, how: str) -> None:
    changed = without(key) if how == "absent" else config(**{key: None})
    with pytest.raises(CheckpointError, match=f"config of mine: '{key}' is missing.*add it"):
        ModelShape.from_config(changed, "mine")


INTEGERS = [k for k, v in QWEN3_30B_A3B.items() if type(v) is int and k in REQUIRED]


@pytest.mark.parametrize("key", [*INTEGERS, "head_dim", "decoder_sparse_step"])
@pytest.mark.parametrize("value", ["8", 8.0, True, -1, [8]])
def test_wrong_integer_is_named(key: str, value: object) -> None:
    kind = type(value).__name__
    with pytest.raises(CheckpointError, match=rf"'{key}': expected an integer.*found .*\({kind}\)"):
        ModelShape.from_config(config(**{key: value}), "x")


@pytest.mark.parametrize("key", [k for k in INTEGERS if k != "num_experts"])
def test_zero_is_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{key}': expected an integer >= 1, found 0"):
        ModelShape.from_config(config(**{key: 0}), "x")


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
@pytest.mark.parametrize("value", ["1e6", True, -1.0, 0, float("nan"), float("inf")])
def test_wrong_number_is_named(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"'{key}': expected a (finite )?number > 0"):
        ModelShape.from_config(config(**{key: value}), "x")


@pytest.mark.parametrize("key", ["norm_topk_prob", "attention_bias", "tie_word_embeddings"])
@pytest.mark.parametrize("value", [1, "true", 0])
def test_wrong_flag_is_named(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"'{key}': expected true or false"):
        ModelShape.from_config(config(**{key: value}), "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2_moe"}, "'model_type': expected 'qwen3_moe' or .*found 'qwen2_moe'"),
        ({"model_type": "mixtral"}, "other models need an engine that implements them"),
        ({"architectures": ["Qwen3MoeModel"]}, "'architectures': expected .*found .*Qwen3MoeModel"),
        ({"auto_map": {"AutoModelForCausalLM": "m.M"}}, "'auto_map': expected no model code"),
        ({"auto_map": "m.M"}, "'auto_map'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'quantization_config'.*bfloat16"),
        ({"compression_config": {"x": 1}}, "'compression_config'.*Quantised weights"),
        ({"hidden_act": "gelu"}, "'hidden_act': expected 'silu' or absent, found 'gelu'"),
        ({"use_sliding_window": True}, "'use_sliding_window': expected False"),
        ({"use_sliding_window": 0}, r"'use_sliding_window': expected False.*found 0 \(int\)"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'layer_types': expected only"),
        ({"layer_types": "full_attention"}, "'layer_types': expected only"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor': expected 1 .*found 0.5"),
        ({"shared_expert_intermediate_size": 512}, "'shared_expert_intermediate_size'.*found 512"),
        ({"n_shared_experts": 1}, "'n_shared_experts': expected 0"),
        ({"num_shared_experts": 2}, "'num_shared_experts'"),
        ({"routed_scaling_factor": 2.5}, "'routed_scaling_factor': expected 1 .*changes the maths"),
        ({"scoring_func": "sigmoid"}, "'scoring_func': expected 'softmax'"),
        ({"n_group": 8}, "'n_group'"),
        ({"qkv_bias": True}, "'qkv_bias': expected False"),
        ({"qk_norm": False}, "'qk_norm': expected True"),
        ({"attn_output_gate": True}, "'attn_output_gate'"),
        ({"final_logit_softcapping": 30.0}, "'final_logit_softcapping'"),
        ({"clip_qkv": 8.0}, "'clip_qkv': expected absent, found 8.0"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "'rope_scaling.type'.*'default'.*'yarn'",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "'rope_scaling.rope_type'.*Scaled RoPE"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'rope_parameters.rope_type'"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.25}},
            "'rope_parameters.partial_rotary_fa",
        ),
        (
            {"rope_scaling": {"type": "default", "mrope_section": [1]}},
            "'rope_scaling.mrope_section'",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "'rope_parameters.full_attention'"),
        ({"rope_scaling": "yarn"}, "'rope_scaling': expected an object or null"),
        (
            {"rope_parameters": {"rope_theta": 1e4}},
            "'rope_theta': expected the same as 'rope_parame",
        ),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta': expected"),
        ({"num_local_experts": 64}, "'num_local_experts': expected the same as 'num_experts', 128"),
        ({"dtype": "float16"}, "'torch_dtype': expected the same as 'dtype'"),
        ({"torch_dtype": "float64"}, "'torch_dtype': expected one of bfloat16, float16, float32"),
        ({"torch_dtype": "float8_e4m3fn"}, "'torch_dtype'.*found 'float8_e4m3fn'.*Convert"),
        ({"torch_dtype": 16}, "'torch_dtype'.*found 16"),
        ({"mlp_only_layers": 3}, "'mlp_only_layers': expected a list"),
        ({"mlp_only_layers": [0, "1"]}, r"'mlp_only_layers'\[1\]: expected an integer >= 0"),
        ({"eos_token_id": "x"}, r"'eos_token_id'\[0\]: expected an integer"),
        ({"eos_token_id": [1, -2]}, r"'eos_token_id'\[1\].*found -2"),
        (
            {"head_dim": None, "num_attention_heads": 12},
            "'num_attention_heads': expected a divisor",
        ),
        ({"num_key_value_heads": 5}, "num_heads: expected a multiple of num_kv_heads, 5, found 32"),
        ({"num_experts_per_tok": 129}, "top_k: expected at most num_experts, 128, found 129"),
        ({"head_dim": 127}, "head_dim: expected an even number, found 127"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelShape.from_config(config(**changes), "x")
