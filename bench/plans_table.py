"""A packaged table of plans from a run of bench/fused_layer.py.

    python bench/plans_table.py fused.json --out graphcap/tuning/tables/h200_seed-64.json

Of every load the fastest of what the run measured on the whole model: plain, default, tuned. The digest
of the kernels is that of the commit that the run notes, read from git.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import torch

from graphcap.decode.plan_files import PlanFile, TunedBucket
from graphcap.decode.plan_json import plan_from_json
from graphcap.decode.plan_key import PlanKey, digest_of
from graphcap.decode.shapes import preset

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="JSON of bench/fused_layer.py")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    run = json.loads(options.run.read_text())
    table_of(run, digest_at(run["machine"]["commit"])).write(options.out)
    return 0


def table_of(run: dict[str, Any], kernels: str) -> PlanFile:
    machine = dict(run["machine"])
    key = PlanKey.of(preset(run["shape"]), torch.bfloat16, machine.pop("card"))
    loads: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for step in run["steps"]:
        if "failed" not in step:
            loads.setdefault((step["rows"], step["context"]), {})[step["schedule"]] = step
    buckets = []
    for load, steps in loads.items():
        best = min(steps.values(), key=lambda step: step["ms"])
        trials = [t for t in run["trials"] if (t["rows"], t["context"]) == load]
        buckets.append(
            TunedBucket(
                *load,
                plan_from_json(best["plan"]),
                best["ms"],
                steps["plain"]["ms"],
                steps["default"]["ms"],
                run["layers"],
                len(trials),
            )
        )
    return PlanFile(key, run["shape"], kernels, machine, ()).with_buckets(buckets)


def digest_at(commit: str) -> str:
    """`kernels_digest` of another commit."""

    def read(name: str) -> bytes:
        command = ["git", "show", f"{commit}:graphcap/{name}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout

    return digest_of(read)


if __name__ == "__main__":
    raise SystemExit(main())
