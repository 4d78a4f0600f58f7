"""What ``graphcap doctor`` says about kernels: which operation runs on which, and the ixformer found."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from graphcap.errors import BackendError

if TYPE_CHECKING:
    from rich.console import Console

    from graphcap.moe.kernels import Backend
    from graphcap.operations import KernelChoice

VENDOR_VARIABLES = (
    "VLLM_ENFORCE_CUDA_GRAPH",
    "ENABLE_MOE_GROUP_GEMV",
    "IXFORMER_DISABLE_SYNC",
    "IXFORMER_PAGED_ATTENTION_ALGO",
    "IXFORMER_GEMV_THRESHOLD",
    "NCCL_FORCESYNC_DISABLE",
    "IX_VISIBLE_DEVICES",
)
"""Variables of CoreX and its vLLM that change what is captured; shown where they are set."""


def ixformer_rows(environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """The ixformer that can be imported; None where there is none.

    Generation, version, import path, the operations that are bound and those that fall back with the
    reason, and the variables of CoreX that are set. Where an ixformer is there and cannot be used,
    ``problem`` says why and there are no operations.
    """
    from graphcap.moe.kernels import has_ixformer

    if not has_ixformer():
        return None
    from graphcap.decode.kernels import decode_kernels
    from graphcap.moe.kernels import Backend
    from graphcap.moe.kernels.ixformer_library import load_library

    variables = {name: environ[name] for name in VENDOR_VARIABLES if name in environ}
    try:
        library = load_library()
    except BackendError as error:
        return {"problem": str(error), "operations": [], "variables": variables}
    # What stands in does not change what is bound, and the reference can be imported everywhere.
    choices = decode_kernels(Backend("ixformer", "doctor")).choices()
    return {
        "generation": library.generation,
        "version": library.version,
        "path": library.path,
        "operations": [
            {
                "operation": choice.operation,
                "ixformer": choice.kernel.removeprefix("ixformer: ") if is_bound(choice) else None,
                "why": choice.note,
            }
            for choice in choices
            if is_bound(choice) or choice.note
        ],
        "variables": variables,
    }


def is_bound(choice: KernelChoice) -> bool:
    return choice.kernel.startswith("ixformer: ")


def kernel_rows(backend: Backend | None) -> list[dict[str, str]]:
    """Which kernel each operation of graphcap's decode step would run on with the chosen backend."""
    if backend is None:
        return []
    from graphcap.decode.kernels import decode_kernels

    return [asdict(choice) for choice in decode_kernels(backend).choices()]


def print_kernels(console: Console, rows: Sequence[Mapping[str, str]]) -> None:
    """Only where a backend lacks an operation: else its name says it all."""
    from rich.table import Table

    if not any(row["note"] for row in rows):
        return
    table = Table(title="kernels", title_justify="left")
    for label in ("operation", "runs on", "because"):
        table.add_column(label)
    for row in rows:
        table.add_row(row["operation"], row["kernel"], row["note"])
    console.print(table)


def print_ixformer(
    console: Console, found: Mapping[str, Any] | None, rows: Sequence[Mapping[str, str]]
) -> None:
    """What was found; its operations where they are not in `rows`, the kernels that were chosen."""
    from rich.markup import escape
    from rich.table import Table

    if found is None:
        return
    if "problem" in found:
        console.print(f"[bold red]ixformer:[/] {escape(found['problem'])}")
        return
    version = found["version"] or "of unknown version"
    title = f"ixformer {version}, generation {found['generation']} ({found['path']})"
    if any(row["kernel"].startswith("ixformer: ") for row in rows):
        console.print(title)
        return
    table = Table(title=f"{title}, not chosen", title_justify="left")
    for label in ("operation", "bound to", "falls back because"):
        table.add_column(label)
    for row in found["operations"]:
        table.add_row(row["operation"], row["ixformer"] or "-", row["why"])
    console.print(table)
