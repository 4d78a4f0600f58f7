"""The model that is measured where a plan is wanted for experts alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphcap.decode.plan_key import PlanKey
from graphcap.decode.shapes import preset
from graphcap.errors import InputError
from graphcap.tuning.stand_in import measured_shape

SEED = preset("seed-64")


def test_a_model_of_full_attention_is_measured_itself() -> None:
    assert measured_shape(SEED) == SEED


@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b", "tiny-hybrid"])
def test_a_hybrid_is_its_experts_between_layers_of_full_attention(name: str) -> None:
    hybrid = preset(name)
    shape = measured_shape(hybrid)
    assert not shape.is_hybrid
    assert shape.num_sparse_layers == shape.num_layers == hybrid.num_layers
    keys = [PlanKey.of(each, torch.bfloat16, "card").experts for each in (hybrid, shape)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "inner"), [(2, 8, 1, 256), (4, 4, 1, 128), (16, 1, 1, 32)]
)
def test_a_rank_has_its_share(ranks: int, heads: int, kv_heads: int, inner: int) -> None:
    shape = measured_shape(SEED, ranks)
    found = (shape.num_heads, shape.num_kv_heads, shape.moe_intermediate_size)
    assert found == (heads, kv_heads, inner)
    same = replace(
        SEED, name=shape.name, num_heads=heads, num_kv_heads=kv_heads, moe_intermediate_size=inner
    )
    assert shape == same


@pytest.mark.parametrize(
    ("changes", "ranks", "field"),
    [
        ({}, 3, "num_heads"),
        ({"moe_intermediate_size": 500}, 8, "moe_intermediate_size"),
        ({"num_experts": 0, "top_k": 0, "intermediate_size": 1001}, 2, "intermediate_size"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes: dict[str, int], ranks: int, field: str) -> None:
    with pytest.raises(InputError, match=f"expected {field} to be a multiple of {ranks}"):
        measured_shape(replace(SEED, **changes), ranks)


@pytest.mark.parametrize(("kv_heads", "ranks"), [(6, 4), (3, 2), (4, 6)])
def test_heads_of_keys_that_are_neither_shared_out_nor_copied_evenly_are_refused(
    kv_heads: int, ranks: int
) -> None:
    """vLLM starts no engine with them."""
    shape = replace(SEED, num_heads=24, num_kv_heads=kv_heads, moe_intermediate_size=768)
    with pytest.raises(InputError, match=f"num_kv_heads to be a multiple or a divisor of {ranks}"):
        measured_shape(shape, ranks)
