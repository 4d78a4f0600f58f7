"""Writes the README's measured tables from the JSON files in bench/results.

python bench/tables.py            rewrite README.md between its markers
python bench/tables.py --check    exit code 1 if README.md is not what the files say
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def decode_table(result: dict[str, Any], name: str) -> str:
    machine, capture = result["machine"], result["capture"]
    lines = [
        f"Shape `{result['shape']}`, {result['layers']} layers, {result['dtype']}, "
        f"{result['weights_gib']:.0f} GiB of weights, on one {machine['card']} (driver "
        f"{machine['driver']}, torch {machine['torch']}, Triton {machine['triton']}), commit "
        f"`{machine['commit']}`, from `bench/results/{name}`:",
        "",
        "| batch | eager: ms | launches | allocations | replay: ms | launches | allocations "
        "| graph nodes | host µs | after idle | tokens equal |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in result["batches"]:
        eager, replay = row["eager"], row["replay"]
        equal = "yes" if row["tokens_equal"] else "no"
        lines.append(
            f"| {row['batch']} | {eager['ms']:.2f} | {eager['launches']:,} "
            f"| {eager['allocations']:,} | **{replay['ms']:.2f}** | **{replay['launches']}** "
            f"| **{replay['allocations']}** | {replay['operations']:,} "
            f"| {replay['host_us']:.1f} | {replay['host_us_after_idle']:.1f} "
            f"| {equal} ({row['tokens_compared']}) |"
        )
    sizes = ", ".join(str(bucket["size"]) for bucket in capture["buckets"])
    memory = ", ".join(f"{bucket['mib']:.0f}" for bucket in capture["buckets"])
    times = ", ".join(f"{bucket['capture_ms']:.0f}" for bucket in capture["buckets"])
    lines += [
        "",
        f"Capturing buckets {sizes} took {capture['seconds']:.1f} s with warm-up and verification; "
        f"recording each took {times} ms and {memory} MiB. The pool has "
        f"{capture['pool_mib']:.2f} MiB (lower bound {capture['pool_lower_bound_mib']:.2f}).",
    ]
    return "\n".join(lines)


def measured() -> str:
    parts = []
    for path in sorted((ROOT / "bench" / "results").glob("decode_*.json")):
        parts.append(decode_table(json.loads(path.read_text()), path.name))
    return "\n\n".join(parts)


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    wanted = f"{head}{BEGIN}\n{measured()}\n{END}{tail}"
    if "--check" in sys.argv:
        return 0 if wanted == text else 1
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
