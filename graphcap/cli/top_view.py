"""How ``graphcap top`` looks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from graphcap.readings import Counts, Engine, Span

if TYPE_CHECKING:
    from graphcap.cli.top import Frame

_FIXED_LINES = 20  # of an engine, besides its buckets and fallbacks
_FEWEST_BUCKETS = 3


def view(frame: Frame, height: int | None = None) -> RenderableType:
    """The whole picture.

    Args:
        height: lines of the terminal; buckets that do not fit are counted in one. None: no limit.
    """
    when = time.strftime("%H:%M:%S", time.localtime(frame.time))
    parts: list[RenderableType] = [
        Text.assemble(("graphcap top", "bold"), f"  {frame.url}  {when}")
    ]
    if frame.trouble is not None:
        parts.append(Text(f"{frame.trouble}; trying again", style="yellow"))
    if frame.reading is not None:
        engines = frame.reading.engines
        share = None if height is None else height // len(engines)
        for name, engine in engines.items():
            parts.append(_engine(name, engine, frame.spans.get(name), share))
    return Group(*parts)


def _engine(name: str, engine: Engine, span: Span | None, height: int | None) -> RenderableType:
    total, now = engine.counts, None if span is None else span.counts
    seconds = 1.0 if span is None else span.seconds
    ranks = "" if engine.ranks == 1 else f", of {engine.ranks} that count alike"
    table = Table(title=f"engine {escape(name)}, rank {engine.rank}{ranks}", title_justify="left")
    table.add_column("")
    table.add_column("now" if span is None else f"last {span.seconds:.1f} s", justify="right")
    table.add_column("since start", justify="right")

    def rates(label: str, of: Callable[[Counts], float], style: str | None = None) -> None:
        table.add_row(
            label, _rate(None if now is None else of(now), seconds), _number(of(total)), style=style
        )

    def figures(
        label: str, of: Callable[[Counts], float | None], show: Callable[[float | None], str]
    ) -> None:
        table.add_row(label, show(None if now is None else of(now)), show(of(total)))

    rates("replays", lambda counts: counts.replays)
    figures("hit rate", lambda counts: counts.hit_rate, _percent)
    figures("rows a step", lambda counts: counts.mean_rows, _mean)
    figures("padding", lambda counts: counts.padding_share, _percent)
    if total.mixed or total.mixed_hit_rate is not None:
        rates("mixed batches replayed", lambda counts: sum(counts.mixed.values()))
        figures("their hit rate", lambda counts: counts.mixed_hit_rate, _percent)
        figures("their padding", lambda counts: counts.mixed_padding_share, _percent)
    for reason in sorted(total.fallbacks):
        rates(f"fallback {escape(reason)}", partial(_fallbacks, reason=reason), "yellow")
    if not total.fallbacks:
        table.add_row("fallbacks", "none", "none")
    parts: list[RenderableType] = [table]
    most = None
    if height is not None:
        most = max(height - _FIXED_LINES - len(total.fallbacks), _FEWEST_BUCKETS)
    if total.buckets:
        parts.append(_buckets(total, now, seconds, most))
    if span is not None and span.restarted:
        parts.append(Text("the server restarted: counts began anew", style="yellow"))
    parts.append(Text(_memory(engine)))
    return Group(*parts)


def _fallbacks(counts: Counts, reason: str) -> float:
    return counts.fallbacks.get(reason, 0)


def _buckets(total: Counts, now: Counts | None, seconds: float, most: int | None) -> Table:
    """Replays by bucket, smallest first. `most` buckets, those that serve most, are shown."""
    table = Table()
    table.add_column("bucket", justify="right")
    table.add_column("replays", justify="right")
    table.add_column("hit rate", justify="right")
    table.add_column("", width=20)
    table.add_column("since start", justify="right")
    table.add_column("hit rate", justify="right")
    rates = total.bucket_hit_rates
    rates_now = now.bucket_hit_rates if now is not None and now.steps else {}
    served = (now or total).buckets
    busiest = sorted(rates, key=lambda bucket: (-served[bucket], -rates[bucket], int(bucket)))
    shown = set(busiest[:most])
    for bucket, rate in rates.items():
        if bucket in shown:
            table.add_row(
                bucket,
                _rate(None if now is None else now.buckets[bucket], seconds),
                _percent(rates_now.get(bucket)),
                ProgressBar(total=1.0, completed=rates_now.get(bucket, 0.0), width=20),
                _number(total.buckets[bucket]),
                _percent(rate),
            )
    if len(shown) < len(rates):
        rest = [bucket for bucket in rates if bucket not in shown]
        replays = sum(total.buckets[bucket] for bucket in rest)
        table.add_row(f"{len(rest)} more", "", "", "", _number(replays), "")
    return table


def _memory(engine: Engine) -> str:
    if engine.capture_seconds is None:
        return "nothing is recorded yet"
    graph, pool = engine.graph_bytes or 0, engine.pool_bytes or 0
    return (
        f"recorded in {engine.capture_seconds:.1f} s; recordings take {graph / 2**20:,.1f} MiB, "
        f"the pool {pool / 2**20:,.1f} MiB"
    )


def _rate(count: float | None, seconds: float) -> str:
    return "-" if count is None else f"{count / seconds:,.1f}/s"


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
