"""Shapes and configs of models that mix gated delta nets with full attention."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shape_data import (
    QWEN36_35B_A3B,
    hybrid_config,
    hybrid_shapes,
    next_config,
)
from transformers_version import needs_5

from graphcap.decode.delta_shape import DeltaShape
from graphcap.decode.save_checkpoint import config_of
from graphcap.decode.shapes import ModelShape, preset
from graphcap.decode.weights import empty_weights
from graphcap.errors import CheckpointError

PRESET = preset("qwen3.6-35b-a3b")


def read(config: dict[str, Any]) -> ModelShape:
    return ModelShape.from_config(config, PRESET.name)


def test_the_published_config_is_the_preset() -> None:
    assert read(QWEN36_35B_A3B) == PRESET
    assert 34.6e9 < PRESET.parameter_count() < 34.7e9
    assert PRESET.num_linear_layers == 30
    assert [layer for layer in range(40) if not PRESET.is_linear(layer)] == list(range(3, 40, 4))


def test_qwen3_next_needs_no_layer_types() -> None:
    expected = dataclasses.replace(
        PRESET,
        model_type="qwen3_next",
        intermediate_size=5120,
        rope_theta=5e6,
    )
    assert read(next_config()) == expected
    # What transformers takes where neither is stated.
    assert read(next_config(full_attention_interval=None, partial_rotary_factor=None)) == expected
    every_third = read(next_config(full_attention_interval=3, num_hidden_layers=7))
    assert every_third.linear_layers == (0, 1, 3, 4, 6)


@given(hybrid_shapes())
@settings(max_examples=60, deadline=None)
def test_config_round_trip(shape: ModelShape) -> None:
    assert shape.dtype is not None
    written = json.loads(json.dumps(config_of(shape, shape.dtype)))
    linear = tuple(
        filter(shape.is_linear, range(shape.num_layers))
    )  # those that there are, in order
    expected = dataclasses.replace(shape, linear_layers=linear)
    assert ModelShape.from_config(written, "drawn") == expected


@given(hybrid_shapes(), st.sampled_from([torch.bfloat16, torch.float32]))
@settings(max_examples=60, deadline=None)
def test_count_is_that_of_the_weights(shape: ModelShape, dtype: torch.dtype) -> None:
    weights = empty_weights(shape, device="meta", dtype=dtype)
    assert shape.weight_bytes(dtype) == weights.nbytes
    assert shape.parameter_count() == sum(t.numel() for _, t in weights.named_tensors())
    read_bytes = 0
    for name, tensor in weights.named_tensors():
        part = tensor.nbytes
        if tensor.dim() == 3:
            part = part // shape.num_experts * shape.top_k
        elif name == "embedding" and not shape.tie_word_embeddings:
            part //= shape.vocab_size
        read_bytes += part
    assert shape.bytes_read_per_step(dtype) == read_bytes


@needs_5
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe"])
@pytest.mark.parametrize("bias", [False, True])
def test_configs_of_transformers(kind: str, bias: bool) -> None:
    from hybrid_models import build

    with torch.device("meta"):
        model = build(kind, attention_bias=bias, tie_word_embeddings=bias)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    shape = ModelShape.from_config(config, "x")
    body = getattr(model.model, "language_model", model.model)
    count = sum(parameter.numel() for parameter in body.parameters())
    assert shape.parameter_count() == count + (0 if bias else model.lm_head.weight.numel())
    assert shape.linear_layers == (0, 1, 2)
    assert shape.rotated == 4
    assert shape.tie_word_embeddings is bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3_5_text"}, "'text_config.model_type': expected 'qwen3_5_moe_text'"),
        ({"attn_output_gate": False}, "'attn_output_gate': expected True or absent"),
        ({"mamba_ssm_dtype": "bfloat16"}, "'mamba_ssm_dtype': expected 'float32'"),
        ({"norm_topk_prob": False}, "'norm_topk_prob': expected True or absent"),
        ({"mlp_only_layers": [1]}, r"'mlp_only_layers': expected \[\] or absent"),
        ({"decoder_sparse_step": 2}, "'decoder_sparse_step': expected 1"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config'.*bfloat16"),
        ({"hidden_act": "gelu"}, "'hidden_act'"),
        ({"head_dim": None}, "'head_dim' is missing"),
        ({"linear_num_key_heads": None}, "'linear_num_key_heads' is missing"),
        ({"linear_num_value_heads": 33}, "num_value_heads: expected a multiple of .* 16, found 33"),
        ({"linear_conv_kernel_dim": 1}, "conv_width: expected an integer >= 2, found 1"),
        ({"shared_expert_intermediate_size": 0}, "'shared_expert_intermediate_size'.*found 0"),
        ({"num_experts": 0}, "'num_experts': expected experts, found 0"),
        ({"layer_types": ["linear_attention"]}, "'layer_types': expected a list of 40"),
        ({"layer_types": ["sliding_attention"] * 40}, r"'layer_types\[0\]'.*'sliding_attention'"),
        ({"partial_rotary_factor": 0.5}, "expected the same as 'partial_rotary_factor', 0.5"),
        (
            {"partial_rotary_factor": None, "rope_parameters": {"partial_rotary_factor": 1.5}},
            "'rope_theta' is missing",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e7}, "partial_rotary_factor": 1.5},
            "'partial_rotary_factor': expected a share of 'head_dim', 256",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e7}, "partial_rotary_factor": 0.13},
            "that makes an even number of values, found 0.13",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e7, "rope_type": "yarn"}},
            "'rope_parameters.rope_type'.*Scaled RoPE",
        ),
        (
            {"tie_word_embeddings": True},
            "'tie_word_embeddings': expected the same as in 'text_conf",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(hybrid_config(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "'text_config': expected an object"),
        ({"architectures": ["Qwen3_5MoeForCausalLM"]}, "'architectures': expected"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'quantization_config'.*Quantised"),
        ({"auto_map": {"AutoModelForCausalLM": "m.M"}}, "'auto_map'"),
    ],
)
def test_the_outer_config_is_looked_at(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read({**QWEN36_35B_A3B, **changes})


def test_the_dtype_may_stand_outside() -> None:
    config = {**hybrid_config(dtype=None), "torch_dtype": "float16"}
    assert read(config).dtype == torch.float16


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "tiny",
            {"linear_layers": (0,)},
            r"linear_layers: expected \(\), found .*give their model",
        ),
        ("tiny", {"shared_intermediate_size": 3}, "shared_intermediate_size: expected 0"),
        ("tiny", {"rotary_dim": 8}, "rotary_dim: expected None"),
        ("tiny", {"model_type": "qwen9"}, "shared_intermediate_size: expected an integer >= 1"),
        ("tiny", {"intermediate_size": 0}, "intermediate_size: expected an integer >= 1"),
        ("tiny-hybrid", {"model_type": "qwen9"}, "model_type: expected 'qwen3_moe', 'qwen3_next'"),
        ("tiny-hybrid", {"delta": None}, "delta: expected the sizes of gated delta nets"),
        (
            "tiny-hybrid",
            {"rotary_dim": 34},
            "rotary_dim: expected an even number up to head_dim, 32",
        ),
        ("tiny-hybrid", {"rotary_dim": 7}, "rotary_dim: expected an even number"),
        ("tiny-hybrid", {"mlp_only_layers": (1,)}, "intermediate_size: expected an integer >= 1"),
        ("tiny-hybrid", {"linear_layers": (-1,)}, r"linear_layers\[0\]: expected"),
    ],
)
def test_shape_checks_itself(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        dataclasses.replace(preset(name), **changes)


def test_sizes_of_a_delta_net() -> None:
    delta = PRESET.delta
    assert delta is not None
    assert (delta.keys, delta.values, delta.channels) == (2048, 4096, 8192)
    assert delta.projection_rows == 12352
    # 32 heads of 128 x 128 in float32, and three tokens of 8,192 channels in bfloat16.
    assert delta.state_bytes(torch.bfloat16) == 32 * 128 * 128 * 4 + 3 * 8192 * 2
    with pytest.raises(CheckpointError, match="delta: key_dim: expected an integer >= 1, found 0"):
        DeltaShape(1, 1, 0, 1, 4)
