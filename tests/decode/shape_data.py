"""A published config.json, and shapes for hypothesis to draw."""

from __future__ import annotations

import json
from typing import Any

import torch
from hypothesis import strategies as st

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
