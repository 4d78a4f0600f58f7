"""One step eager against replayed, on one scale of time."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from graphcap.page.charts import MUTED, SERIES, bare, chart, legend, rectangles
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

_MUCH_SHORTER = 0.4
_LOWEST = 0.2  # share of a lane's height, so that a block is seen

LAUNCH = ("launches by the host", SERIES[5], "")


@cache
def kind_of(name: str) -> tuple[str, str, str]:
    low = name.lower()
    return next(kind for kind in KINDS if re.search(kind[2], low))


def timeline_chart(eager: Timeline | None, replayed: Timeline | None) -> str:
    """Both steps on one scale, and the replay once more on its own where it is much shorter."""
    ways = [(name, t) for name, t in (("eager", eager), ("replay", replayed)) if t is not None]
    drawn = _chart("timeline", "one step, eager against replayed", ways)
    if eager and replayed and 0 < replayed.us < _MUCH_SHORTER * eager.us:
        drawn += "<h3>The replay on a scale of its own</h3>"
        drawn += _chart("timeline-replay", "one replayed step", [("replay", replayed)])
    operations = [span.name for _, t in ways for span in (t.host if t.device is None else t.device)]
    kinds = set(map(kind_of, set(operations)))
    shown = [kind for kind in KINDS if kind in kinds]
    if any(t.device is not None for _, t in ways):
        shown.append(LAUNCH)
    return drawn + legend([(colour, text) for text, colour, _ in shown])


def _chart(name: str, label: str, ways: list[tuple[str, Timeline]]) -> str:
    lanes: list[tuple[str, tuple[Span, ...], bool]] = []
    for way, timeline in ways:
        if timeline.device is None:
            lanes.append((way, timeline.host, False))
        else:
            lanes.append((f"{way}, host", timeline.host, True))
            lanes.append((f"{way}, device", timeline.device, False))
    longest = max(timeline.us for _, timeline in ways) or 1.0

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.add_subplot()
        bins = 320 if narrow else 700
        for index, (text, spans, is_host) in enumerate(lanes):
            axes.text(0, -index + 0.32, text, ha="left", va="bottom", color=MUTED)
            for colour, blocks in _blocks(spans, is_host, longest / bins, bins).items():
                low = -index - 0.3
                places = [(start, low, length, 0.6 * high) for start, length, high in blocks]
                rectangles(axes, places, colour, None)
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

    return chart(name, label, draw, 50 + 62 * len(lanes))


Block = tuple[float, float, float]
"""Start, length, and share of the lane's height."""


def _blocks(
    spans: tuple[Span, ...], is_host: bool, width: float, bins: int
) -> dict[str, list[Block]]:
    """A lane in `bins` bins, each as wide as a pixel, by colour: that of the kind of operation which fills
    most of it, and as high as it is busy. So a thousand kernels of a few µs in tens of ms look like the
    little work that they are."""
    busy: list[dict[str, float]] = [{} for _ in range(bins)]
    for span in spans:
        colour = (LAUNCH if is_host else kind_of(span.name))[1]
        start, end = span.start_us / width, (span.start_us + span.us) / width
        for index in range(min(int(start), bins - 1), min(int(end), bins - 1) + 1):
            share = min(end, index + 1) - max(start, index)
            busy[index][colour] = busy[index].get(colour, 0.0) + max(share, 0.0)
    blocks: dict[str, list[Block]] = {}
    last: tuple[str, float] | None = None
    for index, shares in enumerate(busy):
        key = None
        if shares:
            colour = max(shares, key=lambda c: shares[c])
            key = (colour, max(min(sum(shares.values()), 1.0), _LOWEST))
            own = blocks.setdefault(colour, [])
            if key == last:
                start, length, height = own[-1]
                own[-1] = (start, length + width, height)
            else:
                own.append((index * width, width, key[1]))
        last = key
    return blocks
