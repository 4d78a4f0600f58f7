"""The tables of bench/speed.py's result in docs/measurements.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TITLES = {
    "eager": "eager",
    "torch graph": "plain torch in a CUDA graph",
    "torch.compile": "torch.compile",
    "graphcap plain": "graphcap, plain schedule",
    "graphcap": "**graphcap**",
}

_COLUMNS = (
    ("ms", "ms", ".2f"),
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("device operations", "operations", ",d"),
    ("launches", "launches", ",d"),
    ("allocations", "allocations", ",d"),
    ("TB/s", "tb_s", ".2f"),
    ("of the floor", "of_floor", ".0%"),
    ("host µs", "host_us", ",.0f"),
    ("graph MiB", "graph_mib", ".1f"),
    ("capture ms", "capture_ms", ",.0f"),
)

Result = Mapping[str, Any]


def speed_table(result: Result, name: str, vllm: Mapping[int, float], picture: str) -> str:
    """Text, plot and tables; `vllm`: milliseconds of the best of vLLM's modes by batch."""
    return "\n".join(
        [
            _introduction(result, name, vllm),
            "",
            f"![{result['shape']}: milliseconds a token against batch]({picture})",
            "",
            *overview(result, vllm),
            "",
            *_notes(result),
            "",
            "<details><summary>Every column</summary>",
            "",
            *_details(result, _ways(result)),
            "",
            "</details>",
        ]
    )


def _introduction(result: Result, name: str, vllm: Mapping[int, float]) -> str:
    machine = result["machine"]
    timed = {name: way["timed"] for row in result["rows"] for name, way in row["ways"].items()}
    eager = timed.pop("eager")
    beside = ""
    if vllm:
        beside = (
            " vLLM's best is the fastest of its own modes in another run, of the engine as a whole; "
            "graphcap's is its own step without an engine. What graphcap gains under vLLM stands in "
            "[Under vLLM](#under-vllm)."
        )
    return (
        f"Shape `{result['shape']}`, {result['layers']} layers, {result['dtype']}, "
        f"{result['weights_gib']:.0f} GiB of random weights, on one {machine['card']} (driver "
        f"{machine['driver']}, torch {machine['torch']}, Triton {machine['triton']}), commit "
        f"`{machine['commit']}`, from `bench/results/{name}`. Milliseconds a step, which is one token of "
        f"each sequence, at a context of {result['context']:,}, medians of at least {min(timed.values())} "
        f"tokens (eager: {eager}), the ways by turns in one run. The floor is what the step must read, with "
        f"the experts that its tokens chose, at the {result['read_tb_s']:.2f} TB/s of a large sum in the "
        f"same run.{beside}"
    )


def _ways(result: Result) -> list[str]:
    return [way for way in TITLES if any(way in row["ways"] for row in result["rows"])]


def overview(result: Result, vllm: Mapping[int, float]) -> list[str]:
    """The lines of the table of milliseconds; `vllm` as for `speed_table`."""
    ways = _ways(result)
    head = ["batch", "floor", *(TITLES[way] for way in ways), "tokens/s", "of the floor"]
    head += ["vLLM's best", "speed-up over it"] if vllm else []
    lines = ["| " + " | ".join(head) + " |", "|--:" * len(head) + "|"]
    for row in result["rows"]:
        usual = row["context"] == result["context"]
        ours = row["ways"].get("graphcap")
        batch = str(row["batch"]) if usual else f"{row['batch']}, context {row['context']:,}"
        cells = [batch, f"{row['floor_ms']:.2f}"]
        for way in ways:
            found = row["ways"].get(way)
            mark = "**" if way == "graphcap" and found else ""
            cells.append(f"{mark}{_cell(found, 'ms', '.2f')}{mark}")
        cells += [_cell(ours, "tokens_per_s", ",.0f"), _cell(ours, "of_floor", ".0%")]
        if vllm:
            best = vllm.get(row["batch"]) if usual else None
            cells.append("-" if best is None else f"{best:.2f}")
            cells.append("-" if best is None or ours is None else f"{best / ours['ms']:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _notes(result: Result) -> list[str]:
    lines = []
    tokens = result.get("tokens")
    if tokens is not None:
        lines.append(
            f"{tokens['equal']} of {tokens['compared']} greedy tokens of the recorded step are those of "
            f"{tokens['reference']}, given the same tokens before; where another was chosen, the "
            f"reference's leads by at most {tokens['largest_lead']:.2g} (rounding alone explains "
            f"{tokens['lead_allowed']:.2g}). Logits are off by {tokens['error']:.2g} (root mean square), "
            f"those of plain torch in {result['dtype']} by {tokens['plain_error']:.2g}."
        )
    for many in result["many"]:
        how = "one launch" if many["loop"] else "replays enqueued one by one"
        lines.append(
            f"`run_many({many['tokens']})` at batch {many['batch']} costs the host "
            f"{many['host_us_per_call']:.0f} µs a call ({how}{_host(many)}) and {many['ms']:.2f} ms a step."
        )
    compiled = [
        row["ways"]["torch.compile"] for row in result["rows"] if "torch.compile" in row["ways"]
    ]
    if compiled:
        units = sorted({way["unit"] for way in compiled})
        seconds = max(way["compile_s"] for way in compiled)
        lines.append(
            f'torch.compile(mode="reduce-overhead") of plain torch, by the {" or ".join(units)}, took up to '
            f"{seconds:.0f} s a batch; its graphs do not hold other batches."
        )
    if result["left_out"]:
        # What a message says after the finding is what to do about it.
        lines.append("Left out: " + "; ".join(x.split(";")[0] for x in result["left_out"]) + ".")
    return [part for line in lines for part in (line, "")][:-1]


def _host(many: Mapping[str, Any]) -> str:
    """What else is known of the host's part; older results hold a median of 5 calls alone."""
    if many.get("host_calls") is None:
        return ""
    found = f"; median of {many['host_calls']} calls, least {many['host_us_least']:.0f}"
    if many.get("host_us_after_idle") is not None:
        found += f", {many['host_us_after_idle']:.0f} after idle"
        found += f", {many['host_us_behind_steps']:.0f} behind a call with all its steps"
    if many.get("host_waits"):
        found += "; with a queue of whole calls the host waits for the device"
    return found


def _details(result: Result, ways: list[str]) -> list[str]:
    head = ["batch", "context", "", *(title for title, _, _ in _COLUMNS)]
    lines = ["| " + " | ".join(head) + " |", "|--:|--:|---" + "|--:" * len(_COLUMNS) + "|"]
    for row in result["rows"]:
        for way in ways:
            found = row["ways"].get(way)
            if found is None:
                continue
            cells = [_cell(found, key, form) for _, key, form in _COLUMNS]
            start = [str(row["batch"]), f"{row['context']:,}", TITLES[way]]
            lines.append("| " + " | ".join([*start, *cells]) + " |")
    return lines


def _cell(way: Mapping[str, Any] | None, key: str, form: str) -> str:
    value = None if way is None else way.get(key)
    # Less than nothing: memory that was there before was given back meanwhile, so that it tells nothing.
    return "-" if value is None or value < 0 else format(value, form)
