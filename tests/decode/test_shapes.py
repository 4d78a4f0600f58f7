"""ModelShape: its own checks, and the sums that follow from a shape."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shape_data import shapes
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from graphcap.decode.shapes import PRESETS, ModelShape, preset
from graphcap.decode.weights import empty_weights
from graphcap.errors import CheckpointError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "shape 'tiny': num_layers: expected an integer >= 1, found 0"),
        ({"hidden_size": -4}, "hidden_size: expected"),
        ({"vocab_size": True}, r"vocab_size: expected .*found True \(bool\)"),
        ({"num_kv_heads": 3}, "num_heads: expected a multiple of num_kv_heads, 3"),
        ({"top_k": 9}, "top_k: expected at most num_experts, 8"),
        ({"top_k": 0}, "top_k: expected an integer >= 1"),
        ({"num_experts": -1}, "num_experts: expected an integer >= 0"),
        ({"num_experts": 0, "top_k": -1}, "top_k: expected an integer >= 0"),
        ({"head_dim": 31}, "head_dim: expected an even number"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: expected"),
        ({"norm_topk_prob": 1}, "norm_topk_prob: expected true or false"),
        ({"rope_theta": -1.0}, "rope_theta: expected a finite number"),
        ({"mlp_only_layers": (-1,)}, r"mlp_only_layers\[0\]: expected"),
        ({"dtype": torch.float64}, "dtype: expected one of bfloat16"),
        ({"dtype": torch.int8}, "dtype: .*torch.int8"),
    ],
)
def test_shape_checks_itself(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        dataclasses.replace(preset("tiny"), **changes)


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("mlp_only", [[], [0], [1, 3], [9]])
@pytest.mark.parametrize("flag", [False, True])
def test_layers_and_count_are_those_of_transformers(
    experts: int, step: int, mlp_only: list[int], flag: bool
) -> None:
    theirs = Qwen3MoeConfig(
        vocab_size=48,
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        moe_intermediate_size=10,
        num_experts=experts,
        num_experts_per_tok=2,
        decoder_sparse_step=step,
        mlp_only_layers=mlp_only,
        attention_bias=flag,
        tie_word_embeddings=flag,
        architectures=["Qwen3MoeForCausalLM"],
    )
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(theirs)
    shape = ModelShape.from_config(theirs.to_dict(), "x")
    sparse = [isinstance(layer.mlp, Qwen3MoeSparseMoeBlock) for layer in model.model.layers]
    assert [shape.is_sparse(i) for i in range(5)] == sparse
    assert shape.num_sparse_layers == sum(sparse)
    assert shape.parameter_count() == sum(p.numel() for p in model.parameters())


@given(shapes(), st.sampled_from([torch.bfloat16, torch.float32]))
@settings(max_examples=60, deadline=None)
def test_count_is_that_of_the_weights(shape: ModelShape, dtype: torch.dtype) -> None:
    weights = empty_weights(shape, device="meta", dtype=dtype)
    assert shape.weight_bytes(dtype) == weights.nbytes
    assert shape.parameter_count() == sum(t.numel() for _, t in weights.named_tensors())


@given(shapes(), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_bytes_read(shape: ModelShape, batch: int) -> None:
    weights = empty_weights(shape, device="meta", dtype=torch.float32)
    read = 0
    for name, tensor in weights.named_tensors():
        part = tensor.nbytes
        if tensor.dim() == 3:
            part = part // shape.num_experts * min(shape.num_experts, batch * shape.top_k)
        elif name == "embedding" and not shape.tie_word_embeddings:
            part = part // shape.vocab_size * min(shape.vocab_size, batch)
        read += part
    assert shape.bytes_read_per_step(torch.float32, batch) == read


def test_seed_64_is_the_shape_of_the_baseline() -> None:
    shape = preset("seed-64")
    assert round(shape.weight_bytes(torch.bfloat16) / 2**30) == 98
    assert round(shape.bytes_read_per_step(torch.bfloat16) / 1e9, 2) == 5.12
    one, two = (shape.bytes_read_per_step(torch.bfloat16, 32, experts=n) for n in (100, 101))
    assert two - one == 64 * 3 * 2048 * 512 * 2


def test_qwen3_30b_a3b_has_its_published_size() -> None:
    assert round(preset("qwen3-30b-a3b").parameter_count() / 1e9, 1) == 30.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch: expected an integer >= 1, found 0"),
        (
            {"batch": 2, "experts": 5},
            r"experts: expected at most min\(E, batch \* K\) = 4, found 5",
        ),
        ({"experts": -1}, "experts: expected an integer >= 0"),
    ],
)
def test_bytes_read_refuses(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        preset("tiny").bytes_read_per_step(torch.bfloat16, **arguments)


@given(shapes(), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_with_layers_changes_nothing_else(shape: ModelShape, layers: int) -> None:
    other = shape.with_layers(layers)
    assert other.num_layers == layers
    assert dataclasses.replace(other, num_layers=shape.num_layers) == shape


def test_presets() -> None:
    assert list(PRESETS) == [
        "tiny", "tiny-hybrid", "seed-64", "qwen3-30b-a3b", "qwen3.6-35b-a3b",
    ]  # fmt: skip
    assert all(shape.name == name for name, shape in PRESETS.items())
    tiny = preset("tiny")
    assert [tiny.is_sparse(i) for i in range(tiny.num_layers)] == [True, False, True, True]
    with pytest.raises(TypeError):
        PRESETS["mine"] = tiny  # type: ignore[index]


def test_unknown_preset_lists_the_names() -> None:
    with pytest.raises(CheckpointError, match=r"'tinny'.*tiny, .*seed-64, qwen3-30b-a3b"):
        preset("tinny")


def test_shape_is_hashable_and_normalised() -> None:
    shape = dataclasses.replace(preset("tiny"), mlp_only_layers=[1])  # type: ignore[arg-type]
    assert shape == preset("tiny")
    assert hash(shape) == hash(preset("tiny"))
