"""The other sections of the page: buckets, pool, timeline, fallbacks, machine."""

from __future__ import annotations

from collections import Counter, defaultdict

from graphcap.lifetimes import ENDS
from graphcap.page.charts import VARIABLES
from graphcap.page.pictures import rows_chart
from graphcap.page.pool_picture import colour_of, pool_chart
from graphcap.page.run import Recordings, Run, Span, Timeline
from graphcap.page.tables import Cell, absent, note, swatch, table
from graphcap.page.text import ABSENT, microseconds, nbytes, number, plural
from graphcap.page.timeline_picture import timeline_chart

_MOST_OPERATIONS = 24

REASONS = {
    "above_max_batch": "more rows than the largest bucket: raise the maximum batch of the ladder",
    "mixed_above_max_tokens": "a prefill larger than the largest mixed recording: nothing to do, or lower "
    "max_num_batched_tokens",
    "cascade_attention": "many sequences share a long prefix: --disable-cascade-attn",
    "not_recorded": "the bucket could not be recorded: see its reason below",
    "verification": "the bucket differed from the eager step: see its reason below",
    "rank_failed": "the bucket failed on another tensor-parallel rank: see that rank's report",
    "stale_recording": "a weight or a cache is not where it was recorded: copy new weights in place, "
    "or restart",
    "inputs_moved": "the engine made new input buffers: restart, and report it",
    "long_sequence": "a sequence is longer than what is recorded: raise max_seq_len_to_capture",
    "other_inputs": "the engine gave the step other tensors than were recorded: report it",
}
"""Reason of a fallback -> when it happens and what to do."""


def buckets(run: Run) -> str:
    return "".join(_buckets_of(run, recordings) for recordings in run.recordings)


def _buckets_of(run: Run, recordings: Recordings) -> str:
    title = ""
    if len(run.recordings) > 1:
        title = f"<h3>{'mixed' if recordings.kind == 'mixed' else 'decode'} batches</h3>"
    if not recordings.buckets:
        return title + absent("no bucket is recorded; the reasons are below.")
    rows: list[list[Cell]] = [
        [
            number(b.size),
            number(b.nodes),
            number(b.mib),
            number(b.capture_ms, 1),
            number(b.replays),
            number(b.padding_rows),
            _share(b.padding_rows, b.replays, b.size),
        ]
        for b in recordings.buckets
    ]
    columns = ["bucket", "nodes", "MiB", "capture ms", "replays", "padding rows", "padding"]
    found = recordings.buckets
    foot: list[Cell] = [
        "all",
        "",
        number(sum(b.mib for b in found)),
        number(sum(b.capture_ms for b in found), 1),
        _sum([b.replays for b in found]),
        _sum([b.padding_rows for b in found]),
        "",
    ]
    parts = [title, rows_chart(found, recordings.kind)]
    parts.append(table(columns, rows, text_columns=0, foot=[foot]))
    parts.append(
        note(
            f"A bucket's size counts {recordings.unit}. Nodes are graph nodes, or entries of a tape."
        )
    )
    if all(b.replays is None for b in found):
        parts.append(
            absent(
                "replays and padding. It was written when the capture ended; a server counts them."
            )
        )
    return "".join(parts)


def _share(padding: int | None, replays: int | None, size: int) -> str:
    if padding is None or not replays:
        return ABSENT
    return f"{padding / (replays * size):.0%}"


def _sum(counts: list[int | None]) -> str:
    known = [count for count in counts if count is not None]
    return number(sum(known)) if known else ABSENT


def pool(run: Run) -> str:
    held = run.pool
    text = f"The pool holds {nbytes(held.nbytes)}"
    if held.lower_bound:
        above = held.nbytes / held.lower_bound - 1
        text += f", {above:.1%} above the peak of live bytes, which no placement can go below"
    parts = [note(text + ". All layers and buckets share it.")]
    layout = held.layout
    if layout is None:
        return parts[0] + absent(
            "where each buffer lies: the step takes none from the pool, or the report is old."
        )
    parts.append(pool_chart(layout))
    caption = f"One step of {plural(layout.events, 'event')}. "
    if layout.events > 2 * ENDS:
        caption += f"Above its first {ENDS}, below its last {ENDS}; the layers in between repeat. "
    parts.append(
        note(
            caption
            + "Buffers that are never alive together share bytes. Heights are not to scale: "
            "thin strips are drawn thicker than they are."
        )
    )
    rows: list[list[Cell]] = [
        [
            swatch(VARIABLES[colour_of(b, layout)], b.name),
            nbytes(b.offset),
            nbytes(b.nbytes),
            number(min(first for first, _ in b.spans)) if b.spans else ABSENT,
            number(max(last for _, last in b.spans)) if b.spans else ABSENT,
            number(b.lives),
        ]
        for b in layout.buffers
    ]
    listed = table(["buffer", "offset", "size", "first event", "last event", "lives"], rows)
    return "".join(parts) + f"<details><summary>Buffers</summary>{listed}</details>"


