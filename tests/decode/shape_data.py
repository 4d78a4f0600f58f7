"""A published config.json, and shapes for hypothesis to draw."""

from __future__ import annotations

import json
from typing import Any

import torch
from hypothesis import strategies as st

from graphcap.decode.delta_shape import DeltaShape
from graphcap.decode.shapes import ModelShape

# As published with transformers 4.51.0.
QWEN3_30B_A3B = json.loads("""{
  "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
  "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
  "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
  "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
  "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
  "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0,
  "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
  "use_sliding_window": false, "vocab_size": 151936
}""")


def config(**changes: Any) -> dict[str, Any]:
    return {**QWEN3_30B_A3B, **changes}


def without(*keys: str) -> dict[str, Any]:
    return {k: v for k, v in QWEN3_30B_A3B.items() if k not in keys}


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    small = st.integers(1, 9)
    kv, experts = draw(small), draw(st.integers(0, 6))
    return ModelShape(
        name="drawn",
        num_layers=draw(small),
        hidden_size=draw(small),
        vocab_size=draw(small),
        num_heads=kv * draw(st.integers(1, 3)),
        num_kv_heads=kv,
        head_dim=2 * draw(small),
        num_experts=experts,
        top_k=draw(st.integers(1, experts)) if experts else 0,
        moe_intermediate_size=draw(small) if experts else 0,
        intermediate_size=draw(small),
        norm_topk_prob=draw(st.booleans()),
        decoder_sparse_step=draw(st.integers(1, 3)),
        mlp_only_layers=tuple(draw(st.lists(st.integers(0, 9), unique=True))),
        attention_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        rope_theta=draw(st.floats(1.0, 1e7)),
        rms_norm_eps=draw(st.floats(1e-9, 1e-3)),
        max_position_embeddings=draw(small),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
    )


# The keys that public inventories of the published config.json of Qwen/Qwen3.6-35B-A3B give, and for the
# rest the defaults of transformers 5.24; its vision config and what only names tokens is left out.
QWEN36_35B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
    "vision_config": {"model_type": "qwen3_5_moe"},
}


def hybrid_config(**changes: Any) -> dict[str, Any]:
    """The published config with changes to the text model's."""
    return {**QWEN36_35B_A3B, "text_config": {**QWEN36_35B_A3B["text_config"], **changes}}


def next_config(**changes: Any) -> dict[str, Any]:
    """A flat config of Qwen3-Next, without `layer_types`, as it was published."""
    text = {k: v for k, v in QWEN36_35B_A3B["text_config"].items() if k != "layer_types"}
    return {
        **text,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "intermediate_size": 5120,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "rope_parameters": None,
        "rope_theta": 5000000,
        **changes,
    }


@st.composite
def hybrid_shapes(draw: st.DrawFn) -> ModelShape:
    small = st.integers(1, 6)
    kv, keys, experts = draw(small), draw(small), draw(small)
    is_next = draw(st.booleans())
    half = draw(small)
    return ModelShape(
        name="drawn",
        num_layers=draw(small),
        hidden_size=draw(small),
        vocab_size=draw(small),
        num_heads=kv * draw(st.integers(1, 3)),
        num_kv_heads=kv,
        head_dim=2 * half,
        num_experts=experts,
        top_k=draw(st.integers(1, experts)),
        moe_intermediate_size=draw(small),
        intermediate_size=draw(small) if is_next else 0,
        norm_topk_prob=draw(st.booleans()) if is_next else True,
        decoder_sparse_step=draw(st.integers(1, 3)) if is_next else 1,
        mlp_only_layers=tuple(draw(st.lists(small, unique=True))) if is_next else (),
        attention_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        rope_theta=draw(st.floats(1.0, 1e7)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        model_type="qwen3_next" if is_next else "qwen3_5_moe_text",
        linear_layers=tuple(draw(st.lists(st.integers(0, 6), unique=True))),
        delta=DeltaShape(
            num_key_heads=keys,
            num_value_heads=keys * draw(st.integers(1, 3)),
            key_dim=draw(small),
            value_dim=draw(small),
            conv_width=draw(st.integers(2, 5)),
        ),
        rotary_dim=2 * draw(st.integers(1, half)),
        shared_intermediate_size=draw(small),
    )
