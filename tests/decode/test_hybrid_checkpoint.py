"""Checkpoints of models that mix gated delta nets with full attention, to and from transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import assert_same, draw, edit_config, edit_tensors, load
from safetensors.torch import load_file
from transformers_version import needs_5

from graphcap.decode.delta_shape import DeltaShape
from graphcap.decode.delta_weights import Grouped
from graphcap.decode.safetensors_files import SINGLE
from graphcap.decode.save_checkpoint import save_checkpoint
from graphcap.decode.shapes import ModelShape
from graphcap.decode.weights import DeltaLayerWeights, ExpertWeights, LayerWeights, ModelWeights
from graphcap.errors import CheckpointError

SHAPE = ModelShape(
    name="small",
    num_layers=3,
    hidden_size=24,
    vocab_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    num_experts=5,
    top_k=2,
    moe_intermediate_size=12,
    intermediate_size=0,
    max_position_embeddings=64,
    model_type="qwen3_5_moe_text",
    linear_layers=(0, 2),
    delta=DeltaShape(num_key_heads=2, num_value_heads=6, key_dim=4, value_dim=5, conv_width=3),
    rotary_dim=4,
    shared_intermediate_size=14,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "3.5": {},
    "3.5 tied": {"tie_word_embeddings": True},
    "3.5 attention bias": {"attention_bias": True},
    "next": {"model_type": "qwen3_next", "intermediate_size": 18},
    "next, a dense layer": {
        "model_type": "qwen3_next",
        "intermediate_size": 18,
        "mlp_only_layers": (2,),
        "norm_topk_prob": False,
    },
}
variants = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)


def by_head(part: torch.Tensor, heads: int, sizes: list[int]) -> list[torch.Tensor]:
    """Rows of Qwen3-Next's fused projections, sorted by kind: plain indexing, head by head."""
    rows: list[list[torch.Tensor]] = [[] for _ in sizes]
    at = 0
    for _ in range(heads):
        for kind, size in enumerate(sizes):
            rows[kind].append(part[at : at + size])
            at += size
    assert at == len(part)
    return [torch.cat(kind) for kind in rows]


def assert_equals_model(weights: ModelWeights, model: Any) -> None:
    """Every tensor of `model`, by hand, against the fused weights."""
    body = getattr(model.model, "language_model", model.model)
    delta = weights.shape.delta
    assert delta is not None
    assert torch.equal(weights.embedding, body.embed_tokens.weight)
    assert torch.equal(weights.lm_head, model.lm_head.weight)
    assert torch.equal(weights.final_norm, body.norm.weight)
    assert len(weights.layers) == len(body.layers)
    for ours, theirs in zip(weights.layers, body.layers, strict=True):
        assert torch.equal(ours.input_norm, theirs.input_layernorm.weight)
        assert torch.equal(ours.post_norm, theirs.post_attention_layernorm.weight)
        if isinstance(ours, LayerWeights):
            attention = theirs.self_attn
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            assert torch.equal(ours.qkv, torch.cat([p.weight for p in projections]))
            assert torch.equal(ours.output, attention.o_proj.weight)
            if ours.qkv_bias is not None:
                assert torch.equal(ours.qkv_bias, torch.cat([p.bias for p in projections]))
            assert torch.equal(ours.q_norm, attention.q_norm.weight)
            assert torch.equal(ours.k_norm, attention.k_norm.weight)
        else:
            net, mine = theirs.linear_attn, ours.delta
            if hasattr(net, "in_proj_qkvz"):
                heads, group = delta.num_key_heads, delta.num_value_heads // delta.num_key_heads
                wide = group * delta.value_dim
                sizes = [delta.key_dim, delta.key_dim, wide, wide]
                parts = by_head(net.in_proj_qkvz.weight, heads, sizes)
                parts += by_head(net.in_proj_ba.weight, heads, [group, group])
            else:
                parts = [net.in_proj_qkv.weight, net.in_proj_z.weight]
                parts += [net.in_proj_b.weight, net.in_proj_a.weight]
            assert torch.equal(mine.projection, torch.cat(parts))
            assert torch.equal(mine.conv, net.conv1d.weight[:, 0])
            assert torch.equal(mine.decay_log, net.A_log)
            assert torch.equal(mine.time_bias, net.dt_bias)
            assert torch.equal(mine.norm, net.norm.weight)
            assert torch.equal(mine.output, net.out_proj.weight)
        mlp = theirs.mlp
        if not isinstance(ours.mlp, ExpertWeights):
            both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            assert torch.equal(ours.mlp.gate_up, both)
            assert torch.equal(ours.mlp.down, mlp.down_proj.weight)
            continue
        assert torch.equal(ours.mlp.router, mlp.gate.weight)
        assert torch.equal(ours.mlp.gate_up, mlp.experts.gate_up_proj)
        assert torch.equal(ours.mlp.down, mlp.experts.down_proj)
        shared = ours.mlp.shared
        assert shared is not None
        expert = mlp.shared_expert
        assert torch.equal(
            shared.gate_up, torch.cat([expert.gate_proj.weight, expert.up_proj.weight])
        )
        assert torch.equal(shared.down, expert.down_proj.weight)
        assert torch.equal(shared.gate, mlp.shared_expert_gate.weight)


@needs_5
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", [None, 50_000])
def test_loads_what_transformers_saved(
    kind: str, dtype: torch.dtype, shard: int | None, tmp_path: Path
) -> None:
    from hybrid_models import build

    model = build(kind, attention_bias=True).to(dtype)
    for parameter in model.parameters():  # norms are constant as transformers makes them
        parameter.data.normal_()
    model.save_pretrained(tmp_path, **({} if shard is None else {"max_shard_size": shard}))
    weights = load(tmp_path)
    assert weights.dtype == dtype
    assert_equals_model(weights, model)
    vision = sum("visual" in name for name, _ in model.named_parameters())
    assert weights.left_out == ({"vision": vision} if vision else {})
    assert (vision > 0) == (kind == "qwen3_5_moe")


