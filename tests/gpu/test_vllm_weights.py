"""Real vLLM on a GPU: sleep and wake-up, reloads and weights that change under the recordings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

HERE = Path(__file__).resolve().parent
CHANGES = ["start", "sleep and wake", "in place", "reload", "discard and reload", "rebind"]
VARIABLES = {
    "reference": {"GRAPHCAP": "0"},
    "v1": {"GRAPHCAP": "1", "GRAPHCAP_KERNELS": "vllm"},
    "v2": {"GRAPHCAP": "1", "GRAPHCAP_KERNELS": "vllm", "VLLM_USE_V2_MODEL_RUNNER": "1"},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sys.path.insert(0, str(HERE.parent / "hosts" / "vllm"))
    import checkpoints

    folder = tmp_path_factory.mktemp("weights")
    checkpoints.write_checkpoint(
        folder / "moe",
        "qwen3_moe",
        num_hidden_layers=4,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=128,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=2048,
    )
    running = {}
    for name, variables in VARIABLES.items():
        command = [sys.executable, str(HERE / "weights_change.py"), "--model", str(folder / "moe")]
        command += ["--eager"] if name == "reference" else []
        with (folder / f"{name}.log").open("wb") as log:
            running[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **variables}, cwd=folder
            )
    found = {}
    for name, process in running.items():
        process.wait(timeout=400)
        text = (folder / f"{name}.log").read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
        assert lines, text[-3000:]
        found[name] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_tokens_follow_the_weights(served: dict[str, Any], runner: str, change: str) -> None:
    assert served[runner][change]["tokens"] == served["reference"][change]["tokens"]


@pytest.mark.parametrize("change", ["in place", "rebind"])
def test_the_changes_are_seen_in_the_tokens(served: dict[str, Any], change: str) -> None:
    found = served["reference"]
    assert found[change]["tokens"] != found["start"]["tokens"]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_what_stays_in_place_is_replayed_and_what_is_rebound_never(
    served: dict[str, Any], runner: str
) -> None:
    found = served[runner]
    for change in CHANGES[:-1]:
        assert found[change]["replays"] > 40
        assert found[change]["fallbacks"] == {}
    assert found["rebind"]["replays"] == 0
    assert found["rebind"]["fallbacks"]["stale_recording"] > 40
