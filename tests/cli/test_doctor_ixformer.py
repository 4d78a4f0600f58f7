"""What the command line says about an ixformer."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
import torch
from ixformer_standin import GENERATIONS, MOE_OPERATIONS, installed

from graphcap.cli import main
from graphcap.cli.doctor_ixformer import ixformer_rows
from graphcap.moe.kernels import Backend


def doctor(capsys: pytest.CaptureFixture[str]) -> dict:
    main(["doctor", "--json"])
    return json.loads(capsys.readouterr().out)


def test_without_one_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(capsys)["ixformer"] is None
    main(["doctor"])
    assert "generation" not in capsys.readouterr().out


@pytest.mark.parametrize("generation", GENERATIONS)
def test_generation_path_and_operations(
    generation: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IXFORMER_DISABLE_SYNC", "1")
    with installed(generation):
        found = doctor(capsys)["ixformer"]
    paths = {"0.4": "ixformer.functions", "newer": "ixformer.inference.functions"}
    assert (found["generation"], found["path"]) == (generation, paths[generation])
    assert found["variables"] == {"IXFORMER_DISABLE_SYNC": "1"}
    rows = {row["operation"]: row for row in found["operations"]}
    assert rows["rms_norm"] == {"operation": "rms_norm", "ixformer": "rms_norm", "why": ""}
    assert rows["sampling"]["ixformer"] is None
    assert rows["sampling"]["why"] == "ixformer has no such operation"
    assert (rows["merge"]["ixformer"] is None) == (generation == "0.4")


def test_what_falls_back_and_why_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with installed("0.4", without=MOE_OPERATIONS):
        main(["doctor"])
    printed = capsys.readouterr().out
    assert "ixformer of unknown version, generation 0.4 (ixformer.functions)" in printed
    words = " ".join(printed.replace("│", " ").split())
    assert "ixformer.functions has no vllm_moe_topk_softmax" in words
    assert "vllm_single_query_cached_kv_attention" in words


def test_where_it_is_chosen_its_table_says_what_stands_in(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Backend("ixformer", "tests")
    monkeypatch.setattr("graphcap.moe.kernels.choose_backend", lambda *_: chosen)
    with installed("0.4", without=MOE_OPERATIONS):
        main(["doctor"])
    printed = capsys.readouterr().out
    assert "not chosen" not in printed
    words = " ".join(printed.replace("│", " ").split())
    assert "attention ixformer: vllm_single_query_cached_kv_attention" in words
    assert "topk_softmax torch ixformer.functions has no vllm_moe_topk_softmax" in words


def test_one_that_cannot_be_used_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with installed("newer"):
        sys.modules["ixformer.inference.functions"] = ModuleType("empty")
        found = doctor(capsys)["ixformer"]
        assert "neither generation" in found["problem"]
        assert found["operations"] == []
        main(["doctor"])
    assert "neither generation" in " ".join(capsys.readouterr().out.split())


def test_a_corex_torch_without_ixformer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.1.0+corex.3.2.3")
    found = ixformer_rows({})
    assert found is not None
    assert "ixformer cannot be imported" in found["problem"]


def test_the_chosen_kernels_are_listed_by_operation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHCAP_KERNELS", "reference")
    rows = {row["operation"]: row for row in doctor(capsys)["kernels"]}
    assert rows["attention"] == {"operation": "attention", "kernel": "torch", "note": ""}
    assert "topk_softmax" in rows


@pytest.mark.parametrize("generation", GENERATIONS)
def test_decode_and_census_run_on_it(
    generation: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Backend("ixformer", "tests")
    command = ["decode", "--batch", "2", "--max-batch", "2", "--tokens", "4", "--layers", "2"]
    assert main([*command, "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    monkeypatch.setattr("graphcap.moe.kernels.choose_backend", lambda *_: chosen)
    with installed(generation):
        assert main([*command, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert main(command) == 0
        printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert main(["census", "--shape", "tiny", "--json"]) == 0
        census = json.loads(capsys.readouterr().out)
    assert result["outputs_equal"]
    assert result["token_ids"] == expected["token_ids"]
    kernels = {row["operation"]: row["kernel"] for row in result["kernels"]["operations"]}
    assert kernels["rms_norm"] == "ixformer: rms_norm"
    assert "sampling torch ixformer has no such operation" in printed
    rows = {row["operation"]: row for row in census["rows"]}
    assert rows["attention"]["implementation"] == kernels["attention"]
    assert rows["bounds"]["count"] == 1
