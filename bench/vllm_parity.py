"""How far vLLM's own modes and graphcap agree token by token, on 64 requests that arrive over time.

    python bench/vllm_parity.py --out bench/results/parity_qwen3-moe_h200.json

A small Qwen3-MoE checkpoint with random weights is written for the run. Every mode is held against eager
vLLM: requests that came out the same, tokens that agreed before a request parted, and how near a tie the
two best logits of eager vLLM were where it did (in logits, whose bfloat16 steps there are 1/16).
vLLM's compiled default is the yardstick: it parts from eager vLLM as well, since its kernels round otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from vllm_modes import machine

HOSTS = Path(__file__).resolve().parent.parent / "tests" / "hosts" / "vllm"
ON = {"GRAPHCAP": "1"}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
MODES: dict[str, tuple[list[str], dict[str, str]]] = {
    "eager": (["--eager"], {}),
    "default": ([], {}),
    "graphcap": ([], ON),
    "graphcap, second runner": ([], {**ON, **V2}),
    "graphcap, vLLM's kernels": ([], {**ON, "GRAPHCAP_KERNELS": "vllm"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        running = {mode: start(folder, mode) for mode in MODES}
        found = {mode: finish(folder, mode, run, options.seconds) for mode, run in running.items()}
    reference = found.pop("eager")
    document = {
        "what": "tokens of vLLM's modes and of graphcap beside eager vLLM's",
        "machine": machine(options.commit),
        "modes": [compared(mode, result, reference) for mode, result in found.items()],
    }
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    for row in document["modes"]:
        print(row)


def write_model(folder: Path) -> None:
    sys.path.insert(0, str(HOSTS))
    import checkpoints

    checkpoints.write_checkpoint(
        folder,
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


def start(folder: Path, mode: str) -> subprocess.Popen[bytes]:
    words, variables = MODES[mode]
    command = [sys.executable, str(HOSTS / "arrivals.py"), "--model", str(folder / "model")]
    command += ["--requests", "64", "--tokens", "128", "--max-seqs", "32"]
    command += ["--longest-prompt", "200", "--vocab", "2048", "--logprobs"]
    command += ["--backend", "TRITON_ATTN", "--engine", '{"kv_cache_memory_bytes": 2000000000}']
    with (folder / f"{mode}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *words],
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, "GRAPHCAP": "0", **variables},
        )


def finish(folder: Path, mode: str, run: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
    try:
        run.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        run.kill()
    text = (folder / f"{mode}.log").read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"{mode} failed:\n{text[-2000:]}")
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


def compared(mode: str, result: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    gaps, agreed, equal = [], 0, 0
    rows = zip(result["tokens"], reference["tokens"], reference["gaps"], strict=True)
    for mine, theirs, ties in rows:
        parted = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None
        )
        if parted is None:
            equal += 1
            agreed += len(mine)
        else:
            agreed += parted
            gaps.append(ties[parted])
    gaps.sort()
    return {
        "mode": mode,
        "requests": len(result["tokens"]),
        "requests_equal": equal,
        "tokens": sum(map(len, result["tokens"])),
        "tokens_agreed_before_parting": agreed,
        "median_gap": median(gaps) if gaps else None,
        "largest_gap": gaps[-1] if gaps else None,
        "gaps": gaps,
    }


if __name__ == "__main__":
    main()
