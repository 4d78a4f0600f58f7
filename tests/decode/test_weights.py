"""Random weights: layout, reproducibility, health of the activations, dtypes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeForCausalLM

from graphcap.decode import random_weights as drawing
from graphcap.decode.random_weights import random_weights
from graphcap.decode.save_checkpoint import save_checkpoint
from graphcap.decode.shapes import ModelShape, preset
from graphcap.decode.weights import DenseWeights, ExpertWeights, ModelWeights, empty_weights
from graphcap.errors import CheckpointError

TINY = preset("tiny")


def draw(
    shape: ModelShape = TINY, seed: int = 0, dtype: torch.dtype = torch.float32
) -> ModelWeights:
    return random_weights(shape, device="cpu", dtype=dtype, seed=seed)


def tensors(weights: ModelWeights) -> dict[str, torch.Tensor]:
    return dict(weights.named_tensors())


# --- layout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_layout(dtype: torch.dtype, tied: bool, bias: bool) -> None:
    shape = dataclasses.replace(TINY, tie_word_embeddings=tied, attention_bias=bias)
    weights = draw(shape, dtype=dtype)
    assert weights.shape == shape
    assert weights.dtype == dtype
    assert weights.device == torch.device("cpu")
    assert weights.embedding.shape == weights.lm_head.shape == (512, 128)
    assert (weights.lm_head is weights.embedding) == tied
    assert weights.nbytes == shape.weight_bytes(dtype)
    assert weights.final_norm.shape == (128,)
    for index, layer in enumerate(weights.layers):
        assert layer.input_norm.shape == layer.post_norm.shape == (128,)
        assert layer.q_norm.shape == layer.k_norm.shape == (32,)
        assert layer.qkv.shape == (8 * 32, 128)
        assert layer.output.shape == (128, 4 * 32)
        if bias:
            assert layer.qkv_bias is not None
            assert layer.qkv_bias.shape == (8 * 32,)
            assert layer.output_bias is not None
            assert layer.output_bias.shape == (128,)
        else:
            assert layer.qkv_bias is layer.output_bias is None
        if index == 1:
            assert isinstance(layer.mlp, DenseWeights)
            assert layer.mlp.gate_up.shape == (2 * 256, 128)
            assert layer.mlp.down.shape == (128, 256)
        else:
            assert isinstance(layer.mlp, ExpertWeights)
            assert layer.mlp.router.shape == (8, 128)
            assert layer.mlp.gate_up.shape == (8, 2 * 64, 128)
            assert layer.mlp.down.shape == (8, 128, 64)
    for name, tensor in tensors(weights).items():
        assert tensor.is_contiguous(), name
        assert not tensor.requires_grad, name
        assert tensor.dtype == dtype, name
        assert tensor.isfinite().all(), name


def test_named_tensors_are_unique_and_complete() -> None:
    weights = draw()
    names = [name for name, _ in weights.named_tensors()]
    storages = {tensor.data_ptr() for _, tensor in weights.named_tensors()}
    assert len(names) == len(set(names)) == len(storages)
    assert {"embedding", "layers.0.mlp.router", "layers.3.qkv", "final_norm", "lm_head"} <= set(
        names
    )


# --- drawing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_seed_same_weights_other_seed_others(dtype: torch.dtype) -> None:
    first, again, other = (
        draw(seed=7, dtype=dtype),
        draw(seed=7, dtype=dtype),
        draw(seed=8, dtype=dtype),
    )
    for name, tensor in tensors(first).items():
        assert torch.equal(tensor, tensors(again)[name]), name
        assert not torch.equal(tensor, tensors(other)[name]), name


def test_the_global_generator_is_neither_used_nor_moved() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = draw(seed=3)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(draw(seed=3).lm_head, first.lm_head)


def test_half_types_are_the_rounded_float32_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "_CHUNK", 1000)  # smaller than most tensors, divides few
    exact, rounded = draw(seed=5), draw(seed=5, dtype=torch.bfloat16)
    for name, tensor in tensors(exact).items():
        assert torch.equal(tensor.bfloat16(), tensors(rounded)[name]), name


class _LargestFloat32(TorchDispatchMode):
    """Notes the largest float32 tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.largest = max(self.largest, result.numel())
        return result


def test_no_float32_copy_of_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "_CHUNK", 1000)
    with _LargestFloat32() as seen:
        draw(dtype=torch.bfloat16)
    assert seen.largest == 1000


