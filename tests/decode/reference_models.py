"""Random Qwen3-MoE models of transformers with clear choices, and what they decode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers_version import AS_SAVED, down_projections, rope

VOCAB = 160
TOKENS = 32
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    **rope(1000.0),
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,  # no token ends a sequence: all decode to the end
}


def make_model(seed: int, dtype: torch.dtype, clear: bool, **changes: Any) -> Qwen3MoeForCausalLM:
    """A model whose every layer counts.

    `clear` keeps every choice between experts and tokens far from a tie, for dtypes whose rounding
    would decide ties differently after any change in the order of a sum (see `_clear_experts` and
    `_clear_tokens`).
    """
    config = Qwen3MoeConfig(**{**BASE, **changes})
    model = Qwen3MoeForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    hidden, layers = config.hidden_size, config.num_hidden_layers

    def draw(tensor: torch.Tensor, std: float, mean: float = 0.0) -> None:
        tensor.copy_(mean + std * torch.randn(tensor.shape, generator=generator))

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                sharp = 1.5 if "q_norm" in name else 1.0  # attention that prefers some tokens
                draw(parameter, 0.1, sharp)
            elif name.endswith(".bias"):
                draw(parameter, 0.3)
            elif name == "model.embed_tokens.weight":
                draw(parameter, 3 / math.sqrt(hidden) if config.tie_word_embeddings else 1.0)
            elif name == "lm_head.weight":
                draw(parameter, 3 / math.sqrt(hidden))
            elif name.endswith("mlp.gate.weight"):
                draw(parameter, 1.5 / math.sqrt(hidden))
            elif "o_proj" in name or "down_proj" in name:
                draw(parameter, 2 / math.sqrt(2 * layers * parameter.shape[-1]))
            else:
                draw(parameter, 1 / math.sqrt(hidden))
        if config.tie_word_embeddings:
            # Otherwise what is left of a token's embedding makes that token follow itself.
            model.model.norm.weight[1::2] *= -1
        if clear:
            _clear_experts(model, generator)
            if not config.tie_word_embeddings:
                _clear_tokens(model)
    return model.to(dtype)


def _clear_experts(model: Qwen3MoeForCausalLM, generator: torch.Generator) -> None:
    """The first E features hold, for each token, the scores of the E experts in an order of its own,
    evenly spaced. No layer writes to them, and each router reads them in an order of its own."""
    experts = model.config.num_experts
    scores = torch.linspace(-1.5, 1.5, experts)
    size = float(model.model.embed_tokens.weight.std())
    for row in model.model.embed_tokens.weight:
        row[:experts] = size * scores[torch.randperm(experts, generator=generator)]
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[:experts] = 0
        if layer.self_attn.o_proj.bias is not None:
            layer.self_attn.o_proj.bias[:experts] = 0
        layer.post_attention_layernorm.weight[:experts] = 1
        if hasattr(layer.mlp, "experts"):
            for down in down_projections(layer.mlp.experts):
                down[:experts] = 0
            router = layer.mlp.gate.weight
            router *= 0.1
            order = torch.randperm(experts, generator=generator)
            router[:, :experts] += 3 / size * torch.eye(experts)[order]
        else:
            layer.mlp.down_proj.weight[:experts] = 0


def _clear_tokens(model: Qwen3MoeForCausalLM) -> None:
    """The lm head of token v + 1 is what the layers make of token v alone, so v + 1 tends to follow v,
    unless the context makes too much of a difference."""
    alone = model.model(torch.arange(VOCAB)[:, None]).last_hidden_state[:, 0]
    alone = alone - alone.mean(0)
    model.lm_head.weight.copy_(alone.roll(1, 0) * 3 / math.sqrt(alone.shape[1]))


def save(model: Qwen3MoeForCausalLM, folder: Path, shard: str | None = None) -> Path:
    model.save_pretrained(folder, **({} if shard is None else {"max_shard_size": shard}))
    return folder


def load_reference(folder: Path) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM.from_pretrained(
        folder, attn_implementation="eager", **AS_SAVED
    ).eval()


@dataclass(frozen=True)
class Reference:
    """What transformers decodes, prompt by prompt: tokens (n, T) and logits (n, T, V) float32."""

    tokens: torch.Tensor
    logits: torch.Tensor


def reference(
    model: Qwen3MoeForCausalLM, prompts: Sequence[Sequence[int]], tokens: int = TOKENS
) -> Reference:
    """Greedy tokens of transformers' generate(), prompts padded to the left and masked."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    result = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=tokens,
        pad_token_id=0,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Reference(result.sequences[:, longest:], torch.stack(result.logits, 1).float())


@contextmanager
def chosen_experts(
    model: Qwen3MoeForCausalLM,
) -> Iterator[dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]]]:
    """Layer -> (router logits, chosen experts) of every call of the model inside."""
    seen: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    hooks = []
    body = getattr(model.model, "language_model", model.model)  # of a multimodal model
    for index, layer in enumerate(body.layers):
        if hasattr(layer.mlp, "experts"):
            seen[index] = ([], [])

            def hook(_: Any, __: Any, output: Any, index: int = index) -> None:
                if isinstance(output, torch.Tensor):  # transformers 4: the router only multiplies
                    top_k = model.config.num_experts_per_tok
                    output = (output, None, output.float().softmax(-1).topk(top_k).indices)
                seen[index][0].append(output[0].float())
                seen[index][1].append(output[2])

            hooks.append(layer.mlp.gate.register_forward_hook(hook))
    try:
        yield seen
    finally:
        for handle in hooks:
            handle.remove()
