"""config.json: what is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from shape_data import QWEN3_30B_A3B, config, shapes, without
from transformers import Qwen3MoeConfig
from transformers_version import dtype_named, rope

from graphcap.decode.save_checkpoint import config_of
from graphcap.decode.shapes import ModelShape, preset


def test_published_config_is_the_preset() -> None:
    assert ModelShape.from_config(QWEN3_30B_A3B, "qwen3-30b-a3b") == preset("qwen3-30b-a3b")


@given(shapes())
@settings(max_examples=60, deadline=None)
def test_config_round_trip(shape: ModelShape) -> None:
    assert shape.dtype is not None
    written = json.loads(json.dumps(config_of(shape, shape.dtype)))
    assert ModelShape.from_config(written, "drawn") == shape


@pytest.mark.parametrize("bias", [False, True])
def test_config_written_by_transformers(bias: bool) -> None:
    ours = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        max_position_embeddings=77,
        rms_norm_eps=3e-5,
        **rope(12345.0),
        attention_bias=bias,
        decoder_sparse_step=2,
        moe_intermediate_size=24,
        num_experts_per_tok=3,
        num_experts=5,
        norm_topk_prob=not bias,
        mlp_only_layers=[2],
        tie_word_embeddings=bias,
        eos_token_id=[7, 9],
        **dtype_named("float16"),
        architectures=["Qwen3MoeForCausalLM"],
    )
    assert ModelShape.from_config(
        json.loads(ours.to_json_string(use_diff=False)), "x"
    ) == ModelShape(
        name="x",
        num_layers=3,
        hidden_size=40,
        vocab_size=96,
        num_heads=6,
        num_kv_heads=3,
        head_dim=10,
        num_experts=5,
        top_k=3,
        moe_intermediate_size=24,
        intermediate_size=56,
        norm_topk_prob=not bias,
        decoder_sparse_step=2,
        mlp_only_layers=(2,),
        attention_bias=bias,
        tie_word_embeddings=bias,
        rope_theta=12345.0,
        rms_norm_eps=3e-5,
        max_position_embeddings=77,
        dtype=torch.float16,
        eos_token_ids=(7, 9),
    )


@pytest.mark.parametrize(
    ("changed", "field", "value"),
    [
        (without("head_dim"), "head_dim", 64),
        (config(head_dim=None), "head_dim", 64),
        (without("torch_dtype"), "dtype", None),
        (config(torch_dtype="torch.float32"), "dtype", torch.float32),
        (config(torch_dtype=None, dtype="float16"), "dtype", torch.float16),
        (config(eos_token_id=None), "eos_token_ids", ()),
        (config(eos_token_id=[1, 2]), "eos_token_ids", (1, 2)),
        (config(rope_theta=10000), "rope_theta", 10000.0),
        (config(rope_scaling={"rope_type": "default"}), "rope_theta", 1e6),
        (config(rope_scaling={"type": "default"}), "rope_theta", 1e6),
        (without("mlp_only_layers"), "mlp_only_layers", ()),
        (config(mlp_only_layers=None), "mlp_only_layers", ()),
        (without("decoder_sparse_step"), "decoder_sparse_step", 1),
        (without("attention_bias"), "attention_bias", False),
        (without("tie_word_embeddings"), "tie_word_embeddings", False),
        (without("architectures", "hidden_act"), "num_layers", 48),
        (
            {**without("rope_theta"), "rope_parameters": {"rope_theta": 7.5}},
            "rope_theta",
            7.5,
        ),
        (
            config(rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 1.0}),
            "rope_theta",
            1e6,
        ),
        ({**without("num_experts"), "num_local_experts": 16}, "num_experts", 16),
        (
            {**without("num_experts_per_tok", "moe_intermediate_size"), "num_experts": 0},
            "top_k",
            0,
        ),
    ],
)
def test_optional_keys_and_other_spellings(
    changed: dict[str, Any], field: str, value: object
) -> None:
    assert getattr(ModelShape.from_config(changed, "x"), field) == value


def test_harmless_keys_change_nothing() -> None:
    harmless = {
        "attention_dropout": 0.1,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "shared_expert_intermediate_size": 0,
        "n_shared_experts": None,
        "quantization_config": None,
        "layer_types": ["full_attention"] * 48,
        "auto_map": {"AutoTokenizer": "tokenizer.Mine"},
        "pruned_heads": {},
        "is_encoder_decoder": False,
        "something_new": 3,
    }
    plain = ModelShape.from_config(QWEN3_30B_A3B, "x")
    assert ModelShape.from_config(config(**harmless), "x") == plain
