"""How ``graphcap doctor --vllm`` looks on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphcap.cli.tables import console_of_terminal

_RUNNERS = {
    "v1": "first (vllm.v1.worker.gpu_model_runner)",
    "v2": "second (vllm.v1.worker.gpu.model_runner)",
}
_MIXED = {
    "full": "full graphs, recorded by graphcap",
    "piecewise": "vLLM's own compiled pieces",
    "eager": "eager",
}


def print_vllm(result: Mapping[str, Any]) -> None:
    console = console_of_terminal()
    console.print(_rows(result["machine"]))
    if result["hooks"]:
        _print_hooks(console, result["hooks"])
    model = result["model"]
    if model is not None and "choice" in model:
        table = _rows(_model_rows(model))
        table.title, table.title_justify = "for this model", "left"
        console.print(table)
    console.print("engines left to vLLM: " + escape("; ".join(result["left_to_vllm"])))
    for line in result["log"]:
        console.print(f"  | {escape(line)}", highlight=False, soft_wrap=True)
    for line in result["warnings"]:
        console.print(f"[yellow]{escape(line)}[/]")
    colour = "green" if result["takes"] else "bold red"
    console.print(f"[{colour}]{escape(result['verdict'])}[/]", highlight=False, soft_wrap=True)


def _rows(texts: Mapping[str, str]) -> Table:
    table = Table(show_header=False, box=None)
    for label, text in texts.items():
        table.add_row(label, escape(text))
    return table


def _print_hooks(console: Console, hooks: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="what the plugin needs of vLLM", title_justify="left")
    for label in ("needed for", "hook", ""):
        table.add_column(label, overflow="fold")
    for hook in hooks:
        fault = hook["fault"]
        state = "found" if fault is None else f"[bold red]missing:[/] {escape(fault)}"
        table.add_row(hook["needed_for"], escape(hook["name"]), state)
    console.print(table)


def _model_rows(model: Mapping[str, Any]) -> dict[str, str]:
    choice = model["choice"]
    rows = {"model runner": _RUNNERS[model["runner"]]}
    if model["why_not"]:
        rows["choice"] = "leave it to vLLM: " + "; ".join(model["why_not"])
        return rows
    mixed = _MIXED[choice["mixed"]]
    if choice["mixed_tokens"]:
        mixed += f", for {_sizes(choice['mixed_tokens'])} tokens"
    rows |= {
        "choice": "take the decode step",
        "decode buckets": f"{_sizes(choice['decode'])} sequences (max_num_seqs "
        f"{model['max_num_seqs']})",
        "mixed batches": mixed,
        "set by graphcap": ", ".join(choice["chosen"]) or "nothing",
        "left as it was set": ", ".join(choice["left_alone"]) or "nothing was set",
        "vLLM ends with": f"compilation mode {model['mode']}, cudagraph_mode {model['cudagraph_mode']}",
    }
    return rows


def _sizes(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
