"""Launches per token before and after, and the launch table beside the original analysis."""

from __future__ import annotations

import re
from collections.abc import Iterator

from graphcap.analysis import ANALYSIS, ANALYSIS_ALLOCATIONS, ANALYSIS_LAYERS, ANALYSIS_TOTAL
from graphcap.page.pictures import launches_chart
from graphcap.page.run import Census, Recordings, Row, Run
from graphcap.page.tables import Cell, absent, named, note, table
from graphcap.page.text import ABSENT, escaped, number

_MOST_KERNELS = 40

_STANDARD = (
    ("fused_add_rms_norm", r"(\w+_)?fused_add_rms_norm"),
    ("rms_norm", r"(vllm_)?rms_norm"),
    ("rotary_embedding", r"(vllm_|batched_)?rotary_embedding(_neox)?"),
    ("attention", r"unified_attention(_with_output)?|(vllm_)?paged_attention(_v[12])?"),
    ("silu_and_mul", r"silu_and_mul"),
    ("topk_softmax", r"(vllm_)?(moe_)?topk_softmax"),
    ("moe_align_block_size", r"(vllm_)?moe_align_block_size"),
    ("merge", r"moe_sum"),
)
"""Row of the analysis -> what a host's own operator for it is called, without namespace and overload."""


def per_token(run: Run) -> str:
    """Section: launches, allocations and times of one token, both ways."""
    before, after = run.before, run.after
    parts = [launches_chart(before, after)]
    if run.kind == "decode" and before is not None and after is not None:
        rows: list[list[Cell]] = [
            [label, number(one), number(two)]
            for label, one, two in (
                ("launches", before.launches, after.launches),
                ("operations", before.operations, after.operations),
                ("allocations", before.allocations, after.allocations),
                ("host µs", before.host_us, after.host_us),
                ("ms", before.ms, after.ms),
            )
            if one is not None or two is not None
        ]
        parts.append(table(["per token", before.name, after.name], rows))
    else:
        parts.append(
            note(
                "The eager step was not counted in this report. What stands for it is the number of "
                "operations in the recording: run eagerly, each of them is a launch."
            )
            if before is not None
            else absent("the operations of a step: no bucket is recorded.")
        )
    return "".join(parts)


def standard(operation: str) -> str:
    """The row of the analysis that `operation` belongs to; `operation` itself where there is none."""
    if operation in ANALYSIS:
        return operation
    bare = operation.split("::")[-1].removesuffix(".default").split(".")[-1]
    return next((row for row, pattern in _STANDARD if re.fullmatch(pattern, bare)), operation)


def launch_table(run: Run) -> str:
    """Section: calls of one replayed step by operation; what was analysed is the decode step, so that of
    mixed batches is folded away."""
    decode, *others = run.recordings
    folded = (
        f"<details><summary>The step of {escaped(r.kind)} batches</summary>{_of(run, r)}</details>"
        for r in others
    )
    return _of(run, decode) + "".join(folded)


def _of(run: Run, recordings: Recordings) -> str:
    census = recordings.census
    if census is None:
        return absent("the operations of a step: no recording serves this batch, or it is old.")
    layers = run.layers
    has_nodes = any(row.nodes is not None for row in census.rows)
    per_layer = layers is not None and layers != ANALYSIS_LAYERS
    columns = ["operation", "this run"]
    columns += ["graph nodes"] if has_nodes else []
    columns += ["original analysis"]
    columns += ["per layer here", "there"] if per_layer else []

    def cells(name: Cell, count: int, nodes: int | None, theirs: int | None) -> list[Cell]:
        row: list[Cell] = [name, number(count)]
        row += [number(nodes)] if has_nodes else []
        row += [number(theirs)]
        if per_layer and layers:
            row += [number(count / layers)]
            row += [ABSENT if theirs is None else number(theirs / ANALYSIS_LAYERS)]
        return row

    rows = [
        cells(named(name, detail), count, nodes, ANALYSIS.get(name))
        for name, detail, count, nodes in _rows(census)
    ]
    calls = sum(row.count for row in census.rows)
    nodes = census.total if has_nodes else None
    foot = [cells("total", calls, nodes, ANALYSIS_TOTAL)]
    if run.before is not None and run.before.allocations is not None:
        foot.append(cells("allocations, eager", run.before.allocations, None, ANALYSIS_ALLOCATIONS))
    text = (
        "original analysis: what an analysis of Qwen3.6-35B-A3B under vLLM on another card counted for "
        f"one eager step of {ANALYSIS_LAYERS} layers. It counts attention once a step and no projections."
    )
    if layers is None:
        text += " How many layers this run has is not in this report."
    elif per_layer:
        text += f" This run has {layers} layers: compare the figures per layer."
    return table(columns, rows, foot=foot) + note(text) + _kernels(census)


def _rows(census: Census) -> Iterator[tuple[str, str, int, int | None]]:
    """(row, implementations, calls, nodes): the analysis' rows in its order, then the others."""
    by_name: dict[str, list[Row]] = {name: [] for name in ANALYSIS}
    for row in census.rows:
        by_name.setdefault(standard(row.operation), []).append(row)
    for name, rows in by_name.items():
        what = dict.fromkeys(
            row.implementation if row.operation == name else row.operation for row in rows
        )
        nodes = [row.nodes for row in rows if row.nodes is not None]
        yield (
            name,
            ", ".join(what) or "not in this step",
            sum(row.count for row in rows),
            sum(nodes) if nodes else None,
        )


def _kernels(census: Census) -> str:
    if not census.kernels:
        return ""
    rows: list[list[Cell]] = [
        [kernel.name, kernel.grid, kernel.block, number(kernel.count)]
        for kernel in census.kernels[:_MOST_KERNELS]
    ]
    left = len(census.kernels) - len(rows)
    more = note(f"… and {left:,} more kernels, which are in the report.") if left else ""
    listed = table(["kernel", "grid", "block", "nodes"], rows) + more
    return f"<details><summary>Kernels of the graph</summary>{listed}</details>"
