"""``graphcap tune``: what it prints and writes, with tuning stood in for, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.0")

from graphcap.cli import main
from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.plan_files import TunedBucket, read_plans
from graphcap.decode.plan_key import ExpertSizes, PlanKey
from graphcap.decode.shapes import preset
from graphcap.tuning.tune import Tuning

FOUND = LayerPlan("fused", without_pdl=frozenset({"attend"}))
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="refusals of a machine without a GPU")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", str(tmp_path / "tuned"))
    return tmp_path / "tuned"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU on which every load but 4 rows has a plan; the arguments of what would be measured."""
    asked: list[Any] = []

    def tune(weights: Any, kernels: Any, loads: Any, seconds: float, show: Any, known: Any) -> Any:
        assert known(3, 256) == ()
        asked.append((kernels.experts.name, list(loads), seconds))
        for rows, context in loads:
            made = Tuning(rows, context)
            for plan, ms in ((LayerPlan("plain"), 3.0), (LayerPlan("fused"), 2.0), (FOUND, 1.5)):
                row = {"rows": rows, "context": context, "knob": "final", "plan": plan}
                made.candidates.append({**row, "ms": ms} if rows != 4 else {**row, "failed": "no"})
                show(made.candidates[-1])
            if rows != 4:
                made.bucket = TunedBucket(rows, context, FOUND, 1.5, 3.0, 2.0, 12, 3)
            yield made

    monkeypatch.setattr("graphcap.cli.tune.default_device", lambda: torch.device("cuda:0"))
    monkeypatch.setattr("graphcap.cli.tune._weights", lambda *of: None)
    monkeypatch.setattr("graphcap.cli.tune._compile", lambda *of: (100.0, "compiled [all]"))
    monkeypatch.setattr("graphcap.tuning.tune.tune", tune)
    monkeypatch.setattr("graphcap.tuning.tune._driver", lambda: "580.1")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    return asked


