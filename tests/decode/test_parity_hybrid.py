"""Decoding gives what transformers' Qwen3-Next and Qwen3.5-MoE give: tokens and the logits of every step.

Tolerances are those of `parity`. Prompts enter token by token here, while transformers takes a prompt's
gated delta net in chunks; both in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import (
    Compared,
    assert_decodes_as,
    assert_null_state_untouched,
    draw_prompts,
    dtypes,
    make_decoder,
    poison,
    serve,
)
from reference_models import reference
from transformers_version import IS_5

if not IS_5:
    pytest.skip("the models came with transformers 5", allow_module_level=True)

from hybrid_models import KINDS, load_hybrid, make_hybrid

from graphcap.decode.checkpoint import load_checkpoint

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in KINDS},
    "next, attention bias": ("qwen3_next", {"attention_bias": True}),
    "next, dense layers": ("qwen3_next", {"mlp_only_layers": [0, 3]}),
    "next, not renormalised": ("qwen3_next", {"norm_topk_prob": False}),
    "next, one value head a key head": ("qwen3_next", {"linear_num_value_heads": 2}),
    "3.5, conv over 2": ("qwen3_5_moe_text", {"linear_conv_kernel_dim": 2}),
    "3.5, attention first": (
        "qwen3_5_moe_text",
        {
            "layer_types": [
                "full_attention",
                "linear_attention",
                "linear_attention",
                "full_attention",
            ]
        },
    ),
    "3.5, all rotary": (
        "qwen3_5_moe_text",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 1.0,
            }
        },
    ),
}
SEEDS = {"qwen3_next": 3, "next, one value head a key head": 2}
"""Of models in which no more than a few tokens are nearly tied; the others have 1."""

cases = pytest.mark.parametrize("case", CASES)


@cases
@dtypes
def test_tokens_and_logits(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    model = make_hybrid(kind, SEEDS.get(case, 1), dtype, dtype == torch.bfloat16, **changes)
    model.save_pretrained(tmp_path)
    theirs, weights = load_hybrid(kind, tmp_path), load_checkpoint(tmp_path, device="cpu")
    assert theirs.dtype == weights.dtype == dtype
    assert weights.shape.model_type == (
        "qwen3_next" if kind == "qwen3_next" else "qwen3_5_moe_text"
    )
    assert (weights.left_out.get("vision", 0) > 20) == (kind == "qwen3_5_moe")
    assert_decodes_as(theirs, weights)


@pytest.mark.parametrize("kind", KINDS)
@dtypes
def test_sequences_that_join_and_leave(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_hybrid(kind, SEEDS.get(kind, 1), dtype, dtype == torch.bfloat16)
    model.save_pretrained(tmp_path)
    prompts = draw_prompts((3, 12, 1, 6, 2, 9, 1, 5), seed=9)
    decoder = make_decoder(load_checkpoint(tmp_path, device="cpu"), max_batch=4, sizes=(1, 3))
    poison(decoder.cache)
    ours = serve(decoder, prompts, every=5)
    stats = decoder.manager.stats()
    assert all(bucket.replays for bucket in stats.buckets)
    assert stats.padding_rows > 0  # a batch of two, in the bucket of three
    assert_null_state_untouched(decoder.cache)
    compared = Compared(dtype)
    compared.add(ours, reference(load_hybrid(kind, tmp_path), prompts))
    compared.assert_nearly_all()
