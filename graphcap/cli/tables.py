"""How results look on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def print_decode(result: Mapping[str, Any]) -> None:
    console = Console()
    bucket = result["bucket"]
    served = f"bucket {bucket}" if bucket else f"above the maximum {result['max_batch']}: eager"
    table = Table(
        title=f"{result['shape']}, {result['layers']} layers, {result['dtype']}, batch "
        f"{result['batch']} ({served}) on {result['device']}",
        title_justify="left",
    )
    table.add_column("per token")
    table.add_column("eager", justify="right")
    table.add_column(f"replay ({result['recorder']})", justify="right")
    eager, replay = result["eager"], result["replay"]
    for label, key in (
        ("operations", "operations_per_token"),
        ("launches", "launches_per_token"),
        ("allocations", "allocations_per_token"),
        ("host µs", "host_us_per_token"),
        ("ms", "ms_per_token"),
    ):
        table.add_row(label, _number(eager.get(key)), _number(replay.get(key)))
    console.print(table)
    equal = "equal" if result["outputs_equal"] else "[bold red]NOT EQUAL[/]"
    console.print(
        f"{result['tokens']} tokens for each of {result['batch']} sequences: replayed and eager "
        f"tokens are {equal}"
    )
    recorded = Table(title="recordings", title_justify="left")
    for label in ("bucket", "operations", "MiB", "capture ms", "replays"):
        recorded.add_column(label, justify="right")
    for entry in result["buckets"]:
        recorded.add_row(
            str(entry["size"]),
            str(entry["nodes"]),
            f"{entry['mib']:.2f}",
            f"{entry['capture_ms']:.1f}",
            str(entry["replays"]),
        )
    console.print(recorded)
    console.print(
        f"pool {result['pool_mib']:.2f} MiB (lower bound {result['pool_lower_bound_mib']:.2f}), "
        f"kernels: {result['kernels']['backend']}, fallbacks: {result['fallbacks'] or 'none'}"
    )
    for size, why in result["failures"].items():
        console.print(f"[yellow]bucket {size} has no recording:[/] {why}", markup=True)


def print_census(result: Mapping[str, Any]) -> None:
    console = Console()
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


def print_doctor(result: Mapping[str, Any]) -> None:
    console = Console()
    table = Table(show_header=False, box=None)
    for label, text in result["machine"].items():
        table.add_row(label, str(text))
    console.print(table)
    variables = Table(title="environment variables", title_justify="left")
    for label in ("variable", "value", "origin", "meaning"):
        variables.add_column(label)
    for variable in result["variables"]:
        variables.add_row(
            variable["name"], variable["value"], variable["origin"], variable["meaning"]
        )
    console.print(variables)
    for line in result["warnings"]:
        console.print(f"[yellow]{line}[/]")


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