def timeline(run: Run) -> str:
    eager, replayed = run.eager, run.replayed
    if eager is None and replayed is None:
        how = (
            "run `graphcap decode --json --timeline`."
            if run.kind == "decode"
            else (
                "an engine's steps are not timed; `graphcap decode --json --timeline` times those of a model."
            )
        )
        return absent(f"times of the operations of a step; {how}")
    parts = [timeline_chart(eager, replayed)]
    ways = [(name, t) for name, t in (("eager", eager), ("replay", replayed)) if t is not None]
    if replayed is None:
        parts.append(absent("the replay: no recording serves this batch."))
    sums = {name: _sums(t.host if t.device is None else t.device) for name, t in ways}
    totals: Counter[str] = Counter()
    for by_name in sums.values():
        for name, (_, us) in by_name.items():
            totals[name] += us  # type: ignore[assignment]
    shown = [name for name, _ in totals.most_common(_MOST_OPERATIONS)]
    rows: list[list[Cell]] = []
    for name in shown:
        row: list[Cell] = [name]
        for way, _ in ways:
            count, us = sums[way].get(name, (0, 0.0))
            row += [number(count), number(us, 1)]
        rows.append(row)
    columns = ["operation"]
    for way, _ in ways:
        columns += [f"{way} calls", f"{way} µs"]
    others: list[Cell] = [f"{len(totals) - len(shown)} others"]
    between: list[Cell] = ["between operations"]
    whole: list[Cell] = ["step"]
    for way, t in ways:
        rest = [entry for name, entry in sums[way].items() if name not in shown]
        others += [number(sum(count for count, _ in rest)), number(sum(us for _, us in rest), 1)]
        busy = sum(us for _, us in sums[way].values())
        between += ["", number(max(t.us - busy, 0.0), 1)]
        whole += [number(sum(count for count, _ in sums[way].values())), number(t.us, 1)]
    foot = [*([others] if len(totals) > len(shown) else []), between, whole]
    parts.append(note(_clock(ways)))
    parts.append(table(columns, rows, foot=foot))
    return "".join(parts)


def _sums(spans: tuple[Span, ...]) -> dict[str, tuple[int, float]]:
    sums: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for span in spans:
        count, us = sums[span.name]
        sums[span.name] = (count + 1, us + span.us)
    return dict(sums)


def _clock(ways: list[tuple[str, Timeline]]) -> str:
    lengths = ", ".join(f"{name} {microseconds(t.us)}" for name, t in ways)
    if any(t.clock == "profiler" for _, t in ways):
        how = "the profiler was attached, which makes launches longer than in the times per token"
    else:
        how = "the clock was read before and after each operation, which costs little"
    return f"One step each way: {lengths}. They were run once for this picture; {how}."


def fallbacks(run: Run) -> str:
    parts = []
    if run.fallbacks is None:
        parts.append(absent("steps that ran eagerly: it was written before the first."))
    elif not run.fallbacks:
        when = (
            " until the report was written, when the capture ended" if run.kind == "plugin" else ""
        )
        parts.append(note(f"No step ran eagerly for want of a recording{when}."))
    else:
        rows: list[list[Cell]] = [
            [reason, REASONS.get(reason, "see the log"), number(steps)]
            for reason, steps in sorted(run.fallbacks.items(), key=lambda entry: -entry[1])
        ]
        parts.append(table(["reason", "when, and what to do", "steps"], rows, text_columns=2))
    failed: list[list[Cell]] = [
        [f"{r.kind} {size}" if len(run.recordings) > 1 else size, why]
        for r in run.recordings
        for size, why in r.failures.items()
    ]
    if failed:
        parts.append("<h3>Buckets without a recording</h3>")
        parts.append(table(["bucket", "why"], failed, text_columns=2))
    return "".join(parts)


def machine(run: Run) -> str:
    rows: list[list[Cell]] = [[label, value] for label, value in run.facts]
    return table(["", ""], rows, text_columns=2) + "".join(note(text) for text in run.notes)
