"""Start-up of vLLM with graphcap beside vLLM's default: caches cold, a card for each, at the same time.

python bench/vllm_start.py --layers 64 --out bench/results/vllm_start_seed-64_h200.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_modes import machine

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--modes", default="graphcap,default")
    parser.add_argument("--seconds", type=float, default=300, help="end an engine after so long")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    modes = options.modes.split(",")
    with tempfile.TemporaryDirectory() as caches:
        running = [
            start(mode, str(card), Path(caches) / mode, options.layers)
            for card, mode in enumerate(modes)
        ]
        found = [finish(process, options.seconds) for process in running]
    document = {
        "what": "start-up with cold caches, each engine on a card of its own at the same time",
        "shape": f"seed-{options.layers}",
        "tp": 1,
        "machine": machine(options.commit),
        "modes": [result for result in found if result is not None],
    }
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    for result in document["modes"]:
        print(f"{result['mode']}: ready in {result['ready_s']} s after the weights")


def start(mode: str, card: str, caches: Path, layers: int) -> subprocess.Popen[str]:
    cold = {
        "CUDA_VISIBLE_DEVICES": card,
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    command = [sys.executable, str(HERE / "vllm_engine.py"), "--mode", mode]
    command += ["--layers", str(layers), "--batches", "1", "--pairs", "1", "--tokens", "8"]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **cold},
    )


def finish(process: subprocess.Popen[str], seconds: float) -> dict[str, Any] | None:
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print("failed:\n" + text[-2000:])
        return None
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


if __name__ == "__main__":
    main()
