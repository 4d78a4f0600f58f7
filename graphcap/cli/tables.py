"""How results look on a terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphcap.cli.doctor_ixformer import print_ixformer, print_kernels


def print_decode(result: Mapping[str, Any]) -> None:
    console = console_of_terminal()
    bucket, batch = result["bucket"], result["batch"]
    replays = bucket in [entry["size"] for entry in result["buckets"]]
    ran = f"replay ({result['recorder']})" if replays else "eager fallback"
    where = f"bucket {bucket}" if bucket else f"above the maximum batch {result['max_batch']}"
    console.print(
        f"{result['shape']}, {_count(result['layers'], 'layer')}, {result['dtype']}, batch {batch} "
        f"({where}) on {result['device']}"
    )
    table = Table()
    table.add_column("per token")
    table.add_column("eager", justify="right")
    table.add_column(ran, justify="right")
    eager, replay = result["eager"], result["replay"]
    for label, key in (
        ("operations", "operations_per_token"),
        ("launches", "launches_per_token"),
        ("allocations", "allocations_per_token"),
        ("host µs", "host_us_per_token"),
        ("ms", "ms_per_token"),
    ):
        if eager.get(key) is not None or replay.get(key) is not None:
            table.add_row(label, _number(eager.get(key)), _number(replay.get(key)))
    console.print(table)
    for prompt, tokens in list(zip(result["prompt_ids"], result["token_ids"], strict=True))[:4]:
        console.print(f"  {_ids(prompt, 6)} -> {_ids(tokens, 8)}", highlight=False)
    equal = "equal" if result["outputs_equal"] else "[bold red]NOT EQUAL[/]"
    console.print(
        f"{_count(result['tokens'], 'token')} for each of {_count(batch, 'sequence')}: "
        f"tokens of both ways are {equal}"
    )
    recorded = Table(title="recordings")
    recorded.title_justify = "left"
    for label in ("bucket", "operations", "KiB", "capture ms", "replays"):
        recorded.add_column(label, justify="right")
    for label in ("layers", "chosen by"):
        recorded.add_column(label)
    for entry in result["buckets"]:
        recorded.add_row(
            str(entry["size"]),
            str(entry["nodes"]),
            f"{entry['mib'] * 1024:,.0f}",
            f"{entry['capture_ms']:.1f}",
            str(entry["replays"]),
            entry["schedule"]["plan"]["layers"],
            entry["schedule"]["source"],
        )
    console.print(recorded)
    _print_reasons(console, result["buckets"])
    console.print(
        f"pool {result['pool_mib']:.2f} MiB (lower bound {result['pool_lower_bound_mib']:.2f}), "
        f"kernels: {result['kernels']['backend']}; replays are of all runs, prompts included"
    )
    if result["tokens_per_launch"] > 1:
        console.print(f"{result['tokens_per_launch']} tokens by one call")
    for note in result["notes"]:
        console.print(escape(note))
    print_kernels(console, result["kernels"]["operations"])
    for reason, steps in result["fallbacks"].items():
        console.print(f"[yellow]{_count(steps, 'step')} ran eagerly: {reason}[/]")
    if bucket is None:
        console.print("[yellow]raise --max-batch to have this batch recorded[/]")
    for size, why in result["failures"].items():
        console.print(f"[yellow]bucket {size} has no recording:[/] {escape(why)}")


def _print_reasons(console: Console, buckets: Sequence[Mapping[str, Any]]) -> None:
    """Why buckets run by their schedule, each reason once."""
    sizes: dict[str, list[str]] = {}
    for entry in buckets:
        chosen = entry["schedule"]
        reason = f"{chosen['source']}: {chosen['why']}"
        if "experts" in chosen:
            reason += f"; experts by {chosen['experts']['source']}: {chosen['experts']['why']}"
        sizes.setdefault(reason, []).append(str(entry["size"]))
    for reason, of in sizes.items():
        label = "bucket" if len(of) == 1 else "buckets"
        console.print(f"{label} {', '.join(of)}: {escape(reason)}", highlight=False)


def print_census(result: Mapping[str, Any]) -> None:
    console = console_of_terminal()
    has_nodes = result["graph_nodes"] is not None
    table = Table(
        title=f"one step of {result['shape']}, {result['layers']} layers, batch {result['batch']}",
        title_justify="left",
    )
    for label in ("operation", "implementation"):
        table.add_column(label)
    table.add_column("count", justify="right")
    if has_nodes:
        table.add_column("graph nodes", justify="right")
    table.add_column("original analysis", justify="right")
    for row in result["rows"]:
        cells = [row["operation"], row["implementation"], str(row["count"])]
        if has_nodes:
            cells.append(_number(row["nodes"]))
        table.add_row(*cells, _number(row["analysis_count"]))
    cells = ["total", "", str(result["total"])]
    if has_nodes:
        cells.append(str(result["graph_nodes"]))
    table.add_section()
    table.add_row(*cells, _number(result["analysis_total"]))
    cells = ["allocations, eager", "", str(result["allocations_per_step"])]
    table.add_row(*cells, *([""] if has_nodes else []), _number(result["analysis_allocations"]))
    console.print(table)
    if result["analysis_total"] is not None:
        console.print(
            "original analysis: what an analysis of Qwen3.6-35B-A3B under vLLM on another card counted "
            "for 64 layers. It counts attention once a step and no projections."
        )


def print_doctor(result: Mapping[str, Any]) -> None:
    console = console_of_terminal()
    table = Table(show_header=False, box=None)
    for label, text in result["machine"].items():
        table.add_row(label, str(text))
    console.print(table)
    print_kernels(console, result["kernels"])
    print_ixformer(console, result["ixformer"], result["kernels"])
    variables = Table(title="environment variables", title_justify="left")
    for label in ("variable", "value", "origin", "meaning"):
        variables.add_column(label)
    for variable in result["variables"]:
        variables.add_row(
            variable["name"], variable["value"], variable["origin"], variable["meaning"]
        )
    console.print(variables)
    for line in result["problems"]:
        console.print(f"[bold red]problem:[/] {escape(line)}")
    for line in result["warnings"]:
        console.print(f"[yellow]{escape(line)}[/]")


def console_of_terminal() -> Console:
    """As wide as the terminal; where there is none, wide enough that no cell is cut."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=110)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _ids(ids: Sequence[int], most: int) -> str:
    shown = ",".join(map(str, ids[:most]))
    return f"{shown},… ({len(ids)})" if len(ids) > most else shown


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
