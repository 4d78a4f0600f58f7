"""``graphcap doctor --shape``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphcap.cli import doctor_shapes, main
from graphcap.decode.shapes import PRESETS

CONFIGS = Path("model_executor", "layers", "fused_moe", "configs")
QWEN36 = {  # a text model inside another, with attention and experts that the decode step does not compute
    "model_type": "qwen3_5_moe",
    "quantization_config": {"bits": 4},
    "text_config": {
        "hidden_size": 2048,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["doctor", "--shape", *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert isinstance(result, dict)
    return result


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["doctor", *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_has_an_answer_from_every_backend(capsys, name: str):
    result = asked(capsys, name)
    assert result["num_experts"] == PRESETS[name].num_experts
    assert {finding["backend"] for finding in result["findings"]} == {
        "triton", "vllm", "ixformer", "mlx",
    }  # fmt: skip
    assert result["slow"] == sum(
        finding["verdict"] in ("unaligned", "untuned") for finding in result["findings"]
    )


@pytest.mark.parametrize(("bits", "slow"), [("4", 1), ("5", 1), ("6", 0), ("8", 0)])
def test_one_backend_and_width(capsys, bits: str, slow: int):
    result = asked(capsys, "qwen3-30b-a3b", "--backend", "mlx", "--bits", bits)
    assert {finding["backend"] for finding in result["findings"]} == {"mlx"}
    assert len(result["findings"]) == 2
    assert result["slow"] == slow


def test_the_table(capsys):
    assert main(["doctor", "--shape", "qwen3-30b-a3b", "--backend", "mlx", "--bits", "4"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "qwen3-30b-a3b: 128 experts, top-8, hidden 2048, expert intermediate 768" in printed
    assert "unaligned" in printed
    assert "1 of 2 would run slowly: untuned, or off their kernel's alignment" in printed


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_config_of_a_model_that_the_decode_step_does_not_run(
    capsys, tmp_path: Path, as_folder: bool
):
    (tmp_path / "config.json").write_text(json.dumps(QWEN36))
    path = tmp_path if as_folder else tmp_path / "config.json"
    result = asked(capsys, str(path), "--tp", "4", "--backend", "mlx")
    assert (result["num_experts"], result["top_k"], result["hidden_size"]) == (256, 8, 2048)
    assert any("down, K 128," in finding["what"] for finding in result["findings"])


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed vllm that must not be imported."""
    package = tmp_path / "site" / "vllm"
    (package / CONFIGS).mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('vllm was imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delenv("VLLM_TUNED_CONFIG_FOLDER", raising=False)
    return package


def vllm_verdicts(capsys, *arguments: str) -> list[str]:
    findings = asked(capsys, "seed-64", "--backend", "vllm", *arguments)["findings"]
    return [finding["verdict"] for finding in findings]


def test_vllms_configurations_are_found_without_importing_it(
    capsys, vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    card = ("--device-name", "NVIDIA H200")
    assert vllm_verdicts(capsys, *card) == ["untuned"]
    (vllm / CONFIGS / "E=256,N=512,device_name=NVIDIA_H200.json").write_text('{"1": {}}')
    assert vllm_verdicts(capsys, *card) == ["tuned"]
    assert vllm_verdicts(capsys, *card, "--tp", "2") == ["untuned"]
    own = tmp_path / "own"
    own.mkdir()
    (own / "E=256,N=256,device_name=NVIDIA_H200.json").write_text('{"1": {}}')
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(own))
    assert vllm_verdicts(capsys, *card, "--tp", "2") == ["tuned"]


def test_without_a_card_its_name_is_asked_for(capsys, vllm: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor_shapes, "_card_here", lambda: None)
    assert vllm_verdicts(capsys) == ["not known"]
    monkeypatch.setattr(doctor_shapes, "_card_here", lambda: "NVIDIA H200")
    assert vllm_verdicts(capsys) == ["untuned"]


def test_without_vllm_that_is_said(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor_shapes, "_vllm_package", lambda: None)
    assert vllm_verdicts(capsys) == ["not installed"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shape", "seed-65"], "expected a preset (tiny, tiny-hybrid, seed-64, qwen3-30b-a3b, "),
        (["--shape", "seed-64", "--bits", "7"], "--bits 7: expected one of 2, 3, 4, 5, 6, 8"),
        (["--shape", "seed-64", "--tp", "3"], "--tp 3: expected a divisor"),
        (["--shape", "seed-64", "--vllm"], "ask one at a time"),
        (["--shape", "seed-64", "--backend", "vllm", "--bits", "4"], "--bits belongs to mlx"),
        (["--shape", "tiny", "--backend", "mlx", "--device-name", "x"], "belongs to vllm"),
        (["--backend", "mlx"], "--backend belongs to --shape"),
        (["--tp", "2"], "--tp belongs to --shape"),
    ],
)
def test_bad_input_is_named(capsys, arguments: list[str], text: str):
    assert text in refused(capsys, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [["--shape", ""], ["--shape", "tiny", "--device-name", " "], ["--vllm", "--model", ""]],
)
def test_a_name_that_is_empty_is_refused(capsys, arguments: list[str]):
    with pytest.raises(SystemExit) as refusal:
        main(["doctor", *arguments])
    assert refusal.value.code == 2
    assert f"argument {arguments[-2]}: expected a name, found " in capsys.readouterr().err


def test_the_experts_of_a_model_that_is_no_preset(capsys):
    result = asked(capsys, "qwen3.6-35b-a3b", "--backend", "mlx", "--bits", "4")
    assert (result["num_experts"], result["top_k"]) == (256, 8)
    assert [finding["verdict"] for finding in result["findings"]] == ["aligned", "aligned"]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("{", "readable JSON"),
        ("[]", "expected a JSON object"),
        ('{"hidden_size": 8}', "'num_experts' is missing"),
        ('{"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 8}', "moe_intermediate_size"),
        ('{"num_experts": 0, "hidden_size": 8}', "has no experts"),
        (
            '{"num_experts": 4, "num_experts_per_tok": 5, "hidden_size": 8, "moe_intermediate_size": 8}',
            "expected 1 to 4 experts a token",
        ),
    ],
)
def test_a_config_without_experts_is_refused(capsys, tmp_path: Path, config: str, text: str):
    file = tmp_path / "config.json"
    file.write_text(config)
    assert text in refused(capsys, "--shape", str(file))
    file.unlink()
    assert "expected the file, found none" in refused(capsys, "--shape", str(tmp_path))
