"""Checkpoints that transformers wrote load here, and those written here load there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    SHAPE,
    assert_same,
    draw,
    dtypes,
    edit_tensors,
    load,
    stack,
    variants,
)
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers_version import needs_5, rope

from graphcap.decode.safetensors_files import INDEX, SINGLE
from graphcap.decode.save_checkpoint import save_checkpoint
from graphcap.decode.shapes import ModelShape
from graphcap.decode.weights import ExpertWeights, ModelWeights


def assert_equals_model(weights: ModelWeights, model: Qwen3MoeForCausalLM) -> None:
    """Every tensor of `model`, by hand, against the fused weights."""
    assert torch.equal(weights.embedding, model.model.embed_tokens.weight)
    assert torch.equal(weights.lm_head, model.lm_head.weight)
    assert torch.equal(weights.final_norm, model.model.norm.weight)
    assert len(weights.layers) == len(model.model.layers)
    for ours, theirs in zip(weights.layers, model.model.layers, strict=True):
        attention, mlp = theirs.self_attn, theirs.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        assert torch.equal(ours.qkv, torch.cat([p.weight for p in projections]))
        assert torch.equal(ours.output, attention.o_proj.weight)
        assert (ours.qkv_bias is None) == (attention.q_proj.bias is None)
        if ours.qkv_bias is not None and ours.output_bias is not None:
            assert torch.equal(ours.qkv_bias, torch.cat([p.bias for p in projections]))
            assert torch.equal(ours.output_bias, attention.o_proj.bias)
        assert torch.equal(ours.q_norm, attention.q_norm.weight)
        assert torch.equal(ours.k_norm, attention.k_norm.weight)
        assert torch.equal(ours.input_norm, theirs.input_layernorm.weight)
        assert torch.equal(ours.post_norm, theirs.post_attention_layernorm.weight)
        if isinstance(ours.mlp, ExpertWeights):
            assert torch.equal(ours.mlp.router, mlp.gate.weight)
            assert torch.equal(ours.mlp.gate_up, mlp.experts.gate_up_proj)
            assert torch.equal(ours.mlp.down, mlp.experts.down_proj)
        else:
            both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            assert torch.equal(ours.mlp.gate_up, both)
            assert torch.equal(ours.mlp.down, mlp.down_proj.weight)


@needs_5
@variants
@dtypes
@pytest.mark.parametrize("shard", [None, 20_000])
def test_loads_what_transformers_saved(
    changes: dict[str, Any], dtype: torch.dtype, shard: int | None, tmp_path: Path
) -> None:
    shape = dataclasses.replace(SHAPE, **changes)
    config = Qwen3MoeConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.rms_norm_eps,
        **rope(shape.rope_theta),
        attention_bias=shape.attention_bias,
        decoder_sparse_step=shape.decoder_sparse_step,
        moe_intermediate_size=shape.moe_intermediate_size,
        num_experts_per_tok=shape.top_k,
        num_experts=shape.num_experts,
        norm_topk_prob=shape.norm_topk_prob,
        mlp_only_layers=list(shape.mlp_only_layers),
        tie_word_embeddings=shape.tie_word_embeddings,
        eos_token_id=list(shape.eos_token_ids) or None,
    )
    model = Qwen3MoeForCausalLM(config).to(dtype)
    for parameter in model.parameters():  # norms and biases are constant as transformers makes them
        parameter.data.normal_()
    options = {} if shard is None else {"max_shard_size": shard}
    model.save_pretrained(tmp_path / "theirs", **options)
    assert (tmp_path / "theirs" / INDEX).exists() == (shard is not None)
    weights = load(tmp_path / "theirs")
    assert weights.shape == dataclasses.replace(shape, name="theirs", dtype=dtype)
    assert weights.dtype == dtype
    assert_equals_model(weights, model)


@needs_5
@variants
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 20_000])
def test_transformers_loads_what_we_saved(
    changes: dict[str, Any], max_shard_bytes: int, tmp_path: Path
) -> None:
    weights = draw(dataclasses.replace(SHAPE, **changes), dtype=torch.bfloat16)
    save_checkpoint(weights, tmp_path, max_shard_bytes)
    model, info = Qwen3MoeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert_equals_model(weights, model)
    assert model.dtype == torch.bfloat16
    read = ModelShape.from_config(model.config.to_dict(), "small")
    assert read == dataclasses.replace(weights.shape, dtype=torch.bfloat16)


@variants
@dtypes
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 20_000, 1])
def test_round_trip(
    changes: dict[str, Any], dtype: torch.dtype, max_shard_bytes: int, tmp_path: Path
) -> None:
    weights = draw(dataclasses.replace(SHAPE, **changes), dtype)
    save_checkpoint(weights, tmp_path / "small", max_shard_bytes)
    again = load(tmp_path / "small")
    assert_same(again, weights)
    assert again.shape == dataclasses.replace(weights.shape, dtype=dtype)
    names = sorted(path.name for path in (tmp_path / "small").iterdir())
    if max_shard_bytes == 1 << 30:
        assert names == ["config.json", SINGLE]
    else:
        # No shard is larger than asked, unless it is a single tensor; the index adds them up.
        index = json.loads((tmp_path / "small" / INDEX).read_text())
        assert index["metadata"]["total_size"] == weights.nbytes
        assert len(set(index["weight_map"].values())) == len(names) - 2 > 1
        for file in set(index["weight_map"].values()):
            shard = load_file(tmp_path / "small" / file)
            assert len(shard) == 1 or sum(t.nbytes for t in shard.values()) <= max_shard_bytes


@pytest.mark.parametrize("kinds", [("gate_up", "down"), ("gate_up",), ("down",)])
def test_stacked_experts(folder: Path, kinds: tuple[str, ...]) -> None:
    one_by_one = load(folder)
    before = len(load_file(folder / SINGLE))
    edit_tensors(folder, lambda tensors: stack(tensors, kinds))
    assert len(load_file(folder / SINGLE)) < before
    assert_same(load(folder), one_by_one)
