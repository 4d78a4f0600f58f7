"""The parity tests of the decode step on ixformer's operations: both generations, and builds that lack
some, give the tokens and logits of transformers' Qwen3-MoE (see `parity` for tolerances)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
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

CASES = [
    *((build, case) for build in ("0.4", "newer") for case in ("one dense layer", "head dim 24")),
    *((build, "not renormalised") for build in BUILDS),
    ("0.4", "kv heads as heads"),
    ("newer", "top 1"),
]


def put_in_place(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a build instead of those that `parity` has."""
    generation, changes = BUILDS[build]
    with installed(generation, **changes):
        kernels = decode_kernels(Backend("ixformer", "tests"))
    assert any(choice.kernel.startswith("ixformer: ") for choice in kernels.choices())
    monkeypatch.setattr(parity, "KERNELS", kernels)


@pytest.mark.parametrize(("build", "case"), CASES)
def test_tokens_and_logits_in_float32(
    build: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_place(build, monkeypatch)
    test_parity.test_tokens_and_logits(case, torch.float32, tmp_path)


@pytest.mark.parametrize(
    ("build", "case"),
    [("0.4", "one dense layer"), ("newer", "head dim 24"), ("newer", "top 5 of 6")],
)
def test_tokens_and_logits_in_bfloat16(
    build: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_place(build, monkeypatch)
    test_parity.test_tokens_and_logits(case, torch.bfloat16, tmp_path)


@pytest.mark.parametrize("build", BUILDS)
def test_sequences_that_join_and_leave(
    build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_place(build, monkeypatch)
    test_parity.test_sequences_that_join_and_leave("untied", torch.float32, tmp_path)
