"""Small checkpoints with random weights, of the kinds of model that the plugin serves.

    folder = write_checkpoint(tmp_path, "qwen3_moe")
    LLM(model=str(folder), skip_tokenizer_init=True, ...)

Importable in the test run and in every environment of environments.py. No tokenizer is written. What a
model decodes greedily depends on all that came before, so that 64 tokens from a random prompt hardly
ever end in a cycle (`is_stuck`). The weights of a given kind, seed and size are the same everywhere.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCAB = 512

# 32 is the smallest head size for the attention of vLLM on CPUs.
_ATTENTION: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,  # no token ends a sequence: all decode to the end
    "dtype": "bfloat16",
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GATED_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4,  # the fourth has full attention
}

# Kind: (configuration class, model class, what differs from the class's defaults).
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {**_ATTENTION, "num_hidden_layers": 4, "intermediate_size": 128},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_ATTENTION, **_EXPERTS, "num_hidden_layers": 2, "norm_topk_prob": True},
    ),
    # Gated delta net, full attention in every fourth layer, routed experts and a shared one.
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**_ATTENTION, **_EXPERTS, **_GATED_DELTA_NET, "norm_topk_prob": True},
    ),
    # The same as a text model of the family of Qwen3.6-35B-A3B; vLLM 0.26 has no such text model.
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**_ATTENTION, **_EXPERTS, **_GATED_DELTA_NET},
    ),
}


def write_config(folder: Path, kind: str = "qwen3_moe", **changes: Any) -> Path:
    """Write config.json alone: enough for `EngineArgs`, or for an engine with dummy weights."""
    _config(kind, changes).save_pretrained(folder)
    return folder


def write_checkpoint(
    folder: Path, kind: str = "qwen3_moe", *, seed: int = 0, **changes: Any
) -> Path:
    """Write a whole checkpoint; `changes` go to the configuration, "dtype" among them."""
    config = _config(kind, changes)
    model = _transformers(KINDS[kind][1])(config).float().eval()
    _draw(model, seed)
    model.to(getattr(torch, changes.get("dtype", "bfloat16"))).save_pretrained(folder)
    return folder


def prompts(count: int, *, seed: int = 0, longest: int = 16) -> list[list[int]]:
    """Random prompts of token ids, of various lengths."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, size: int) -> list[int]:
        return torch.randint(high, (size,), generator=generator).tolist()

    return [integers(VOCAB, 1 + length) for length in integers(longest, count)]


def is_stuck(tokens: Sequence[int]) -> bool:
    """Whether the tokens end in a cycle, as decoders with careless random weights soon do."""
    tail = list(tokens[len(tokens) // 2 :])
    return any(tail[:-period] == tail[period:] for period in range(1, max(2, len(tail) // 2)))


def _transformers(name: str) -> Any:
    return getattr(importlib.import_module("transformers"), name)


def _config(kind: str, changes: dict[str, Any]) -> Any:
    config_class, model_class, values = KINDS[kind]
    return _transformers(config_class)(**{**values, "architectures": [model_class], **changes})


@torch.no_grad()
def _draw(model: Any, seed: int) -> None:
    """Random weights with which every layer matters and no token follows itself for ever.

    Embeddings of size 1 per feature; what a layer adds is of size 1 over all layers together, by
    the scale of the output projections; logits that spread enough for a clear first choice.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name or name.endswith((".A_log", ".dt_bias")):
            parameter.add_(0.1 * noise)  # around what the model class starts from
            if "q_norm" in name:
                parameter.add_(0.5)  # attention that prefers some tokens
        elif "embed_tokens" in name:
            parameter.copy_(noise)
        elif "lm_head" in name:
            parameter.copy_(noise * 3 / math.sqrt(hidden))
        elif name.endswith("mlp.gate.weight"):
            parameter.copy_(noise * 1.5 / math.sqrt(hidden))
        elif "conv1d" in name:
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
        elif "o_proj" in name or "out_proj" in name or "down_proj" in name:
            parameter.copy_(noise * 2 / math.sqrt(2 * layers * parameter.shape[-1]))
        else:
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
