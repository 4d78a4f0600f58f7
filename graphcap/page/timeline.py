"""Section: one step eager against replayed, as a picture and summed by operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from graphcap.page.run import Run, Span, Timeline
from graphcap.page.tables import absent, note, table
from graphcap.page.text import microseconds, number
from graphcap.page.timeline_picture import timeline_chart

_MOST_OPERATIONS = 24


def timeline(run: Run) -> str:
    eager, replayed = run.eager, run.replayed
    if eager is None and replayed is None:
        how = (
            "run graphcap decode --json --timeline."
            if run.kind == "decode"
            else (
                "an engine's steps are not timed; graphcap decode --json --timeline times those of a model."
            )
        )
        return absent(f"times of the operations of a step; {how}")
    parts = [timeline_chart(eager, replayed)]
    ways = [(name, t) for name, t in (("eager", eager), ("replay", replayed)) if t is not None]
    if replayed is None:
        parts.append(absent("the replay: no recording serves this batch."))
    sums = {name: _sums(t.host if t.device is None else t.device) for name, t in ways}
    totals: dict[str, float] = defaultdict(float)
    for by_name in sums.values():
        for name, (_, us) in by_name.items():
            totals[name] += us
    shown = sorted(totals, key=lambda name: -totals[name])[:_MOST_OPERATIONS]
    rows = [[name, _calls(ways, sums, [name]), *_times(ways, sums, [name])] for name in shown]
    columns = ["operation", "calls", *(f"{way} µs" for way, _ in ways)]
    rest = [name for name in totals if name not in shown]
    others = [f"{len(rest)} others", _calls(ways, sums, rest), *_times(ways, sums, rest)]
    busy = [sum(us for _, us in sums[way].values()) for way, _ in ways]
    between = ["between operations", ""]
    between += [number(max(t.us - sum_, 0.0), 1) for (_, t), sum_ in zip(ways, busy, strict=True)]
    whole = ["step", _calls(ways, sums, totals), *(number(t.us, 1) for _, t in ways)]
    foot = [*([others] if rest else []), between, whole]
    parts.append(note(_clock(ways)))
    parts.append(table(columns, rows, foot=foot))
    return "".join(parts)


Sums = dict[str, tuple[int, float]]
"""Operation -> calls, and µs of all of them."""


def _calls(ways: list[tuple[str, Timeline]], sums: dict[str, Sums], names: Iterable[str]) -> str:
    """One number where both ways make as many calls, else both."""
    counts = [sum(sums[way].get(name, (0, 0.0))[0] for name in names) for way, _ in ways]
    return " / ".join(map(number, dict.fromkeys(counts)))


def _times(
    ways: list[tuple[str, Timeline]], sums: dict[str, Sums], names: Iterable[str]
) -> list[str]:
    return [number(sum(sums[way].get(name, (0, 0.0))[1] for name in names), 1) for way, _ in ways]


def _sums(spans: tuple[Span, ...]) -> Sums:
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
    return (
        f"One step each way: {lengths}. They were run once for this picture; {how}. A block is as high "
        f"as its pixel is busy, and never so low that it is not seen."
    )
