"""``graphcap doctor --vllm``, with real vLLMs, with a false one, and with none."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from graphcap.cli import doctor_vllm, main
from graphcap.hosts.vllm.obstacles import OBSTACLES
from graphcap.hosts.vllm.versions import CPU_HOOKS, HOOKS

sys.path.append(str(Path(__file__).parents[1] / "hosts" / "vllm"))

from checkpoints import write_config
from environments import (
    PRETEND_H200,
    WHEELS,
    EnvironmentUnavailable,
    cpu_engine_environment,
    run_script,
    wheel_environment,
)

ENTRY = EntryPoint("graphcap", "graphcap.hosts.vllm.plugin:register", "vllm.general_plugins")


def last_line(printed: str) -> str:
    return printed.rstrip("\n").splitlines()[-1]


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the tests were installed: the entry point is there, and nothing steers vLLM."""
    monkeypatch.setattr(doctor_vllm, "entry_points", lambda group: [ENTRY])
    for name in ("VLLM_PLUGINS", "GRAPHCAP"):
        monkeypatch.delenv(name, raising=False)


# -- no vLLM -------------------------------------------------------------------------------------


@pytest.fixture
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", refuse)


@pytest.mark.usefixtures("visible", "nobody_is_asked")
def test_without_vllm_it_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(doctor_vllm, "has_vllm", lambda: False)
    assert main(["doctor", "--vllm", "--model", "any"]) == 1
    line = last_line(capsys.readouterr().out)
    assert line.startswith("graphcap does not take the decode step of any: vLLM is not installed")
    assert "pip install 'vllm-graphcap[vllm]'" in line


@pytest.mark.usefixtures("nobody_is_asked")
def test_vllm_is_left_alone_without_the_option(capsys):
    before = set(sys.modules)
    assert main(["doctor", "--json"]) in (0, 1)
    assert "takes" not in json.loads(capsys.readouterr().out)
    assert not [name for name in set(sys.modules) - before if name.split(".")[0] == "vllm"]


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--model", "any"], "--model belongs to --vllm"),
        (["--vllm", "--max-num-seqs", "4"], "--max-num-seqs belongs to --model"),
        (["--vllm", "--", "--enable-lora"], "--enable-lora belongs to --model"),
        (["something"], "something belongs to --model"),
    ],
)
def test_options_without_the_one_they_belong_to(capsys, arguments, needed):
    assert main(["doctor", *arguments]) == 2
    assert needed in capsys.readouterr().err


# -- a false vLLM --------------------------------------------------------------------------------

LOADS = "def load_general_plugins():\n    from graphcap.hosts.vllm.plugin import register\n    register()\n"
CUDA = """
    class _Platform:
        device_type = "cuda"
        def get_device_name(self):
            return "A card"
        def get_device_capability(self):
            return None
    current_platform = _Platform()
"""