def test_meta_weights_are_not_drawn() -> None:
    shape = preset("seed-64")
    calls: list[int] = []
    weights = random_weights(
        shape,
        device="meta",
        dtype=torch.bfloat16,
        seed=0,
        progress=lambda done, _: calls.append(done),
    )
    assert weights.device.type == "meta"
    assert weights.nbytes == shape.weight_bytes(torch.bfloat16)
    assert calls == []


def test_progress_rises_to_the_total() -> None:
    calls: list[tuple[int, int]] = []
    weights = random_weights(
        TINY, device="cpu", dtype=torch.float16, seed=0, progress=lambda *c: calls.append(c)
    )
    done = [c[0] for c in calls]
    assert done == sorted(set(done))
    assert len(calls) == len(tensors(weights))
    assert calls[-1] == (weights.nbytes, weights.nbytes)
    assert {c[1] for c in calls} == {weights.nbytes}


def test_statistics() -> None:
    shape = dataclasses.replace(TINY, attention_bias=True)
    weights = draw(shape)
    layer, dense = weights.layers[0], weights.layers[1]
    assert isinstance(layer.mlp, ExpertWeights)
    assert layer.qkv_bias is not None
    residual = (2 * 4) ** -0.5
    expected = [
        (weights.embedding, 0, 1.0),
        (layer.qkv, 0, 128**-0.5),
        (layer.output, 0, residual * 128**-0.5),
        (layer.mlp.router, 0, 1.5 * 128**-0.5),
        (layer.mlp.gate_up, 0, 128**-0.5),
        (layer.mlp.down, 0, residual * 64**-0.5 * 2**0.5),
        (dense.mlp.down, 0, residual * 256**-0.5),
        (weights.lm_head, 0, 3 * 128**-0.5),
        (torch.cat([n for x in weights.layers for n in (x.input_norm, x.post_norm)]), 1, 0.1),
        (layer.qkv_bias, 0, 0.1),
    ]
    for tensor, mean, std in expected:
        sigma = std / tensor.numel() ** 0.5
        assert abs(tensor.mean().item() - mean) < 5 * sigma
        assert tensor.std().item() == pytest.approx(std, rel=5 / (2 * tensor.numel()) ** 0.5)
    tied = draw(dataclasses.replace(TINY, tie_word_embeddings=True))
    assert tied.embedding.std().item() == pytest.approx(3 * 128**-0.5, rel=0.02)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"norm_topk_prob": False}],
    ids=["plain", "tied", "not normalised"],
)
def test_64_layers_stay_healthy(changes: dict[str, bool], tmp_path: Path) -> None:
    shape = dataclasses.replace(
        TINY, num_layers=64, mlp_only_layers=(), num_experts=16, vocab_size=2048, **changes
    )
    weights = draw(shape, seed=11)
    save_checkpoint(weights, tmp_path)
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.randint(2048, (4, 24), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        out = model(tokens, output_hidden_states=True, output_router_logits=True)
        changed = tokens.clone()
        changed[:, 0] = (changed[:, 0] + 1) % 2048
        context = model(changed).logits[:, -1]
    assert out.logits.isfinite().all()
    for hidden in out.hidden_states[1:-1]:
        assert 0.2 < hidden.std() < 4
    assert 2 < out.logits.std() < 4.5
    for router in out.router_logits:
        assert 0.7 < router.std() < 2.5
        # Over 96 tokens every layer uses most experts, and not all tokens the same ones.
        chosen = router.topk(shape.top_k, dim=-1).indices
        assert len(chosen.unique()) > 8
        assert len(chosen.sort(dim=-1).values.unique(dim=0)) > 10
    # Different places predict different tokens, and rarely the token that was put in.
    predicted = out.logits.argmax(-1)
    assert len(predicted.unique()) > 40
    assert (predicted == tokens).float().mean() < 0.5
    # The first of 24 tokens still matters to the last one.
    assert (context - out.logits[:, -1]).std() > 0.05


# --- refusing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=f"dtype of random_weights: expected.*{dtype}"):
        draw(dtype=dtype)


def test_empty_weights_are_allocated_once() -> None:
    weights = empty_weights(TINY, device="cpu", dtype=torch.bfloat16)
    for name, tensor in tensors(weights).items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
