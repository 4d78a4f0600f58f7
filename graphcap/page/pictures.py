"""The charts of launches and of buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphcap.analysis import ANALYSIS_LAYERS, ANALYSIS_TOTAL
from graphcap.page.charts import (
    AFTER,
    BEFORE,
    MUTED,
    REFERENCE,
    SERIES,
    bare,
    bars,
    chart,
    legend,
)
from graphcap.page.run import Bucket, Way
from graphcap.page.text import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_BUCKETS = 64


def launches_chart(before: Way | None, after: Way | None) -> str:
    """Launches of one token, beside what the original analysis counted."""
    entries = [
        (way.name, float(way.launches), number(way.launches), colour)
        for way, colour in ((before, BEFORE), (after, AFTER))
        if way is not None and way.launches is not None
    ]
    analysis = f"original analysis ({ANALYSIS_LAYERS} layers, eager)"
    entries.append((analysis, float(ANALYSIS_TOTAL), number(ANALYSIS_TOTAL), REFERENCE))

    def draw(figure: Figure, narrow: bool) -> None:
        bars(figure, entries, narrow=narrow, longest=46 if narrow else 90)

    return chart("launches", "launches per token", draw, 52 * len(entries))


def rows_chart(buckets: tuple[Bucket, ...], name: str) -> str:
    """Rows that each bucket's replays computed, real ones and padding. Empty without replays."""
    served = [
        (bucket.size, bucket.replays * bucket.size - bucket.padding_rows, bucket.padding_rows)
        for bucket in buckets
        if bucket.replays and bucket.padding_rows is not None
    ]
    if not served or len(served) > _MOST_BUCKETS:
        return ""

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.add_subplot()
        places = range(len(served))
        axes.barh(places, [real for _, real, _ in served], color=SERIES[0], height=0.62)
        axes.barh(
            places,
            [padding for _, _, padding in served],
            left=[real for _, real, _ in served],
            color=SERIES[1],
            height=0.62,
        )
        axes.set_yticks(places, [str(size) for size, _, _ in served])
        axes.invert_yaxis()
        axes.set_xlabel("rows computed by replays")
        axes.set_ylabel("bucket")
        axes.locator_params(axis="x", nbins=4 if narrow else 8, integer=True)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(axis="x", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.yaxis.label.set_color(MUTED)
        bare(axes)

    drawn = chart(f"rows-{name}", "rows by bucket", draw, 60 + 26 * len(served))
    return drawn + legend([(SERIES[0], "real rows"), (SERIES[1], "padding rows")])