@pytest.fixture
def false_vllm(
    visible: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    def make(init: str, **modules: str) -> None:
        package = tmp_path / "vllm"
        package.mkdir()
        for name, text in {"__init__": init, **modules}.items():
            (package / f"{name}.py").write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(tmp_path)

    return make


def examined(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Of a false vLLM, which is never taken."""
    assert main(["doctor", "--vllm", "--json"]) == 1
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert result["takes"] is False
    return result


def test_a_version_outside_the_window(false_vllm, capsys):
    false_vllm("__version__ = '0.7.3'")
    result = examined(capsys)
    assert result["machine"]["vLLM"] == "0.7.3, outside the window 0.6.3 and 0.26 to 0.33"
    assert "vLLM 0.7.3 is outside the versions that graphcap is made for" in result["verdict"]
    assert result["hooks"] == []


def test_missing_hooks_are_named(false_vllm, capsys):
    false_vllm("__version__ = '0.33.0'", platforms=CUDA, plugins=LOADS)
    assert main(["doctor", "--vllm"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "cuda: A card" in printed
    assert printed.count("missing:") == len(HOOKS)
    result = examined(capsys)
    assert [hook["name"] for hook in result["hooks"]] == [f"{h.module}.{h.path}" for h in HOOKS]
    assert result["hooks"][0]["fault"].startswith("vllm.config cannot be imported")
    assert "vllm.config cannot be imported" in result["verdict"]


def test_a_vllm_that_cannot_be_imported(false_vllm, capfd):
    false_vllm(
        """
        import os, sys
        print("chatter"), print("chatter", file=sys.stderr), os.write(1, b"chatter")
        raise ImportError("libcuda.so.1: cannot open shared object file")
        """
    )
    result = examined(capfd)
    assert result["problems"] == [
        "vLLM cannot be asked: ImportError: libcuda.so.1: cannot open shared object file"
    ]


def test_a_vllm_that_takes_the_process_with_it(false_vllm, capfd):
    false_vllm("import os\nprint('first')\nprint('last words', flush=True)\nos._exit(7)")
    result = examined(capfd)
    assert result["log"] == ["first", "last words"]
    assert result["verdict"].endswith("ended with code 7; its last line: last words")


def test_a_name_that_looks_like_an_option_reaches_the_one_that_is_asked(false_vllm, capfd):
    false_vllm("import sys\nraise ImportError(' '.join(sys.argv))")
    assert main(["doctor", "--vllm", "--model=-m", "--json"]) == 1
    (problem,) = json.loads(capfd.readouterr().out)["problems"]
    assert problem.startswith("vLLM cannot be asked: ImportError: ")
    assert problem.endswith("--model=-m")


def test_a_plugin_that_vllm_does_not_load(false_vllm, capsys):
    """Its entry point is there, and loading it fails inside vLLM, which only logs that."""
    quiet = "def load_general_plugins():\n    print('Failed to load plugin graphcap')\n"
    false_vllm("__version__ = '0.33.0'", platforms=CUDA, plugins=quiet)
    result = examined(capsys)
    assert result["problems"][0].startswith("vLLM found the entry point and could not load it")
    assert "Failed to load plugin graphcap" in result["log"]


def test_no_entry_point(false_vllm, monkeypatch, capsys):
    false_vllm("__version__ = '0.7.3'")
    monkeypatch.setattr(doctor_vllm, "entry_points", lambda group: [])
    result = examined(capsys)
    assert result["machine"]["entry point"] == "not found"
    assert result["problems"][0].startswith(
        "this Python has no entry point graphcap in the group vllm.general_plugins"
    )


def test_a_variable_that_is_not_accepted(visible, nobody_is_asked, monkeypatch, capsys):
    monkeypatch.setattr(doctor_vllm, "has_vllm", lambda: True)
    monkeypatch.setenv("GRAPHCAP_BUCKETS", "many")
    assert main(["doctor", "--vllm"]) == 1
    assert "GRAPHCAP_BUCKETS: expected auto, or positive" in last_line(capsys.readouterr().out)


# -- real vLLMs ----------------------------------------------------------------------------------

SCRIPT = """
    import contextlib, io, json, os, sys
    from environments import report
    from graphcap.cli import main

    found = {}
    for name, (arguments, variables) in json.loads(sys.argv[1]).items():
        before = dict(os.environ)
        os.environ.update(variables)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = main(["doctor", "--vllm", *arguments])
        found[name] = [code, printed.getvalue()]
        os.environ.clear()
        os.environ.update(before)
    report(found)
"""

Case = tuple[list[str], dict[str, str]]


def ask(
    environment: Callable[[], Path], cases: dict[str, Case], variables: dict[str, str]
) -> dict[str, Any]:
    """Name -> (exit code, what was printed), of all `cases` in one process of `environment`."""
    try:
        python = environment()
    except EnvironmentUnavailable as reason:
        pytest.skip(str(reason))
    return run_script(python, SCRIPT, json.dumps(cases), env=variables, timeout=600)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Kind of model -> folder with its configuration."""
    root = tmp_path_factory.mktemp("models")
    kinds = {kind: write_config(root / kind, kind) for kind in ("qwen3_moe", "qwen3_next")}
    kinds["classifier"] = write_config(
        root / "classifier", "qwen3", architectures=["Qwen3ForSequenceClassification"]
    )
    return {kind: str(folder) for kind, folder in kinds.items()}


@pytest.fixture(scope="module", params=WHEELS)
def on_h200(request: pytest.FixtureRequest, folders: dict[str, str]) -> dict[str, Any]:
    arguments = ["--json", "--model", folders["qwen3_moe"], "--max-num-seqs", "12"]
    found = ask(lambda: wheel_environment(request.param), {"moe": (arguments, {})}, PRETEND_H200)
    return {"version": request.param, **found}


@pytest.fixture(scope="module")
def on_oldest(folders: dict[str, str]) -> dict[str, Any]:
    """What does not depend on the version."""
    cases: dict[str, Case] = {
        "text": (["--model", folders["qwen3_next"]], {"GRAPHCAP": "1"}),
        "classifier": (["--model", folders["classifier"]], {}),
        "kept out": (
            ["--json", "--model", "/no/such/model"],
            {"VLLM_PLUGINS": "graphcap_test_platform,other"},
        ),
        "served": (
            ["--model", folders["qwen3_moe"], "--", "--max-model-len", "64", "--port", "8001"],
            {"GRAPHCAP": "1"},
        ),
        "two ranks": (["--model", folders["qwen3_moe"], "--", "-tp", "2"], {}),
        "lora": (["--model", folders["qwen3_moe"], "--", "--enable-lora"], {}),
        "refused": (["--model", folders["qwen3_moe"], "--", "--max-num-seqs", "many"], {}),
        "no device": ([], {n: "none" for n in PRETEND_H200 if n != "CUDA_VISIBLE_DEVICES"}),
    }
    return ask(lambda: wheel_environment(WHEELS[0]), cases, PRETEND_H200)


def test_an_engine_on_an_h200(on_h200):
    code, printed = on_h200["moe"]
    result = json.loads(printed)  # vLLM's own lines are not among them
    machine, model = result["machine"], result["model"]
    assert (code, result["takes"], result["problems"]) == (0, True, [])
    assert machine["vLLM"] == f"{on_h200['version']}, inside the window 0.6.3 and 0.26 to 0.33"
    assert machine["entry point"].startswith(
        "graphcap.hosts.vllm.plugin:register, of vllm-graphcap"
    )
    assert machine["VLLM_PLUGINS"] == "unset: every plugin loads"
    assert machine["platform"] == "cuda: NVIDIA H200, compute capability 9.0"
    assert machine["recorder"].startswith("cuda")
    assert machine["MoE layers"] == "MoE layers registered"
    assert machine["metrics"].endswith("shown at vLLM's /metrics endpoint")
    assert [hook["fault"] for hook in result["hooks"]] == [None] * len(HOOKS)
    assert result["parts"]["v1"] == result["parts"]["v2"] == "installed"
    assert result["left_to_vllm"] == [name for name, _ in OBSTACLES]
    assert model["choice"]["taken"] is True
    assert model["choice"]["decode"] == [1, 2, 4, 8, 12]
    assert model["choice"]["mixed"] == "full"
    assert model["cudagraph_mode"] == "FULL"
    assert model["runner"] == ("v1" if on_h200["version"] == "0.26.0" else "v2")


def test_off_is_said_and_is_no_obstacle(on_h200):
    result = json.loads(on_h200["moe"][1])
    assert result["enabled"] is False
    assert result["machine"]["GRAPHCAP"] == "off; GRAPHCAP=1 turns the plugin on"
    assert result["verdict"].endswith("once GRAPHCAP=1 is set")


def test_the_choice_in_words(on_oldest):
    code, printed = on_oldest["text"]
    words = " ".join(printed.split())
    assert code == 0
    assert "GRAPHCAP 1 " in words
    assert "mixed batches vLLM's own compiled pieces" in words  # it has linear attention
    assert "set by graphcap cudagraph_capture_sizes" in words
    assert "left as it was set nothing was set" in words
    assert "speculative decoding; LoRA adapters; pipeline parallelism" in words
    assert last_line(printed).startswith("graphcap takes the decode step of ")
    assert last_line(printed).endswith("qwen3_next")


def test_a_model_that_is_left_to_vllm(on_oldest):
    code, printed = on_oldest["classifier"]
    assert code == 1
    assert "leave it to vLLM: a pooling model" in " ".join(printed.split())
    assert last_line(printed).startswith("graphcap does not take the decode step of ")
    assert last_line(printed).endswith(": a pooling model")


def test_options_of_the_engine_are_asked_about(on_oldest):
    code, printed = on_oldest["served"]
    assert code == 0
    assert "no options of an engine, left out: --port 8001" in " ".join(printed.split())
    code, printed = on_oldest["lora"]
    assert code == 1
    assert last_line(printed).endswith(": LoRA adapters")


def test_an_option_that_vllm_refuses_is_told_in_its_words(on_oldest):
    code, printed = on_oldest["two ranks"]  # on a machine with one card
    assert code == 1
    assert "World size (2) is larger than the number of available GPUs" in last_line(printed)
    code, printed = on_oldest["refused"]
    assert code == 1
    assert "vLLM makes no configuration for" in last_line(printed)
    assert "--max-num-seqs" in last_line(printed)
    assert "many" in last_line(printed)


def test_kept_out_by_vllm_plugins_and_a_model_that_is_not_there(on_oldest):
    code, printed = on_oldest["kept out"]
    result = json.loads(printed)
    assert code == 1
    plugins, model = result["problems"]
    assert plugins == (
        "VLLM_PLUGINS=graphcap_test_platform,other keeps the plugin out; add graphcap to it, or "
        "unset it"
    )
    assert model.startswith("vLLM makes no configuration for /no/such/model: ")
    assert "[type=" not in model
    assert {hook["fault"] for hook in result["hooks"]} == {None}  # the rest is told all the same


def test_no_device(on_oldest):
    code, printed = on_oldest["no device"]
    assert code == 1
    assert last_line(printed).startswith(
        "graphcap does not take an engine here: vLLM finds no device that graphcap serves"
    )


@pytest.fixture(scope="module")
def on_a_cpu(folders: dict[str, str]) -> dict[str, Any]:
    arguments = ["--json", "--model", folders["qwen3_moe"], "--max-num-seqs", "6"]
    cases: dict[str, Case] = {
        "moe": (arguments, {"GRAPHCAP_KERNELS": "vllm"}),
        "cuda recorder": (["--json"], {"GRAPHCAP_RECORDER": "cuda"}),
    }
    return ask(cpu_engine_environment, cases, {})


def test_an_engine_on_a_cpu(on_a_cpu):
    code, printed = on_a_cpu["moe"]
    result = json.loads(printed)
    assert (code, result["problems"]) == (0, [])
    assert result["machine"]["platform"].startswith("cpu")
    assert result["machine"]["recorder"] == "tape"
    assert result["machine"]["kernels"] == "vLLM's own: GRAPHCAP_KERNELS=vllm"
    assert [hook["fault"] for hook in result["hooks"]] == [None] * len(HOOKS + CPU_HOOKS)
    assert result["parts"]["cpu"] == "installed"
    assert result["model"]["choice"]["decode"] == [1, 2, 4, 6]
    assert result["model"]["choice"]["mixed"] == "full"
    assert result["model"]["choice"]["recorder"] == "tape"


def test_a_recorder_that_is_not_to_be_had(on_a_cpu):
    code, printed = on_a_cpu["cuda recorder"]
    assert code == 1
    assert "the cuda recorder was asked for" in json.loads(printed)["verdict"]
