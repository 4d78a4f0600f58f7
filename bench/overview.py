"""The README's short tables: what a newcomer asks first. The long ones are in docs/measurements.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speed_table import overview

MODES = {
    "graphcap": "**graphcap**",
    "default": "vLLM's default (compiled)",
    "decode-only": "vLLM, FULL_DECODE_ONLY, not compiled",
    "full": "vLLM, FULL, not compiled",
}
"""Columns under vLLM: what one would choose between. Eager vLLM is in the long table."""

Result = Mapping[str, Any]


def vllm_overview(result: Result, cold: Result, names: tuple[str, str]) -> str:
    """Modes of vLLM against what they give and cost, one column each.

    Args:
        result: of bench/vllm_modes.py, all modes in one run.
        cold: of bench/vllm_start.py, each engine on a card of its own, with cold caches.
        names: of the two files.
    """
    found = {mode["mode"]: mode for mode in result["modes"]}
    modes = [mode for mode in MODES if mode in found]
    starts = {mode["mode"]: mode["ready_s"] for mode in cold["modes"]}
    rows: dict[str, list[str]] = {}
    for batch in sorted({int(b) for mode in modes for b in found[mode]["batches"]}):
        rows[f"batch {batch}: ms a step (tokens/s)"] = [
            _pace(found[mode]["batches"].get(str(batch))) for mode in modes
        ]
    rows["device operations a token, batch 1"] = [
        f"{found[mode]['census']['device_operations']:,.0f}" for mode in modes
    ]
    mixed = [found[mode]["mixed"] for mode in modes]
    rows["mixed load: tokens/s"] = [f"{load['tokens_per_s']:,.0f}" for load in mixed]
    rows["first token under it, ms: p50 / p99"] = [
        f"{load['ttft_p50_ms']:,.0f} / {load['ttft_p99_ms']:,.0f}" for load in mixed
    ]
    rows["graphs, GiB"] = [f"{found[mode]['graph_gib']:.2f}" for mode in modes]
    rows["start: weights to ready, s"] = [f"{found[mode]['ready_s']:.1f}" for mode in modes]
    rows["the same with cold caches, s"] = [
        f"{starts[mode]:.1f}" if mode in starts else "-" for mode in modes
    ]
    machine = result["machine"]
    lines = [
        f"`{result['shape']}`, vLLM {machine['vllm']}, {machine['card']}, torch {machine['torch']}, Triton "
        f"{machine['triton']}, from `bench/results/{names[0]}` (commit `{machine['commit']}`), cold caches "
        f"from `bench/results/{names[1]}` (`{cold['machine']['commit']}`):",
        "",
        "| | " + " | ".join(MODES[mode] for mode in modes) + " |",
        "|---" + "|--:" * len(modes) + "|",
    ]
    lines += [f"| {title} | " + " | ".join(cells) + " |" for title, cells in rows.items()]
    return "\n".join(lines)


def _pace(row: Mapping[str, Any] | None) -> str:
    return "-" if row is None else f"{row['ms']:.2f} ({row['tokens_per_s']:,.0f})"


def speed_overview(
    result: Result, name: str, vllm: Mapping[int, float], picture: str | None
) -> str:
    """Milliseconds by batch and way, of one shape; `picture`: None leaves the plot out."""
    machine = result["machine"]
    lines = [
        f"`{result['shape']}`: {result['layers']} layers, {result['weights_gib']:.0f} GiB of weights, "
        f"context {result['context']:,}; {machine['card']}, torch {machine['torch']}, Triton "
        f"{machine['triton']}, from `bench/results/{name}` (commit `{machine['commit']}`):",
        "",
    ]
    if picture is not None:
        lines += [f"![{result['shape']}: milliseconds a token against batch]({picture})", ""]
    return "\n".join([*lines, *overview(result, vllm)])
