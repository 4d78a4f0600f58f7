"""load_checkpoint: tensors that are missing, do not fit, or have no place, refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from checkpoint_files import (
    SHAPE,
    assert_same,
    draw,
    edit_config,
    edit_tensors,
    load,
    stack,
)
from safetensors.torch import load_file

from graphcap.decode.safetensors_files import SINGLE
from graphcap.decode.save_checkpoint import save_checkpoint
from graphcap.errors import CheckpointError


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.2.mlp.experts.4.down_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.2.self_attn.k_norm.weight",
    ],
)
def test_missing_tensor_is_named(folder: Path, name: str) -> None:
    edit_tensors(folder, lambda t: t.pop(name))
    with pytest.raises(
        CheckpointError, match=f"saved: 1 of .* tensors are missing: {name}. The con"
    ):
        load(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if "layers.2.mlp.experts" in n]:
            del tensors[name]

    edit_tensors(folder, drop)
    with pytest.raises(
        CheckpointError, match=r"15 of .* missing: .*experts.0.gate_proj.* and 11 more"
    ):
        load(folder)


def test_missing_lm_head_suggests_tying(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(
        CheckpointError, match=r"expected tensor lm_head.weight.*'tie_word_embeddings'"
    ):
        load(folder)
    edit_config(folder, tie_word_embeddings=True)
    assert load(folder).shape.tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "(40, 24)"),
        ("model.layers.0.mlp.experts.3.down_proj.weight", "(24, 12)"),
        ("model.norm.weight", "(24,)"),
    ],
)
def test_wrong_shape_is_named(folder: Path, name: str, shape: str) -> None:
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(7, 2)}))
    message = rf"{SINGLE}: tensor '{name}': expected shape \({shape[1:-1]}\).*found \(7, 2\)"
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_wrong_shape_of_stacked_experts(folder: Path) -> None:
    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        stack(tensors)
        name = "model.layers.2.mlp.experts.down_proj"
        tensors[name] = tensors[name].transpose(1, 2).contiguous()

    edit_tensors(folder, transpose)
    with pytest.raises(
        CheckpointError, match=r"experts.down_proj': .*\(5, 24, 12\).*\(5, 12, 24\)"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64")],
)
def test_wrong_dtype_is_named(folder: Path, dtype: torch.dtype, name: str) -> None:
    tensor = "model.layers.2.self_attn.v_proj.weight"
    edit_tensors(folder, lambda t: t.update({tensor: t[tensor].to(dtype)}))
    message = f"'{tensor}': expected dtype BF16, F16, F32, found {name}. Quantised"
    with pytest.raises(CheckpointError, match=message):
        load(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("model.layers.0.self_attn.q_proj.bias", "Set 'attention_bias' to true"),
        ("model.layers.0.self_attn.q_proj.weight_scale", "not a plain checkpoint of that model"),
        ("model.layers.2.mlp.shared_expert.up_proj.weight", "not a plain"),
        ("model.layers.2.mlp.gate.e_score_correction_bias", "not a plain"),
        ("model.layers.2.mlp.experts.5.up_proj.weight", "config.json is another model's"),
        ("model.layers.1.mlp.gate.weight", "not a plain"),
        ("model.layers.3.input_layernorm.weight", "not a plain"),
        ("lm_head.bias", "not a plain"),
        ("visual.patch_embed.weight", "not a plain"),
    ],
)
def test_extra_tensor_that_counts(folder: Path, name: str, cure: str) -> None:
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=rf"1 tensors have no place.*: {name}\. .*{cure}"):
        load(folder)


def test_experts_both_stacked_and_one_by_one(folder: Path) -> None:
    both = dict(load_file(folder / SINGLE))
    edit_tensors(folder, stack)
    edit_tensors(folder, lambda t: t.update(both))
    with pytest.raises(CheckpointError, match=r"30 tensors have no place.*experts.*and 26 more"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "mtp.layers.0.input_layernorm.weight",
    ],
)
def test_extra_tensor_that_does_not_count(folder: Path, name: str) -> None:
    expected = load(folder)
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(3)}))
    assert_same(load(folder), expected)


def test_extra_tensor_of_a_layer_that_is_loaded_is_refused(folder: Path) -> None:
    name = "model.layers.{}.self_attn.k_scale"
    edit_tensors(folder, lambda t: t.update({name.format(2): torch.zeros(1)}))
    assert load(folder, layers=2).shape.num_layers == 2
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.k_scale"):
        load(folder, layers=3)


def test_lm_head_in_a_tied_checkpoint(tmp_path: Path) -> None:
    weights = draw(dataclasses.replace(SHAPE, tie_word_embeddings=True))
    save_checkpoint(weights, tmp_path)
    embedding = weights.embedding.clone()
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": embedding}))
    assert_same(load(tmp_path), weights)
    for other in (embedding + 1, embedding[:-1].clone(), embedding.bfloat16()):
        edit_tensors(tmp_path, lambda t, other=other: t.update({"lm_head.weight": other}))
        with pytest.raises(
            CheckpointError, match=r"lm_head.weight is not model.embed_tokens.weight"
        ):
            load(tmp_path)