def test_winners_are_printed_kept_and_exported(
    gpu: list[Any], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"
    words = ["--batches", "8,1", "--contexts", "256,4096", "--export", str(out), "--commit", "abc"]
    assert main(["tune", *words]) == 0
    assert gpu == [("triton", [(1, 256), (8, 256), (1, 4096), (8, 4096)], 500.0)]
    key = PlanKey.of(preset("seed-64"), torch.bfloat16, "NVIDIA H200")
    written = read_plans(folder / key.file_name)
    assert written == read_plans(out)
    assert [(b.rows, b.context) for b in written.buckets] == [
        (1, 256),
        (1, 4096),
        (8, 256),
        (8, 4096),
    ]
    assert all(b.plan == FOUND for b in written.buckets)
    assert (written.shape, written.machine["commit"]) == ("seed-64", "abc")
    assert written.machine["driver"] == "580.1"
    printed = capsys.readouterr().out
    assert "seed-64, 12 layers measured, bfloat16 on NVIDIA H200" in printed
    assert printed.count("winner fused; no dependent launch of attend") == 4
    assert "compiled [all]" in printed
    assert "1.500" in printed
    assert "0.500" in printed  # of plain
    assert str(folder / key.file_name) in printed.replace("\n", "")


def test_a_second_run_adds_to_the_first(gpu: list[Any], folder: Path) -> None:
    for batches in ("1", "2"):
        assert main(["tune", "--batches", batches, "--json"]) == 0
    (path,) = folder.iterdir()
    assert [b.rows for b in read_plans(path).buckets] == [1, 2]


def test_a_load_without_a_plan_is_the_exit_code_and_the_others_are_kept(
    gpu: list[Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--batches", "2,4,8"]) == 1
    (path,) = folder.iterdir()
    assert [b.rows for b in read_plans(path).buckets] == [2, 8]
    printed = capsys.readouterr().out
    assert "no plan works" in printed
    assert "3 plans tried, 3 failed" in printed


def test_json_has_every_candidate(gpu: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--batches", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (load,) = result["loads"]
    assert (load["rows"], load["context"], load["ms"]) == (1, 256, 1.5)
    assert load["winner"] == {"layers": "fused", "without_pdl": ["attend"]}
    assert [row["ms"] for row in load["candidates"]] == [3.0, 2.0, 1.5]


@pytest.mark.usefixtures("gpu")
def test_what_could_not_be_kept_is_refused_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", str(tmp_path / "file" / "plans"))
    assert main(["tune", "--batches", "1"]) == 2
    assert "GRAPHCAP_TUNE_CACHE: expected a folder that can be written" in capsys.readouterr().err
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", str(tmp_path / "plans"))
    assert main(["tune", "--batches", "1", "--export", str(tmp_path / "file" / "x.json")]) == 2
    assert "--export: expected a folder that can be written" in capsys.readouterr().err


@on_cpu
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--shape", "tiny"]) == 2
    told = capsys.readouterr().err
    assert "expected a CUDA device, found cpu; run it on the machine with the GPU" in told
    assert "(graphcap explain backend)" in told


def test_a_dry_run_needs_no_gpu_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--dry-run", "--batches", "1,8", "--contexts", "4096", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["shape"], result["layers"], result["cache"]) == ("seed-64", 12, str(folder))
    assert [(each["rows"], each["context"]) for each in result["loads"]] == [(1, 4096), (8, 4096)]
    for load in result["loads"]:
        assert load["plans"] > 40
        assert load["seconds"] > 10
        assert {name for _, name, _ in load["knobs"]} >= {"attend", "pair_gate_up", "pdl"}
    assert main(["tune", "--dry-run", "--batches", "1,8", "--layers", "3"]) == 0
    printed = capsys.readouterr().out
    assert "seed-64, 3 layers: what would be tried" in printed
    assert "an estimate" in printed
    assert not folder.exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tensor-parallel", "3"], "expected num_heads to be a multiple of 3, found 16"),
        (["--dtype", "float32"], "nothing to tune in float32"),
        (["--layers", "65"], "--layers 65: the shape seed-64 has 64 layers"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_a_dry_run_too(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--dry-run", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--batches", "1,x"], ["--batches", "0"], ["--seconds", "0"]])
def test_bad_arguments(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tune", *words])
    assert ended.value.code == 2
    assert "expected an integer of at least 1" in capsys.readouterr().err


def test_experts_of_a_hybrid_and_of_a_rank_are_tuned_for_themselves(
    gpu: list[Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plans are found by the sizes of the experts, whatever stands around them."""
    assert main(["tune", "--shape", "qwen3.6-35b-a3b", "--batches", "8"]) == 0
    assert "qwen3.6-35b-a3b (experts), 12 layers measured" in capsys.readouterr().out
    assert main(["tune", "--tensor-parallel", "2", "--batches", "8"]) == 0
    assert "seed-64 (a rank of 2), 12 layers measured" in capsys.readouterr().out
    found = {read_plans(path).shape: read_plans(path).key for path in folder.iterdir()}
    hybrid, rank = found["qwen3.6-35b-a3b (experts)"], found["seed-64 (a rank of 2)"]
    assert hybrid.experts == ExpertSizes(2048, 256, 8, 512)
    assert rank.experts == ExpertSizes(2048, 256, 8, 256)


def test_weights_of_a_checkpoint_are_not_read_for_another_shape(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(
        "graphcap.cli.tune._weights", lambda options, *of: asked.append(options.checkpoint)
    )
    monkeypatch.setattr("graphcap.cli.tune.chosen_shape", lambda options: preset("seed-64"))
    monkeypatch.setattr(
        "graphcap.decode.checkpoint.checkpoint_shape", lambda folder: preset("seed-64")
    )
    for words in ([], ["--tensor-parallel", "2"]):
        assert main(["tune", "--checkpoint", str(tmp_path), "--batches", "8", *words]) == 0
    assert asked == [str(tmp_path), None]


CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 1000,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def test_a_config_is_enough_where_weights_are_random_anyway(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["tune", "--dry-run", "--batches", "1", "--json", "--checkpoint", str(tmp_path)]
    assert main([*words, "--tensor-parallel", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["shape"], result["layers"]) == (f"{tmp_path.name} (a rank of 2)", 4)
    assert main(words) == 2  # its own weights are measured, and are not there
    assert "expected" in capsys.readouterr().err
