"""``graphcap lint``: exit codes, what is printed, bad arguments, and no false alarm on checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lint_steps import line_of

from graphcap.cli import lint as command
from graphcap.cli import main
from graphcap.decode.random_weights import random_weights
from graphcap.decode.save_checkpoint import save_checkpoint
from graphcap.decode.shapes import ModelShape, preset


def lint(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["lint", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["lint", *arguments])
    return code, capsys.readouterr().out


def test_what_breaks_is_exit_code_1_with_file_and_line(capsys: pytest.CaptureFixture[str]):
    code, result = lint(capsys, "--module", "lint_steps:make_two_faults")
    assert code == 1
    assert (result["breaks"], result["batches"]) == (2, [8, 4, 2, 1])
    first, second = [f for f in result["findings"] if f["severity"] == "breaks"]
    assert first["place"]["line"] == line_of("here: first")
    assert second["place"]["source"].startswith("return x.sum().item()")
    assert second["via"]["line"] == line_of("here: called from")
    assert second["recorders"] == ["cuda", "tape"]
    assert result["verdict"].startswith("2 would break capture (cuda 2, tape 2)")


def test_a_clean_step_is_exit_code_0_and_strict_refuses_what_weakens(
    capsys: pytest.CaptureFixture[str],
):
    code, result = lint(capsys, "--module", "lint_steps:make_clean")
    assert (code, result["breaks"], result["weakens"]) == (0, 0, 1)
    assert main(["lint", "--module", "lint_steps:make_clean", "--strict"]) == 1
    assert main(["lint", "--module", "lint_steps:make_clean", "--batches", "2"]) == 0


def test_what_the_step_prints_does_not_mix_with_the_report(capsys: pytest.CaptureFixture[str]):
    main(["lint", "--json", "--module", "lint_steps:make_clean"])
    both = capsys.readouterr()
    json.loads(both.out)
    assert "noise of the step" in both.err


def test_text_has_links_that_a_terminal_understands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(Path(__file__).parent.parent)
    monkeypatch.setenv("COLUMNS", "40")  # nothing is wrapped
    code, text = printed(capsys, "--module", "lint_steps:make_two_faults")
    lines = text.splitlines()
    at = line_of("here: second")
    assert code == 1
    assert f"lint_steps.py:{at}: breaks cuda, tape: host read: .item()" in lines
    assert "    return x.sum().item()  # here: second" in lines
    assert f"  (called from lint_steps.py:{line_of('here: called from')})" in lines
    kinds = [line.split(": ")[1].split()[0] for line in lines if line.startswith("lint_steps.py")]
    assert kinds == sorted(kinds, key=["breaks", "weakens", "information"].index)
    places = [int(line.split(":")[1]) for line in lines if ": breaks" in line]
    assert places == sorted(places)
    assert lines[-1].startswith("2 would break capture")


def test_one_recorder_alone(capsys: pytest.CaptureFixture[str]):
    arguments = ("--module", "lint_steps:waiting", "--input", "x=4x4:float32")
    assert lint(capsys, *arguments)[0] == 1
    code, result = lint(capsys, *arguments, "--recorder", "tape")
    assert (code, result["breaks"]) == (0, 0)
    (found,) = [f for f in result["findings"] if f["kind"] == "synchronisation"]
    assert found["what"] == "torch.cuda.synchronize() (cuda refuses it)"
    assert found["severity"] == "information"


def test_a_step_itself_with_inputs(capsys: pytest.CaptureFixture[str]):
    code, result = lint(
        capsys,
        *("--module", "lint_steps:takes_three"),
        *("--input", "x=6x4:float32", "--input", "ids=6:int64:2", "--input", "on=6:bool:1"),
    )
    assert code == 0, result
    assert result["batches"] == [6, 3, 2, 1]


def test_a_maker_that_takes_a_device(capsys: pytest.CaptureFixture[str]):
    for device in ("cpu", "meta"):
        code, result = lint(capsys, "--module", "lint_steps:make_on", "--device", device)
        assert (code, result["device"]) == (0, device)
    code, result = lint(capsys, "--module", "lint_steps:make_clean", "--device", "meta")
    assert (code, result["device"]) == (0, "meta")


def test_meta_says_what_it_cannot_run(capsys: pytest.CaptureFixture[str]):
    code, text = printed(capsys, "--module", "lint_steps:make_two_faults", "--device", "meta")
    assert code == 1
    assert "stopped: " in text
    assert "give --device cpu" in text
    assert text.splitlines()[-1].endswith("not linted to the end")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--module", "lint_steps"], "expected pkg.mod:callable"),
        (["--module", "no_such_module_here:make"], "cannot be imported: ModuleNotFoundError"),
        (["--module", "lint_steps:nothing"], "lint_steps has no nothing"),
        (["--module", "lint_steps:TABLE"], "expected a callable, found Tensor"),
        (["--module", "lint_steps:only_doubles"], "takes inputs; if it is a step itself"),
        (["--module", "lint_steps:make_nonsense"], "expected it to return (step, inputs)"),
        (["--module", "lint_steps:make_uneven"], "expected inputs of one number of rows"),
        (["--module", "lint_steps:make_raising"], "ZeroDivisionError at"),
        (["--module", "lint_steps:only_doubles", "--input", "x"], "expected name=shape:dtype"),
        (["--module", "lint_steps:only_doubles", "--input", "x=4xy:int64"], "the shape '4xy'"),
        (["--module", "lint_steps:only_doubles", "--input", "x=0:int64"], "the shape '0'"),
        (["--module", "lint_steps:only_doubles", "--input", "x=4:int65"], "no dtype 'int65'"),
        (["--module", "lint_steps:only_doubles", "--input", "x=4:int64:a"], "fill 'a'"),
        (["--module", "lint_steps:make_clean", "--max-batch", "4"], "belongs to --checkpoint"),
        (["--module", "lint_steps:make_clean", "--layers", "4"], "belongs to --checkpoint"),
        (["--module", "lint_steps:make_clean", "--dtype", "float16"], "belongs to --checkpoint"),
        (["--module", "lint_steps:make_clean", "--batches", "5"], "expected sizes from 1 to 4"),
        (["--checkpoint", "nowhere"], "expected the folder of a checkpoint"),
        (["--checkpoint", "nowhere", "--input", "x=4:int64"], "belongs to --module"),
    ],
)
def test_bad_arguments_are_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: Sequence[str], words: str
):
    assert main(["lint", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["--module", "a:b", "--checkpoint", "c"], ["--module", "a:b", "--batches", "0"]],
)
def test_argparse_refuses(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["lint", *arguments])
    assert stopped.value.code == 2
    assert "graphcap lint" in capsys.readouterr().err


def test_help_states_the_interface(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["lint", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for piece in ("(step, inputs) or (step, inputs, state)", "x=8x64:float32", "Exit code: 0"):
        assert piece in text


# -- graphcap's own step: no false alarm ---------------------------------------------------------

QWEN3_MOE = ModelShape.from_config(
    {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "vocab_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
    },
    "qwen3-moe-small",
)
SHAPES = {"tiny": preset("tiny"), "tiny-hybrid": preset("tiny-hybrid"), "qwen3-moe": QWEN3_MOE}


@pytest.fixture(scope="module", params=SHAPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / request.param
    dtype = torch.bfloat16 if request.param == "qwen3-moe" else torch.float32
    weights = random_weights(SHAPES[request.param], device=torch.device("cpu"), dtype=dtype, seed=0)
    save_checkpoint(weights, folder)
    return folder


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_decode_step_raises_no_alarm(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, device: str
):
    code, result = lint(capsys, "--checkpoint", str(checkpoint), "--device", device, "--strict")
    assert (code, result["findings"], result["stopped"]) == (0, [], None)
    assert result["batches"] == [8, 4, 2, 1]
    # Each layer has more than ten operations: the step was really seen.
    assert result["operations"] > 10 * SHAPES[checkpoint.name].num_layers


def test_a_fault_in_the_decode_step_is_found(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    from graphcap.decode.step import DecodeStep

    whole = DecodeStep.__call__

    def reading(self: Any, inputs: Any) -> Any:
        if inputs["positions"].max() > 1_000_000:
            raise ValueError("too long")
        return whole(self, inputs)

    monkeypatch.setattr(DecodeStep, "__call__", reading)
    code, result = lint(capsys, "--checkpoint", str(checkpoint), "--device", "cpu")
    assert code == 1
    (found,) = [f for f in result["findings"] if f["severity"] == "breaks"]
    assert (found["kind"], found["place"]["file"]) == ("control flow", __file__)


def test_the_device_of_a_checkpoint_is_chosen_by_its_size(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    code, result = lint(capsys, "--checkpoint", str(checkpoint), "--max-batch", "3")
    assert (code, result["device"], result["batches"]) == (0, "cpu", [3, 2, 1])
    assert "real weights" in result["notes"][0]
    monkeypatch.setattr(command, "_READ_UP_TO", 1)
    code, result = lint(capsys, "--checkpoint", str(checkpoint), "--layers", "1")
    assert (code, result["device"]) == (0, "meta")
    assert "were not read" in result["notes"][0]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("raise SystemExit(0)", 2),
        ("def make(): raise SystemExit(0)", 2),
        (
            "import torch\ndef step(x): raise SystemExit(0)\n"
            "def make(): return step, {'x': torch.ones(2)}",
            1,
        ),
    ],
)
def test_code_that_exits_is_not_clean(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text: str,
    code: int,
):
    (tmp_path / "module_that_exits.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "module_that_exits", raising=False)
    assert main(["lint", "--module", "module_that_exits:make"]) == code
    both = capsys.readouterr()
    assert "SystemExit" in both.out + both.err
    sys.modules.pop("module_that_exits", None)
