"""The environments hold what the tests of the plugin take for granted."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import environments
import pytest
import torch
from checkpoints import KINDS, is_stuck, prompts, write_checkpoint, write_config
from environments import (
    CHECKOUT,
    CPU_ENGINE,
    PRETEND_H200,
    EnvironmentUnavailable,
    ScriptFailed,
    run_script,
)

# The test run's own interpreter: for what needs no vLLM.
PYTHON = Path(sys.executable)
OWN_FOLDER = {"PYTHONPATH": str(environments.HERE)}

IMPORTS = """
import importlib, importlib.metadata
from environments import report

for name in (
    "vllm",
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.plugins",
    "vllm.compilation.cuda_graph",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.fused_moe.layer",
    "vllm.model_executor.layers.fused_moe.modular_kernel",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
    "vllm.model_executor.models.qwen3_5",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.models.qwen3_next",
    "vllm.v1.worker.gpu.cudagraph_utils",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu_worker",
):
    importlib.import_module(name)

import vllm
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

report({
    "versions": [vllm.__version__, importlib.metadata.version("vllm")],
    "classes": [
        hasattr(RunnerV1, "load_model"), hasattr(RunnerV2, "load_model"), hasattr(CudaGraphManager, "capture")
    ],
    "platform": type(current_platform).__name__,
})
"""

CONFIGURATION = """
import json, sys
from environments import report
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

current_platform.import_ir_kernels()  # as in a worker: the hash of an uncompiled model wants them

def configuration(model, **changes):
    # eight sequences of up to 256 tokens
    arguments = EngineArgs(
        model=model, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, **changes
    )
    return arguments.create_engine_config()

found = {}
for kind, model in json.loads(sys.argv[1]).items():
    stock = configuration(model)
    found[kind] = {
        "platform": [current_platform.is_cuda(), current_platform.get_device_name()],
        "architecture": stock.model_config.architecture,
        "mode": stock.compilation_config.mode,
        "cudagraph_mode": stock.compilation_config.cudagraph_mode.name,
        "sizes": stock.compilation_config.cudagraph_capture_sizes,
        "worker": stock.parallel_config.worker_cls,
        "v2": stock.use_v2_model_runner,
        "hashes": [
            stock.compute_hash(),
            configuration(model).compute_hash(),
            configuration(model, compilation_config={"mode": 0}).compute_hash(),
        ],
    }
report(found)
"""

GENERATION = """
import json, sys
from checkpoints import prompts
from environments import report
from vllm import LLM, SamplingParams

