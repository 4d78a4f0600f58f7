"""Section: what each bucket's recording costs, and what it has served."""

from __future__ import annotations

from graphcap.page.pictures import rows_chart
from graphcap.page.run import Bucket, Recordings, Run
from graphcap.page.tables import Cell, Html, absent, note, table
from graphcap.page.text import ABSENT, number


def buckets(run: Run) -> str:
    return "".join(_buckets_of(run, recordings) for recordings in run.recordings)


def _buckets_of(run: Run, recordings: Recordings) -> str:
    title = ""
    if len(run.recordings) > 1:
        title = f"<h3>{'mixed' if recordings.kind == 'mixed' else 'decode'} batches</h3>"
    if not recordings.buckets:
        return title + absent("no bucket is recorded; the reasons are below.")
    found = recordings.buckets
    served = any(bucket.replays is not None for bucket in found)
    columns = ["bucket", "nodes", "MiB", "capture ms"]
    rows: list[list[Cell]] = [
        [number(b.size), number(b.nodes), _mib(b.mib), number(b.capture_ms, 1)] for b in found
    ]
    foot: list[Cell] = [
        "all",
        "",
        _mib(sum(b.mib for b in found)),
        number(sum(b.capture_ms for b in found), 1),
    ]
    if any(b.replay_ms is not None for b in found):
        columns.append("replay ms")
        for row, b in zip(rows, found, strict=True):
            row.append(number(b.replay_ms))
        foot.append("")
    if served:
        columns += ["replays", "padding rows"]
        for row, b in zip(rows, found, strict=True):
            row += [number(b.replays), _padding(b)]
        foot += [_sum([b.replays for b in found]), _sum([b.padding_rows for b in found])]
    parts = [title, rows_chart(found, recordings.kind)]
    parts.append(table(columns, rows, text_columns=0, foot=[foot]))
    unit = f"A bucket's size counts {recordings.unit}. "
    parts.append(note(unit + "Nodes are graph nodes, or entries of a tape."))
    if not served:
        parts.append(absent("replays and padding. It was written when the capture ended."))
    return "".join(parts)


def _mib(mib: float) -> str:
    return number(mib, 2 if mib >= 0.1 or not mib else 3)


def _padding(bucket: Bucket) -> Cell:
    """Rows, and below them their share of what the bucket computed."""
    if bucket.padding_rows is None or not bucket.replays:
        return number(bucket.padding_rows)
    share = bucket.padding_rows / (bucket.replays * bucket.size)
    return Html(f"{bucket.padding_rows:,}<small>{share:.0%}</small>")


def _sum(counts: list[int | None]) -> str:
    known = [count for count in counts if count is not None]
    return number(sum(known)) if known else ABSENT
