"""How plans, and what tuning found, look on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from graphcap.cli.tables import console_of_terminal

_SHOWN = 5  # plans of a load besides plain, default and winner


def plan_text(plan: Mapping[str, Any]) -> str:
    """A plan, as `plan_to_json` gives it, on one line."""
    parts = [str(plan["layers"])]
    for name, tile in plan.get("tiles", {}).items():
        sizes = ", ".join(f"{k} {v}" for k, v in tile.items() if k != "tile" and v is not False)
        parts.append(f"{name} ({sizes})")
    if plan.get("blas"):
        parts.append(f"cuBLAS for {', '.join(plan['blas'])}")
    if plan.get("without_pdl"):
        parts.append(f"no dependent launch of {', '.join(plan['without_pdl'])}")
    return "; ".join(parts)


def print_tuned(result: Mapping[str, Any]) -> None:
    console = console_of_terminal()
    console.print(
        f"{result['shape']}, {result['layers']} layers measured, {result['dtype']} on "
        f"{result['device']}"
    )
    console.print(escape(result["compiled"]), highlight=False)
    for load in result["loads"]:
        console.print(_table_of(load))
        failed = [row for row in load["candidates"] if "failed" in row]
        text = f"{len(load['candidates'])} plans tried"
        console.print(f"{text}, {len(failed)} failed" if failed else text)
        for why in sorted({row["failed"] for row in failed})[:3]:
            console.print(f"  {escape(why)}", highlight=False)
        if load["winner"] is None:
            console.print("[bold red]no plan works: this load keeps what it had[/]")
    console.print(f"plans are in {result['cache']}", soft_wrap=True, highlight=False)
    if result["export"]:
        console.print(f"and in {result['export']}", soft_wrap=True, highlight=False)


def _table_of(load: Mapping[str, Any]) -> Table:
    """Candidates of a load by time; each plan by its last measurement."""
    times = {plan_text(row["plan"]): row for row in load["candidates"] if "ms" in row}
    winner = None if load["winner"] is None else plan_text(load["winner"])
    by_time = sorted(times, key=lambda text: times[text]["ms"])
    others = [text for text in by_time if times[text]["knob"] != "final"]
    shown = set(by_time) - set(others[_SHOWN:])
    table = Table(title=f"{load['rows']} rows, context {load['context']}", title_justify="left")
    table.add_column("ms", justify="right")
    table.add_column("of plain", justify="right")
    table.add_column("plan")
    plain = times.get("plain")
    for text in by_time:
        if text not in shown:
            continue
        ms = times[text]["ms"]
        ratio = f"{ms / plain['ms']:.3f}" if plain else "-"
        mark = "[bold]winner[/] " if text == winner else ""
        table.add_row(f"{ms:.3f}", ratio, mark + escape(text))
    return table


def print_forecast(result: Mapping[str, Any]) -> None:
    console = console_of_terminal()
    table = Table(
        title=f"{result['shape']}, {result['layers']} layers: what would be tried of Triton's kernels",
        title_justify="left",
    )
    for label in ("rows", "context", "plans"):
        table.add_column(label, justify="right")
    table.add_column("knobs (changes)")
    table.add_column("s, an estimate", justify="right")
    for load in result["loads"]:
        knobs: dict[str, list[str]] = {}
        for schedule, name, count in load["knobs"]:
            knobs.setdefault(schedule, []).append(f"{name} {count}")
        text = "; ".join(f"{schedule}: {', '.join(names)}" for schedule, names in knobs.items())
        table.add_row(
            str(load["rows"]),
            str(load["context"]),
            str(load["plans"]),
            escape(text),
            f"{load['seconds']:.0f}",
        )
    console.print(table)
    console.print(
        f"together about {sum(load['seconds'] for load in result['loads']):,.0f} s, an estimate "
        f"without compiling; a GPU adds kernels in CUDA C++, plans it has had before and a second round; "
        f"--seconds {result['seconds_at_most']} starts no new plan after that"
    )
    console.print(f"plans would go to {result['cache']}", soft_wrap=True, highlight=False)