llm = LLM(
    model=sys.argv[1], dtype=sys.argv[2], skip_tokenizer_init=True, enforce_eager=True,
    max_model_len=256, max_num_seqs=4,
)
greedy = SamplingParams(temperature=0, max_tokens=64, detokenize=False)
outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts(3)], greedy, use_tqdm=False)
engine = llm.llm_engine.engine_core.engine_core
report({
    "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    "runner": type(engine.model_executor.driver_worker.worker.model_runner).__name__,
})
"""


def declared_plugins() -> dict[str, str]:
    config = configparser.ConfigParser(interpolation=None)
    config.read(CHECKOUT / "setup.cfg")
    lines = config["options.entry_points"].get("vllm.general_plugins", "").strip().splitlines()
    return dict(re.split(r"\s*=\s*", line, maxsplit=1) for line in lines)


def test_the_python_code_of_a_wheel_imports(wheel: tuple[str, Path]) -> None:
    version, python = wheel
    found = run_script(python, IMPORTS)
    assert found["versions"] == [version, version]
    assert found["classes"] == [True, True, True]
    assert found["platform"] == "UnspecifiedPlatform"


def test_a_wheel_finds_the_plugins_of_this_checkout(wheel: tuple[str, Path]) -> None:
    _, python = wheel
    found = run_script(
        python,
        """
        import importlib.metadata
        import graphcap
        from environments import report

        group = importlib.metadata.entry_points(group="vllm.general_plugins")
        report({"file": graphcap.__file__, "plugins": {point.name: point.value for point in group}})
        """,
    )
    assert Path(found["file"]) == CHECKOUT / "graphcap" / "__init__.py"
    own = "vllm.plugins.lora_resolvers.filesystem_resolver:register_filesystem_resolver"
    assert found["plugins"]["lora_filesystem_resolver"] == own
    assert declared_plugins().items() <= found["plugins"].items()


def test_a_wheel_configures_itself_for_a_pretended_h200(
    wheel: tuple[str, Path], tmp_path: Path
) -> None:
    version, python = wheel
    models = {
        kind: str(write_config(tmp_path / kind, kind)) for kind in ("qwen3_moe", "qwen3_next")
    }
    configured = run_script(python, CONFIGURATION, json.dumps(models), env=PRETEND_H200)
    assert configured.keys() == models.keys()
    for kind, found in configured.items():
        assert found["platform"] == [True, "NVIDIA H200"]
        assert found["architecture"] == KINDS[kind][1]
        assert found["mode"] == 3  # compiled
        assert found["cudagraph_mode"] == "FULL_AND_PIECEWISE"
        assert found["sizes"] == [1, 2, 4, 8, 16]
        assert found["worker"] == "vllm.v1.worker.gpu_worker.Worker"
        assert found["v2"] == (version == "0.33.0")
        same, again, other = found["hashes"]
        assert same == again != other


def test_the_cpu_engine_decodes_as_transformers_does(cpu_engine: Path, tmp_path: Path) -> None:
    # In float32: in bfloat16 the order of a sum decides between near ties.
    folder = write_checkpoint(tmp_path, "qwen3_moe", dtype="float32")
    found = run_script(cpu_engine, GENERATION, str(folder), "float32")
    assert found["runner"] == "CPUModelRunner"
    for prompt, tokens in zip(prompts(3), found["tokens"], strict=True):
        assert tokens == decode_with_transformers(folder, prompt)
        assert not is_stuck(tokens)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe"])
def test_the_cpu_engine_decodes_in_bfloat16(cpu_engine: Path, kind: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, kind)
    found = run_script(cpu_engine, GENERATION, str(folder), "bfloat16")
    for tokens in found["tokens"]:
        assert len(tokens) == 64
        assert not is_stuck(tokens)
    assert f"v{CPU_ENGINE}" in found.log


def decode_with_transformers(folder: Path, prompt: list[int]) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = model.generate(
        torch.tensor([prompt]), max_new_tokens=64, do_sample=False, pad_token_id=0
    )
    return tokens[0, len(prompt) :].tolist()


def test_a_script_reports_and_its_log_is_kept() -> None:
    found = run_script(
        PYTHON,
        """
        import os, sys
        from environments import report
        report({"first": 1})
        print("to the error stream", file=sys.stderr)
        report({"argument": sys.argv[1], "changed": os.environ["CHANGED"]})
        """,
        "word",
        env={"CHANGED": "yes", **OWN_FOLDER},
    )
    assert found == {"argument": "word", "changed": "yes"}
    assert "to the error stream" in found.log


def test_what_steers_vllm_outside_does_not_reach_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRAPHCAP", "GRAPHCAP_STRICT", "VLLM_PLUGINS", "TRITON_INTERPRET"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("UNRELATED", "1")
    found = run_script(
        PYTHON,
        "import os; from environments import report; report(dict(os.environ))",
        env={"GRAPHCAP": "given", **OWN_FOLDER},
    )
    assert found["GRAPHCAP"] == "given"
    assert found["UNRELATED"] == "1"
    assert not found.keys() & {"GRAPHCAP_STRICT", "VLLM_PLUGINS", "TRITON_INTERPRET"}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise ValueError('the cause')", r"code 1 (.|\n)*ValueError: the cause"),
        ("print('all is well')", r"reported nothing(.|\n)*all is well"),
        ("print('so far', flush=True); import time; time.sleep(60)", r"after 2 s(.|\n)*so far"),
    ],
)
def test_a_script_that_fails_shows_its_log(script: str, message: str) -> None:
    with pytest.raises(ScriptFailed, match=message):
        run_script(PYTHON, script, timeout=2)


def test_a_script_takes_along_what_it_started() -> None:
    found = run_script(
        PYTHON,
        """
        import subprocess, sys
        from environments import report
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        report({"child": child.pid})
        """,
        env=OWN_FOLDER,
    )
    deadline = time.monotonic() + 5
    while (running := is_running(found["child"])) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # killed, and not yet collected by whoever inherited it


def test_a_failed_build_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHCAP_TEST_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for _ in range(2):
        with pytest.raises(
            EnvironmentUnavailable, match=r"pip download vllm==0\.0\.0 failed: .+vllm"
        ):
            environments.wheel_environment("0.0.0")
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_one_process_builds_and_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
    import sys, time
    from pathlib import Path
    import environments

    def build(folder: Path) -> None:
        time.sleep(0.3)
        folder.mkdir()
        (folder / "who").write_text(sys.argv[1])

    print((environments._once("thing", ["key"], build) / "who").read_text())
    """
    path = tmp_path / "script.py"
    path.write_text("\n".join(line.removeprefix("    ") for line in script.splitlines()))
    variables = {**os.environ, **OWN_FOLDER, "GRAPHCAP_TEST_CACHE": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen([PYTHON, path, str(number)], env=variables, stdout=subprocess.PIPE)
        for number in range(4)
    ]
    answers = {process.communicate(timeout=60)[0] for process in processes}
    assert len(answers) == 1
    assert [process.returncode for process in processes] == [0] * 4
