"""Parts that several reports have: buckets, census, pool layout, timelines."""

from __future__ import annotations

from dataclasses import replace

from graphcap.lifetimes import BufferLayout, PoolLayout
from graphcap.page.fields import Field
from graphcap.page.run import Bucket, Census, Kernel, Row, Span, Timeline


def read_bucket(field: Field) -> Bucket:
    """A bucket of either report: memory stands there as ``mib`` or as ``nbytes``."""
    size = field["size"].count()
    if size == 0:
        raise field["size"].wrong("a size of at least 1")
    mib = field["mib"].number() if "mib" in field else field["nbytes"].count() / 2**20
    return Bucket(
        size,
        field["nodes"].count(),
        mib,
        field["capture_ms"].number(),
        optional_count(field, "replays"),
        optional_count(field, "padding_rows"),
        optional_number(field, "replay_ms"),
    )


def read_buckets(field: Field, served: Field | None = None) -> tuple[Bucket, ...]:
    """The buckets of a manager, with what each of them has `served` where the report was written again
    at the end of the run."""
    buckets = tuple(read_bucket(bucket) for bucket in field["buckets"].list())
    if served is None:
        return buckets
    counts = {
        entry["size"].count(): (entry["replays"].count(), entry["padding_rows"].count())
        for entry in served["buckets"].list()
    }
    counted = []
    for bucket in buckets:
        replays, padding = counts.get(bucket.size, (0, 0))
        counted.append(replace(bucket, replays=replays, padding_rows=padding))
    return tuple(counted)


def read_failures(field: Field) -> dict[str, str]:
    return {size: why.text() for size, why in field.items()}


def read_counts(field: Field) -> dict[str, int]:
    return {name: count.count() for name, count in field.items()}


def read_census(field: Field | None) -> Census | None:
    if field is None:
        return None
    rows = tuple(
        Row(
            row["operation"].text(),
            row["implementation"].text(),
            row["count"].count(),
            optional_count(row, "nodes"),
        )
        for row in field["rows"].list()
    )
    listed = field.get("kernels")
    kernels = tuple(
        Kernel(
            kernel["name"].text(),
            _dimensions(kernel["grid"]),
            _dimensions(kernel["block"]),
            kernel["count"].count(),
        )
        for kernel in (listed.list() if listed else ())
    )
    return Census(rows, field["total"].count(), kernels)


def read_layout(field: Field | None) -> PoolLayout | None:
    """None too where no step of the pool was observed."""
    if field is None:
        return None
    events = field["events"].count()
    buffers = tuple(_buffer(buffer, events) for buffer in field["buffers"].list())
    return PoolLayout(events, buffers) if events and buffers else None


def _buffer(field: Field, events: int) -> BufferLayout:
    spans = []
    for span in field["spans"].list():
        ends = [end.count() for end in span.list()]
        if len(ends) != 2 or not ends[0] <= ends[1] < events:
            raise span.wrong(f"the first and last of {events} events")
        spans.append((ends[0], ends[1]))
    return BufferLayout(
        field["name"].text(),
        field["offset"].count(),
        field["nbytes"].count(),
        field["lives"].count(),
        tuple(spans),
    )


def read_timeline(field: Field | None) -> Timeline | None:
    if field is None:
        return None
    lane = field.get("device")
    return Timeline(
        field["clock"].text(),
        _lane(field["host"]),
        None if lane is None else _lane(lane),
        field["us"].number(),
    )


def _lane(field: Field) -> tuple[Span, ...]:
    names = [name.text() for name in field["names"].list()]
    spans = []
    for operation in field["operations"].list():
        values = operation.list()
        if len(values) != 3:
            raise operation.wrong("a name's index, a start and a length")
        index = values[0].count()
        if index >= len(names):
            raise values[0].wrong(f"the index of one of {len(names)} names")
        spans.append(Span(names[index], values[1].number(), values[2].number()))
    return tuple(spans)


def optional_count(field: Field, key: str) -> int | None:
    inner = field.get(key)
    return None if inner is None else inner.count()


def optional_number(field: Field, key: str) -> float | None:
    inner = field.get(key)
    return None if inner is None else inner.number()


def optional_text(field: Field, key: str) -> str | None:
    inner = field.get(key)
    return None if inner is None else inner.text()


def _dimensions(field: Field) -> str:
    return " x ".join(str(size.count()) for size in field.list())
