"""Shapes by name, and what a shape is (`ModelShape`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from graphcap.decode.config_reader import DTYPES
from graphcap.decode.delta_shape import DeltaShape
from graphcap.decode.model_shape import ModelShape
from graphcap.errors import CheckpointError


def _presets() -> dict[str, ModelShape]:
    tiny = ModelShape(
        name="tiny",
        num_layers=4,
        hidden_size=128,
        vocab_size=512,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_experts=8,
        top_k=2,
        moe_intermediate_size=64,
        intermediate_size=256,
        mlp_only_layers=(1,),
        max_position_embeddings=1024,
    )
    qwen3 = ModelShape(
        name="qwen3-30b-a3b",
        num_layers=48,
        hidden_size=2048,
        vocab_size=151_936,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        num_experts=128,
        top_k=8,
        moe_intermediate_size=768,
        intermediate_size=6144,
        norm_topk_prob=True,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=40_960,
        dtype=torch.bfloat16,
        eos_token_ids=(151_645,),
    )
    seed_64 = replace(
        qwen3,
        name="seed-64",
        num_layers=64,
        num_heads=16,
        num_kv_heads=2,
        num_experts=256,
        moe_intermediate_size=512,
    )
    tiny_hybrid = replace(
        tiny,
        name="tiny-hybrid",
        intermediate_size=0,
        mlp_only_layers=(),
        model_type="qwen3_5_moe_text",
        linear_layers=(0, 1, 2),
        delta=DeltaShape(
            num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=32, conv_width=4
        ),
        rotary_dim=8,
        shared_intermediate_size=64,
    )
    qwen36 = ModelShape(
        name="qwen3.6-35b-a3b",
        num_layers=40,
        hidden_size=2048,
        vocab_size=248_320,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        num_experts=256,
        top_k=8,
        moe_intermediate_size=512,
        intermediate_size=0,
        norm_topk_prob=True,
        rope_theta=10_000_000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=262_144,
        dtype=torch.bfloat16,
        eos_token_ids=(248_044,),
        model_type="qwen3_5_moe_text",
        linear_layers=tuple(layer for layer in range(40) if layer % 4 != 3),
        delta=DeltaShape(
            num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_width=4
        ),
        rotary_dim=64,
        shared_intermediate_size=512,
    )
    shapes = (tiny, tiny_hybrid, seed_64, qwen3, qwen36)
    return {shape.name: shape for shape in shapes}


PRESETS: Mapping[str, ModelShape] = MappingProxyType(_presets())
"""Shapes by name.

- `tiny`: ours, for tests on a CPU: both kinds of layer (layer 1 is dense), 1.0 million weights.
- `tiny-hybrid`: ours as well: three gated delta nets and one gated attention, a shared expert, rotary
  on a quarter of the head; 1.3 million weights.
- `seed-64`: 64 layers of hidden 2048, 16 query and 2 kv heads of 128, 256 experts, top-8, expert
  intermediate 512, vocabulary 151,936: the layer of Qwen3.6-35B-A3B's experts in the 64 layers of the
  analysis that set this project's target, and the shape that the vLLM baseline was measured with.
  98 GiB in bfloat16. What the analysis leaves open (RoPE, norms, eos) is as in `qwen3-30b-a3b`.
- `qwen3-30b-a3b`: config.json of Qwen/Qwen3-30B-A3B as published with transformers 4.51.0. 57 GiB in
  bfloat16.
- `qwen3.6-35b-a3b`: the text model of Qwen/Qwen3.6-35B-A3B; 65 GiB in bfloat16. Its config.json, as public
  inventories of the published file give it, states 40 layers of which every fourth has full attention,
  the experts, the delta nets (16 key and 32 value heads of 128, convolution over 4), vocabulary, rotary
  quarter with base 10^7 and eos. The sizes that those do not name (hidden 2048, 16 query and 2 kv heads of
  256, eps 1e-6, no attention bias) are the defaults of `Qwen3_5MoeTextConfig` of transformers 5.24, whose
  checkpoint is Qwen3.5-35B-A3B and which says that Qwen3.6 shares its architecture; 262,144 positions is
  the context that the model cards of both state.
"""


def preset(name: str) -> ModelShape:
    """The preset called `name`; CheckpointError lists the names if there is none."""
    if name not in PRESETS:
        raise CheckpointError(
            f"no preset is called {name!r}; the presets are {', '.join(PRESETS)}."
            " For another model give the folder of its checkpoint."
        )
    return PRESETS[name]


__all__ = ["DTYPES", "PRESETS", "ModelShape", "preset"]
