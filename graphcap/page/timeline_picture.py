"""One step eager against replayed, on one scale of time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from graphcap.page.charts import MUTED, SERIES, bare, chart, legend
from graphcap.page.run import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (
    ("attention", SERIES[0], r"attention|attn|flash|reduce_segments|cache|rotary|rope"),
    ("experts", SERIES[1], r"fused_moe|moe|router|topk|top_k|expert|grouped|_pair_|merge|silu"),
    ("norms", SERIES[2], r"norm"),
    (
        "projections",
        SERIES[3],
        r"projection|linear|gemm|gemv|nvjet|cutlass|splitk|cublas|matmul|\bmm\b",
    ),
    ("other", SERIES[4], r""),
)
"""Kinds of operation: what a name must hold for it, the first that matches."""

LAUNCH = ("launches by the host", SERIES[5], "")


def kind_of(name: str) -> tuple[str, str, str]:
    low = name.lower()
    return next(kind for kind in KINDS if re.search(kind[2], low))


def timeline_chart(eager: Timeline | None, replayed: Timeline | None) -> str:
    lanes: list[tuple[str, Iterable[Span], bool]] = []
    for way, timeline in (("eager", eager), ("replay", replayed)):
        if timeline is None:
            continue
        if timeline.device is None:
            lanes.append((way, timeline.host, False))
        else:
            lanes.append((f"{way}, host", timeline.host, True))
            lanes.append((f"{way}, device", timeline.device, False))
    longest = max(t.us for t in (eager, replayed) if t is not None) or 1.0

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.add_subplot()
        per_px = longest / (300 if narrow else 690)
        for index, (label, spans, is_host) in enumerate(lanes):
            axes.text(0, -index + 0.32, label, ha="left", va="bottom", color=MUTED)
            by_colour: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for span in spans:
                colour = (LAUNCH if is_host else kind_of(span.name))[1]
                by_colour[colour].append((span.start_us, span.us))
            for colour, ranges in by_colour.items():
                axes.broken_barh(
                    _joined(ranges, per_px / 4),
                    (-index - 0.3, 0.6),
                    facecolors=colour,
                    linewidth=0,
                    snap=False,
                )
        axes.set_xlim(0, longest)
        axes.set_ylim(-len(lanes) + 0.6, 0.75)
        axes.set_yticks([])
        in_ms = longest >= 2000
        axes.xaxis.set_major_formatter(
            lambda value, _: f"{value / 1e3:,.3g}" if in_ms else f"{value:,.0f}"
        )
        axes.set_xlabel("ms" if in_ms else "µs")
        axes.locator_params(axis="x", nbins=4 if narrow else 8)
        bare(axes)

    drawn = chart("timeline", "one step, eager against replayed", draw, 50 + 62 * len(lanes))
    kinds = {kind_of(s.name) for _, spans, is_host in lanes if not is_host for s in spans}
    shown = [kind for kind in KINDS if kind in kinds]
    if any(is_host for _, _, is_host in lanes):
        shown.append(LAUNCH)
    return drawn + legend([(colour, text) for text, colour, _ in shown])


def _joined(ranges: Iterable[tuple[float, float]], least: float) -> list[tuple[float, float]]:
    """(start, length) in order; neighbours nearer than `least` become one, and none is thinner."""
    joined: list[tuple[float, float]] = []
    for start, length in sorted(ranges):
        end = start + max(length, least)
        if joined and start - sum(joined[-1]) < least:
            first = joined[-1][0]
            joined[-1] = (first, max(end, sum(joined[-1])) - first)
        else:
            joined.append((start, end - start))
    return joined
