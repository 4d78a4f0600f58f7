"""Random models of transformers that mix gated delta nets with full attention, with clear choices."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from reference_models import VOCAB
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.25,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,  # no token ends a sequence: all decode to the end
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
KINDS = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe")


def build(kind: str, **changes: Any) -> Any:
    if kind == "qwen3_next":
        keys = {"intermediate_size": 48, "norm_topk_prob": True}
        return Qwen3NextForCausalLM(Qwen3NextConfig(**{**BASE, **keys, **changes}))
    if kind == "qwen3_5_moe_text":
        return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**BASE, **changes}))
    text = {**BASE, **changes}
    special = {
        name: index
        for index, name in enumerate(
            ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        )
    }
    outer = {k: v + VOCAB for k, v in special.items()}  # ids that no prompt has
    tied = text["tie_word_embeddings"]
    config = Qwen3_5MoeConfig(
        text_config=text, vision_config=VISION, tie_word_embeddings=tied, **outer
    )
    return Qwen3_5MoeForConditionalGeneration(config)


def make_hybrid(kind: str, seed: int, dtype: torch.dtype, clear: bool, **changes: Any) -> Any:
    """A model whose every layer counts; `clear` as in `make_model`.

    Its norms multiply by 1 + weight, but for the gated one. Decay is such that states keep some of what
    is old and forget some.
    """
    model = build(kind, **changes).float().eval()
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(seed)
    hidden, layers = config.hidden_size, config.num_hidden_layers

    def draw(tensor: torch.Tensor, std: float, mean: float = 0.0) -> None:
        tensor.copy_(mean + std * torch.randn(tensor.shape, generator=generator))

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual" in name:
                draw(parameter, 1.0)
            elif name.endswith("linear_attn.norm.weight"):
                draw(parameter, 0.1, 1.0)
            elif name.endswith("norm.weight"):
                draw(parameter, 0.1, 0.5 if "q_norm" in name else 0.0)
            elif name.endswith("A_log"):
                draw(parameter, 0.5)
            elif name.endswith("dt_bias"):
                draw(parameter, 1.0, -1.0)
            elif name.endswith("conv1d.weight"):
                draw(parameter, 0.5)
            elif name.endswith(".bias"):
                draw(parameter, 0.3)
            elif name.endswith("embed_tokens.weight"):
                draw(parameter, 3 / math.sqrt(hidden) if config.tie_word_embeddings else 1.0)
            elif name == "lm_head.weight":
                draw(parameter, 3 / math.sqrt(hidden))
            elif name.endswith("mlp.gate.weight"):
                draw(parameter, 1.5 / math.sqrt(hidden))
            elif "o_proj" in name or "out_proj" in name or "down_proj" in name:
                draw(parameter, 2 / math.sqrt(2 * layers * parameter.shape[-1]))
            else:
                draw(parameter, 1 / math.sqrt(hidden))
        body = getattr(model.model, "language_model", model.model)
        if config.tie_word_embeddings:
            # Otherwise what is left of a token's embedding makes that token follow itself.
            body.norm.weight[1::2] = -2 - body.norm.weight[1::2]
        if clear:
            _clear_experts(body, config, generator)
            _clear_tokens(model, body)
    return model.to(dtype)


def _clear_experts(body: Any, config: Any, generator: torch.Generator) -> None:
    """As in `reference_models`: the first E features hold each token's scores, and no layer writes there."""
    experts = config.num_experts
    scores = torch.linspace(-1.5, 1.5, experts)
    size = float(body.embed_tokens.weight.std())
    for row in body.embed_tokens.weight:
        row[:experts] = size * scores[torch.randperm(experts, generator=generator)]
    for layer in body.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.o_proj.weight[:experts] = 0
            if layer.self_attn.o_proj.bias is not None:
                layer.self_attn.o_proj.bias[:experts] = 0
        else:
            layer.linear_attn.out_proj.weight[:experts] = 0
        layer.post_attention_layernorm.weight[:experts] = 0
        if not hasattr(layer.mlp, "experts"):
            layer.mlp.down_proj.weight[:experts] = 0
            continue
        layer.mlp.experts.down_proj[:, :experts] = 0
        layer.mlp.shared_expert.down_proj.weight[:experts] = 0
        router = layer.mlp.gate.weight
        router *= 0.1
        order = torch.randperm(experts, generator=generator)
        router[:, :experts] += 3 / size * torch.eye(experts)[order]


def _clear_tokens(model: Any, body: Any) -> None:
    """As in `reference_models`: v + 1 tends to follow v."""
    alone = body(torch.arange(VOCAB)[:, None]).last_hidden_state[:, 0]
    alone = alone - alone.mean(0)
    model.lm_head.weight.copy_(alone.roll(1, 0) * 3 / math.sqrt(alone.shape[1]))


def load_hybrid(kind: str, folder: Path) -> Any:
    loader = {
        "qwen3_next": Qwen3NextForCausalLM,
        "qwen3_5_moe_text": Qwen3_5MoeForCausalLM,
        "qwen3_5_moe": Qwen3_5MoeForConditionalGeneration,
    }.get(kind, AutoModelForCausalLM)
    return loader.from_pretrained(folder, attn_implementation="eager").eval()
