"""The table of bench/attention.py's result in docs/measurements.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TITLES = {
    "graphcap": "**graphcap**, whole",
    "flash": "vLLM FlashAttention, kernel alone",
    "flash, whole": "vLLM FlashAttention, whole",
    "triton": "vLLM Triton, kernel alone",
    "triton, whole": "vLLM Triton, whole",
    "sdpa": "torch SDPA, kernel alone",
}
"""Name of a way -> column, in the order of the table."""

_OF_VLLM = ("flash", "triton")

_ADDED = (
    "The same with a qkv projection before each layer's attention, of which the time of the projections "
    "alone is taken off: what attention adds to a step. graphcap's projection is its own, that of all others "
    "is cuBLAS."
)

Result = Mapping[str, Any]


def attention_table(result: Result, name: str) -> str:
    """Text and tables; a way that never ran has no column and is named below."""
    ways = [way for way in TITLES if any(way in row["ways"] for row in result["rows"])]
    titles = {way: _title(way, result) for way in ways}
    lines = [_introduction(result, name), "", *_overview(result, titles, "us")]
    if any("added_us" in way for row in result["rows"] for way in row["ways"].values()):
        lines += ["", _ADDED, "", *_overview(result, titles, "added_us")]
    for note in _notes(result):
        lines += ["", note]
    lines += ["", "<details><summary>Every column</summary>", "", *_details(result, titles)]
    return "\n".join([*lines, "", "</details>"])


def _title(way: str, result: Result) -> str:
    versions = {
        row["ways"][way]["version"]
        for row in result["rows"]
        if "version" in row["ways"].get(way, {})
    }
    version = f" {versions.pop()}" if len(versions) == 1 else ""
    return TITLES[way].replace("FlashAttention", f"FlashAttention{version}")


def _introduction(result: Result, name: str) -> str:
    machine = result["machine"]
    vllm = f", vLLM {machine['vllm']}" if machine["vllm"] else ""
    return (
        f"Attention of shape `{result['shape']}` ({result['heads']} query and {result['kv_heads']} key-value "
        f"heads of {result['head_dim']}, {result['dtype']}, blocks of 16 tokens), on one "
        f"{machine['card']} (driver {machine['driver']}, torch {machine['torch']}, Triton "
        f"{machine['triton']}{vllm}), commit `{machine['commit']}`, from `bench/results/{name}`. "
        f"Microseconds a layer, medians of {result['rounds'] * result['replays']} replays of a graph of "
        f"{result['layers']} layers, the ways by turns in one run. *Whole* is all between the output of the "
        f"qkv projection and the input of the output projection: norms of queries and keys, RoPE, cache "
        f"write and attention; *kernel alone* is attention, all else given. Every layer has keys and values "
        f"of its own, and before each replay {result['evicted_by_mib']:.0f} MiB are read, four times the "
        f"L2 cache, so that they come from memory; the projection lies in L2. graphcap's kernels start by "
        f"dependent launch while the one before ends: here the layer before, in a step the projection. The "
        f"floor is keys and values at the {result['read_tb_s']:.2f} TB/s of a large sum in the same run."
    )


def _overview(result: Result, titles: Mapping[str, str], key: str) -> list[str]:
    against = any(way in titles for way in _OF_VLLM) and "graphcap" in titles
    head = ["batch", "context", "MiB a layer", "floor", *titles.values()]
    head += ["speed-up over vLLM's faster kernel alone", "over its faster whole"] if against else []
    lines = ["| " + " | ".join(head) + " |", "|--:" * len(head) + "|"]
    for row in result["rows"]:
        found = row["ways"]
        times = {way: found[way][key] for way in titles if key in found.get(way, {})}
        cells = [str(row["batch"]), f"{row['context']:,}", f"{row['cache_mib']:.2f}"]
        cells.append(f"{row['floor_us']:.2f}")
        for way in titles:
            mark = "**" if way == "graphcap" and way in times else ""
            cells.append(f"{mark}{times[way]:.2f}{mark}" if way in times else "-")
        for suffix in ("", ", whole") if against else ():
            theirs = [times[w + suffix] for w in _OF_VLLM if w + suffix in times]
            known = theirs and "graphcap" in times
            cells.append(f"{min(theirs) / times['graphcap']:.2f}" if known else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _notes(result: Result) -> list[str]:
    notes = []
    worst = [way["off_by"] for row in result["rows"] for way in row["ways"].values()]
    if worst:
        notes.append(
            f"Held against float64 on fresh random inputs before they were timed, all are off by at most "
            f"{max(worst):.1e} of the reference's norm (allowed: {result['tolerance']:.0e})."
        )
    for title, found in (
        ("Wrong, and so not timed", result["wrong"]),
        ("Not available", _unavailable(result["unavailable"])),
        ("Left out", result["left_out"]),
    ):
        if found:
            notes.append(f"{title}: {'; '.join(found)}.")
    return notes


def _added(way: Mapping[str, Any]) -> list[str]:
    if "added_us" not in way:
        return ["-"] * 3
    return [
        f"{way['added_us']:.2f}",
        f"{way['added_low_us']:.2f} to {way['added_high_us']:.2f}",
        f"{way['projection_us']:.2f}",
    ]


def _unavailable(reasons: Mapping[str, str]) -> list[str]:
    """Ways that lack the same are named together."""
    together: dict[str, list[str]] = {}
    for way, why in reasons.items():
        together.setdefault(why, []).append(TITLES[way].replace("*", ""))
    return [f"{' and '.join(titles)} ({why})" for why, titles in together.items()]


def _details(result: Result, titles: Mapping[str, str]) -> list[str]:
    head = [
        "batch",
        "context",
        "",
        "µs",
        "medians of rounds",
        "TB/s",
        "added µs",
        "medians of rounds",
        "projection µs",
        "device operations",
        "off by",
    ]
    lines = ["| " + " | ".join(head) + " |", "|--:|--:|---" + "|--:" * (len(head) - 3) + "|"]
    for row in result["rows"]:
        for way, title in titles.items():
            found = row["ways"].get(way)
            if found is None:
                continue
            count = found["operations"]
            splits = f" ({found['splits']} splits)" if "splits" in found else ""
            cells = [
                str(row["batch"]),
                f"{row['context']:,}",
                title + splits,
                f"{found['us']:.2f}",
                f"{found['low_us']:.2f} to {found['high_us']:.2f}",
                f"{found['tb_s']:.2f}",
                *_added(found),
                "-" if count is None else f"{count:g}",
                f"{found['off_by']:.1e}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines
