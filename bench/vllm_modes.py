"""vLLM with graphcap beside vLLM's own modes, one after the other on one card; see vllm_engine.py.

python bench/vllm_modes.py --layers 64 --out bench/results/vllm_seed-64_h200.json
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import machine as any_machine

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--modes", default="graphcap,decode-only,full,default,eager")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument(
        "--backend",
        default="TRITON_ATTN",
        help="of attention, in every mode: TRITON_ATTN, FLASH_ATTN",
    )
    parser.add_argument("--no-mixed", action="store_true")
    parser.add_argument("--seconds", type=float, default=560, help="start no mode after so long")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    document: dict[str, Any] = {
        "what": "vLLM's modes and graphcap, same weights, one run",
        "shape": f"seed-{options.layers}",
        "tp": options.tp,
        "backend": options.backend,
        "machine": machine(options.commit),
        "modes": [],
    }
    began = time.perf_counter()
    for mode in options.modes.split(","):
        if time.perf_counter() - began > options.seconds:
            print("no time left for", mode)
            break
        command = [sys.executable, str(HERE / "vllm_engine.py"), "--mode", mode]
        command += ["--layers", str(options.layers), "--tp", str(options.tp)]
        command += ["--backend", options.backend]
        if mode == "eager":  # slow, and only a yardstick
            command += ["--batches", "1", "--pairs", "1", "--tokens", "32"]
        else:
            command += ["--batches", options.batches, "--census"]
        if not options.no_mixed:
            command += ["--mixed"]
        found = _run(command, mode, options.out)
        if found is None:
            break  # nothing to compare
        document["modes"].append(found)
        if options.out is not None:  # after each mode: a run that is cut short keeps what it has
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    print_table(document)
    print_tokens(document)


def _run(command: list[str], mode: str, out: Path | None) -> dict[str, Any] | None:
    began = time.perf_counter()
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    print(f"{mode}: {time.perf_counter() - began:.0f} s", flush=True)
    if out is not None:
        out.with_name(f"{out.stem}_{mode}.log").write_text(run.stdout + run.stderr)
    if not lines:
        print(f"{mode} failed:\n" + (run.stdout + run.stderr)[-1500:], flush=True)
        return None
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


def machine(commit: str) -> dict[str, Any]:
    return any_machine(commit, vllm=_vllm_version())


def _vllm_version() -> str:
    """Read and not imported, which takes as long as starting an engine."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        raise SystemExit(
            "vLLM is not installed here: expected a Python that can import it, found none"
        )
    text = (Path(found.origin).parent / "_version.py").read_text()
    match = re.search(r"^__version__ = version = '([^']+)'", text, re.M)
    assert match is not None
    return match[1]


def print_tokens(document: dict[str, Any]) -> None:
    """How many greedy tokens of each mode are those of eager vLLM, and the gap where they part."""
    by_mode = {run["mode"]: run for run in document["modes"]}
    eager = by_mode.get("eager")
    for mode, run in by_mode.items():
        if eager is None or run is eager:
            continue
        pairs = zip(eager["tokens"], run["tokens"], strict=True)
        parted = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        if parted is None:
            print(f"{mode}: all {len(run['tokens'])} tokens are eager's")
        else:
            print(
                f"{mode}: parts at token {parted}, where eager's gap is {eager['gaps'][parted]:.4f}"
            )


def print_table(document: dict[str, Any]) -> None:
    for run in document["modes"]:
        cells = [f"{run['mode']:12s} ready {run['ready_s']} s, graphs {run['graph_gib']} GiB"]
        for batch, row in run["batches"].items():
            cells.append(f"b{batch}: {row['ms']:.3f} ms ({row['tokens_per_s']:.0f}/s)")
        if "mixed" in run:
            row = run["mixed"]
            cells.append(
                f"mixed {row['tokens_per_s']:.0f}/s ttft {row['ttft_p50_ms']:.0f}/"
                f"{row['ttft_p99_ms']:.0f} ms"
            )
        if "census" in run:
            cells.append(f"calls {run['census']['host_calls']}")
            cells.append(f"device {run['census']['device_operations']:.0f} operations")
        print("; ".join(cells), flush=True)


if __name__ == "__main__":
    main()
