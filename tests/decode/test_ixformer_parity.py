"""The parity tests of the decode step on ixformer's operations: both generations, and builds that lack
some, give the tokens and logits of transformers' Qwen3-MoE (see `test_parity` for tolerances)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_parity
import torch
from ixformer_standin import MOE_OPERATIONS, installed

from graphcap.decode.kernels import decode_kernels
from graphcap.moe.kernels import Backend

BUILDS: dict[str, tuple[str, dict[str, Any]]] = {
    "0.4": ("0.4", {}),
    "0.4 without MoE": ("0.4", {"without": MOE_OPERATIONS}),
    "newer": ("newer", {}),
    "newer, merge missing": ("newer", {"without": ["moe_output_reduce_sum"]}),
    "newer, top-k renamed": (
        "newer",
        {"renamed": {"vllm_moe_topk_softmax": "moe_topk_softmax_v2"}},
    ),
}

one_thread = test_parity.one_thread


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Puts the kernels of a build in the place of those that `test_parity` tests."""
    generation, changes = BUILDS[request.param]
    with installed(generation, **changes):
        kernels = decode_kernels(Backend("ixformer", "tests"))
    assert any(choice.kernel.startswith("ixformer: ") for choice in kernels.choices())
    monkeypatch.setattr(test_parity, "KERNELS", kernels)
    return str(request.param)


@pytest.mark.parametrize(
    "case",
    ["untied", "one dense layer", "not renormalised", "head dim 24", "kv heads as heads", "top 1"],
)
def test_tokens_and_logits_in_float32(build: str, case: str, tmp_path: Path) -> None:
    test_parity.test_tokens_and_logits(case, torch.float32, tmp_path)


@pytest.mark.parametrize("case", ["one dense layer", "top 5 of 6", "head dim 24"])
def test_tokens_and_logits_in_bfloat16(build: str, case: str, tmp_path: Path) -> None:
    test_parity.test_tokens_and_logits(case, torch.bfloat16, tmp_path)


def test_sequences_that_join_and_leave(build: str, tmp_path: Path) -> None:
    test_parity.test_sequences_that_join_and_leave("untied", torch.float32, tmp_path)
