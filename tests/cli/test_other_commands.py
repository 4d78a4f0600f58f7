"""``graphcap census`` and ``graphcap doctor``."""

import json
import os

import pytest
import torch

from graphcap.cli import doctor_vllm, main
from graphcap.settings import VARIABLES

NAMED = [
    "router GEMM", "topk_softmax", "moe_align_block_size", "fused_moe w1", "silu_and_mul",
    "fused_moe w2", "merge", "attention", "rms_norm", "fused_add_rms_norm", "rotary_embedding",
    "projections", "sampling", "copies",
]  # fmt: skip


def census(capsys, *arguments: str) -> dict:
    assert main(["census", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_launch_table_beside_the_analysis(capsys):
    result = census(capsys)
    rows = {row["operation"]: row for row in result["rows"]}
    assert set(NAMED) <= set(rows)
    assert result["total"] == sum(row["count"] for row in result["rows"])
    for name in ("fused_moe w1", "fused_moe w2", "silu_and_mul", "topk_softmax", "merge"):
        assert (rows[name]["count"], rows[name]["analysis_count"]) == (64, 64)
    assert (rows["attention"]["count"], rows["attention"]["analysis_count"]) == (64, 1)
    assert (rows["rms_norm"]["count"], rows["rms_norm"]["analysis_count"]) == (129, 128)
    assert rows["router GEMM"]["analysis_count"] is None
    assert sum(row["analysis_count"] or 0 for row in result["rows"]) == result["analysis_total"]
    assert result["analysis_total"] == 641
    assert result["analysis_allocations"] == 192
    assert result["allocations_per_step"] >= 64 * 9  # the MoE intermediates of design.md alone
    assert (result["graph_nodes"] is None) == (not torch.cuda.is_available())


def test_dense_layers_and_depth_count(capsys):
    result = census(capsys, "--shape", "tiny", "--batch", "4")
    rows = {row["operation"]: row["count"] for row in result["rows"]}
    assert rows["attention"] == 4
    assert rows["router GEMM"] == 3
    assert rows["silu_and_mul"] == 4
    assert result["analysis_total"] is None
    fewer = census(capsys, "--shape", "tiny", "--layers", "2")
    assert {row["operation"]: row["count"] for row in fewer["rows"]}["attention"] == 2


def test_a_hybrid_is_counted_at_full_size(capsys):
    result = census(capsys, "--shape", "qwen3.6-35b-a3b")
    rows = {row["operation"]: row["count"] for row in result["rows"]}
    assert result["layers"] == 40
    assert rows["attention"] == rows["output gate"] == rows["cache write"] == 10
    assert rows["conv update"] == rows["delta rule"] == rows["gated_rms_norm"] == 30
    assert rows["shared expert gate"] == rows["router GEMM"] == 40
    # Two for each mixer, two for each shared expert, and the lm head.
    assert rows["projections"] == 40 * 4 + 1
    # Two norms a layer, two of queries and keys, the last; of these the first stands alone.
    assert rows["rms_norm"] + rows["fused_add_rms_norm"] == 80 + 2 * 10 + 1
    assert rows["merge"] == 2 * 40  # what the experts give, and the shared expert's output to it
    assert result["total"] == sum(row["count"] for row in result["rows"])


def test_the_table_is_printed(capsys):
    assert main(["census", "--shape", "tiny"]) == 0
    printed = capsys.readouterr().out
    assert "fused_add_rms_norm" in printed
    assert "moe_align_block_size" in printed


def test_doctor(capsys, monkeypatch):
    monkeypatch.setenv("GRAPHCAP_KERNELS", "reference")
    monkeypatch.setenv("GRAPHCAP_BUCKET", "1,2")
    monkeypatch.setenv("VLLM_ENFORCE_CUDA_GRAPH", "1")
    assert main(["doctor", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    machine = result["machine"]
    assert machine["torch"] == torch.__version__
    assert machine["kernels"].startswith("reference")
    assert {"python", "device", "graph capture", "recorder", "triton", "vllm", "ixformer"} <= set(
        machine
    )
    by_name = {variable["name"]: variable for variable in result["variables"]}
    assert set(by_name) >= {variable.name for variable in VARIABLES}
    assert by_name["GRAPHCAP_KERNELS"]["origin"] == "environment"
    assert by_name["GRAPHCAP_STRICT"]["origin"] == "default"
    assert by_name["VLLM_ENFORCE_CUDA_GRAPH"]["value"] == "1"
    assert any(
        "GRAPHCAP_BUCKET " in line or "GRAPHCAP_BUCKET" in line for line in result["warnings"]
    )
    assert result["capture_works"] == torch.cuda.is_available()


def test_doctor_says_what_is_missing_instead_of_failing(capsys, monkeypatch):
    monkeypatch.setenv("GRAPHCAP_KERNELS", "ixformer")
    monkeypatch.setenv("GRAPHCAP_STRICT", "yes")
    monkeypatch.setenv("GRAPHCAP", "1")
    monkeypatch.setattr(doctor_vllm, "has_vllm", lambda: False)
    assert main(["doctor"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "GRAPHCAP_STRICT: expected 0 or 1, found 'yes'" in printed
    assert "GRAPHCAP_BUCKETS" in printed
    monkeypatch.delenv("GRAPHCAP_STRICT")
    assert main(["doctor"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    expected = "cannot be imported" if torch.cuda.is_available() else "run on a CoreX card"
    assert f"ixformer{expected}" in printed.replace("ixformer's operations ", "ixformer").replace(
        "ixformer cannot", "ixformercannot"
    )
    assert "GRAPHCAP=1 has no effect: vLLM is not installed" in printed


@pytest.mark.parametrize("command", ["decode", "census", "doctor"])
def test_help(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert command in capsys.readouterr().out


def test_no_command_is_bad_input(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2


def test_nothing_is_left_in_the_environment():
    assert "GRAPHCAP_BUCKET" not in os.environ
