"""How a planned ladder looks on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from graphcap.cli.plan import shares
from graphcap.cli.tables import console_of_terminal

_WIDTH = 32
_NAMES = {"vllm": "vLLM's default", "sglang": "SGLang's default", "powers_of_two": "powers of two"}


def print_plan(result: Mapping[str, Any], counts: Mapping[int, int]) -> None:
    console = console_of_terminal()
    console.print(
        f"{result['steps']:,} decode steps of {result['batch_sizes']:,} batch sizes, up to "
        f"{result['max_batch']}, from {result['source']}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    console.print(_plot(result, counts))
    console.print(_comparison(result))
    for note in result["notes"]:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    # Plain and unwrapped, to be copied.
    console.print(result["setting"], highlight=False, markup=False, soft_wrap=True)


def _plot(result: Mapping[str, Any], counts: Mapping[int, int]) -> Table:
    """A bar for each bucket: its share of the steps."""
    table = Table(title="steps by planned bucket", title_justify="left")
    table.add_column("batches", justify="right")
    table.add_column("bucket", justify="right")
    table.add_column("", no_wrap=True)
    table.add_column("steps", justify="right")
    table.add_column("padding rows a step", justify="right")
    found = shares(result["buckets"], counts)
    most = max(share["steps"] for share in found)
    for share in found:
        first, bucket, steps = share["from"], share["bucket"], share["steps"]
        table.add_row(
            str(bucket) if first == bucket else f"{first} to {bucket}",
            str(bucket),
            "█" * round(_WIDTH * steps / most) or ("▏" if steps else ""),
            f"{100 * steps / result['steps']:.1f} %",
            f"{share['padding_rows'] / steps:.2f}" if steps else "",
        )
    return table


def _comparison(result: Mapping[str, Any]) -> Table:
    unit, bound = result["unit"], result["lower_bound"]
    table = Table(title=f"a step, expected ({result['cost_model']['text']})", title_justify="left")
    table.add_column("ladder")
    table.add_column("graphs", justify="right")
    table.add_column(unit, justify="right")
    table.add_column("above the bound", justify="right")
    table.add_column("padding rows", justify="right")

    def row(name: str, graphs: str, cost: float, padding: float) -> None:
        above = f"{100 * (cost / bound - 1):.2f} %"
        table.add_row(name, graphs, f"{cost:,.4g}", above, f"{padding:.2f}")

    padding = result["default_padding_rows_per_step"]
    row(
        "planned",
        str(len(result["buckets"])),
        result["expected_cost"],
        result["padding_rows_per_step"],
    )
    for name, cost in result["default_costs"].items():
        row(_NAMES[name], str(len(result["default_buckets"][name])), cost, padding[name])
    row("lower bound: no padding", "", bound, 0.0)
    return table
