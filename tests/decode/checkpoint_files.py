"""Small checkpoints for the tests, and ways to damage them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphcap.decode.checkpoint import load_checkpoint
from graphcap.decode.random_weights import random_weights
from graphcap.decode.safetensors_files import SINGLE
from graphcap.decode.shapes import ModelShape
from graphcap.decode.weights import ModelWeights

SHAPE = ModelShape(
    name="small",
    num_layers=3,
    hidden_size=24,
    vocab_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,  # 4 * 10 is not 24: the output projection is not square
    num_experts=5,
    top_k=2,
    moe_intermediate_size=12,
    intermediate_size=28,
    mlp_only_layers=(1,),
    max_position_embeddings=64,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "sparse step 2": {"decoder_sparse_step": 2, "mlp_only_layers": ()},
    "all sparse": {"mlp_only_layers": ()},
    "all dense": {"num_experts": 0, "top_k": 0, "moe_intermediate_size": 0},
    "not normalised": {"norm_topk_prob": False},
    "rope, eps, eos": {"rope_theta": 777.0, "rms_norm_eps": 1e-3, "eos_token_ids": (3, 5)},
}
variants = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def draw(shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return random_weights(shape, device="cpu", dtype=dtype, seed=torch.randint(1 << 30, ()).item())


def load(folder: Path, **options: Any) -> ModelWeights:
    return load_checkpoint(folder, device="cpu", **options)


def assert_same(found: ModelWeights, expected: ModelWeights) -> None:
    ours, theirs = dict(found.named_tensors()), dict(expected.named_tensors())
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
        assert tensor.is_contiguous(), name
        assert not tensor.requires_grad, name
    assert (found.lm_head is found.embedding) == (expected.lm_head is expected.embedding)


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE)


def stack(tensors: dict[str, torch.Tensor], kinds: tuple[str, ...] = ("gate_up", "down")) -> None:
    """Replace experts one by one by stacked ones, built independently of the code under test."""
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gates, ups, downs = (
            [tensors[f"{prefix}{e}.{part}_proj.weight"] for e in range(5)]
            for part in ("gate", "up", "down")
        )
        if "gate_up" in kinds:
            both = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
            tensors[f"{prefix}gate_up_proj"] = torch.stack(both)
        if "down" in kinds:
            tensors[f"{prefix}down_proj"] = torch.stack(downs)
        for expert in range(5):
            for part in ("gate", "up", "down"):
                if part in "_".join(kinds):
                    del tensors[f"{prefix}{expert}.{part}_proj.weight"]