@needs_5
@variants
def test_transformers_loads_what_we_saved(changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    weights = draw(dataclasses.replace(SHAPE, **changes), dtype=torch.bfloat16)
    save_checkpoint(weights, tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert_equals_model(weights, model)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    read = ModelShape.from_config(config, "small")
    assert read == dataclasses.replace(weights.shape, dtype=torch.bfloat16)


@variants
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 5_000])
def test_round_trip(changes: dict[str, Any], max_shard_bytes: int, tmp_path: Path) -> None:
    weights = draw(dataclasses.replace(SHAPE, **changes))
    save_checkpoint(weights, tmp_path / "small", max_shard_bytes)
    again = load(tmp_path / "small")
    assert_same(again, weights)
    assert again.shape == dataclasses.replace(weights.shape, dtype=torch.float32)
    first = load(tmp_path / "small", layers=1)
    assert isinstance(first.layers[0], DeltaLayerWeights)
    assert torch.equal(first.layers[0].delta.projection, again.layers[0].delta.projection)


def nest(tensors: dict[str, torch.Tensor]) -> None:
    """As a multimodal checkpoint has them, beside what it sees with and what guesses further tokens."""
    for name in [name for name in tensors if name.startswith("model.")]:
        tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
    tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.randn(3, 3)
    tensors["model.visual.pos_embed.weight"] = torch.randn(2)
    tensors["mtp.fc.weight"] = torch.randn(2, 2)


@pytest.mark.parametrize("tied", [False, True])
def test_a_text_model_beside_others(
    tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "graphcap")
    weights = draw(dataclasses.replace(SHAPE, tie_word_embeddings=tied))
    save_checkpoint(weights, tmp_path)
    edit_tensors(tmp_path, nest)
    found = load(tmp_path)
    assert_same(found, weights)
    assert found.left_out == {"vision": 2, "other": 1}
    assert "does not need were left out: 2 of kind vision, 1 of kind other" in caplog.text
    assert load(tmp_path, layers=2).left_out == found.left_out


def test_vision_has_no_place_in_qwen3_next(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, **VARIANTS["next"])
    save_checkpoint(draw(shape), tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"model.visual.x": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"1 tensors have no place.*model\.visual\.x"):
        load(tmp_path)


def test_a_missing_and_a_foreign_tensor_are_named(tmp_path: Path) -> None:
    save_checkpoint(draw(SHAPE), tmp_path)
    name = "model.layers.0.linear_attn.dt_bias"
    edit_tensors(tmp_path, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=rf"1 of \d+ tensors are missing: {name}"):
        load(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({name: torch.zeros(7)}))
    with pytest.raises(CheckpointError, match=r"dt_bias': expected shape \(6,\).*found \(7,\)"):
        load(tmp_path)
    edit_tensors(
        tmp_path,
        lambda t: t.update(
            {name: torch.zeros(6), "model.layers.1.linear_attn.A_log": torch.ones(6)}
        ),
    )
    with pytest.raises(CheckpointError, match=r"no place.*model\.layers\.1\.linear_attn\.A_log"):
        load(tmp_path)


def test_a_config_of_the_other_order_is_refused(tmp_path: Path) -> None:
    """Qwen3-Next's projections are interleaved; those of Qwen3.5 are not mistaken for them."""
    save_checkpoint(draw(SHAPE), tmp_path)
    edit_config(
        tmp_path,
        model_type="qwen3_next",
        architectures=["Qwen3NextForCausalLM"],
        intermediate_size=18,
        norm_topk_prob=True,
    )
    with pytest.raises(CheckpointError, match="in_proj_qkvz"):
        load(tmp_path)


def test_float16_that_would_overflow_is_refused_in_grouped_tensors(tmp_path: Path) -> None:
    weights = draw(dataclasses.replace(SHAPE, **VARIANTS["next"]))
    assert isinstance(weights.layers[0], DeltaLayerWeights)
    weights.layers[0].delta.projection[3, 3] = 1e6
    save_checkpoint(weights, tmp_path)
    with pytest.raises(CheckpointError, match=r"in_proj_qkvz.*float16 can hold"):
        load(tmp_path, dtype=torch.float16)


def test_grouped() -> None:
    first, second = torch.zeros(6, 2), torch.zeros(2, 2)
    grouped = Grouped([first.unflatten(0, (2, 3)), second.unflatten(0, (2, 1))])
    assert grouped.shape == (8, 2)
    assert grouped.nbytes == 8 * 2 * 4
    values = torch.arange(16.0).view(8, 2)
    grouped.copy_(values)
    assert torch.equal(first[:, 0], torch.tensor([0.0, 2, 4, 8, 10, 12]))
    assert torch.equal(second[:, 0], torch.tensor([6.0, 14]))
    assert torch.equal(grouped.assembled(), values)


def test_names_of_a_saved_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(draw(dataclasses.replace(SHAPE, **VARIANTS["next"])), tmp_path)
    stored = load_file(tmp_path / SINGLE)
    assert stored["model.layers.0.linear_attn.in_proj_qkvz.weight"].shape == (2 * (8 + 30), 24)
    assert stored["model.layers.0.linear_attn.in_proj_ba.weight"].shape == (12, 24)
    assert stored["model.layers.0.linear_attn.conv1d.weight"].shape == (46, 1, 3)
    assert stored["model.layers.1.self_attn.q_proj.weight"].shape == (80, 24)
    assert stored["model.layers.1.mlp.shared_expert_gate.weight"].shape == (1, 24)
