"""The pool as a picture: what lives when, at which addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphcap.lifetimes import ENDS, BufferLayout, PoolLayout
from graphcap.page.charts import MUTED, ON_FILL, SERIES, chart, rectangles
from graphcap.page.text import clean, nbytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_THINNEST = 0.035
"""Height that every strip between two addresses gets, as a share of the arena's: a buffer of 256 bytes in
an arena of megabytes would not be seen."""

_LETTER = 7.0  # px, of the font of 12 px
_MOST_BUFFERS = 200


def colour_of(buffer: BufferLayout, layout: PoolLayout) -> str:
    return SERIES[layout.buffers.index(buffer) % len(SERIES)]


def pool_chart(layout: PoolLayout) -> str:
    """Lifetimes across, addresses upwards. Of a step with more events than twice `ENDS` its two ends.

    Empty where there are too many buffers for a picture.
    """
    if len(layout.buffers) > _MOST_BUFFERS:
        return ""
    places = _places(layout)
    windows = [(0, layout.events)]
    if layout.events > 2 * ENDS:
        windows = [(0, ENDS), (layout.events - ENDS, layout.events)]
    height = min(max(200, 15 * len(places)), 560)

    def draw(figure: Figure, narrow: bool) -> None:
        grid = figure.subplots(len(windows), 1, squeeze=False)
        for (axes,), window in zip(grid, windows, strict=True):
            _draw_window(axes, layout, places, window, narrow, height)
        grid[-1][0].set_xlabel("event of the step: a buffer is taken or released")

    titles = {
        _gid(index, start): f"{b.name}: {nbytes(b.nbytes)} at {nbytes(b.offset)}"
        for index, b in enumerate(layout.buffers)
        for start, _ in windows
    }
    label = "lifetimes of buffers against addresses"
    return chart("pool", label, draw, height * len(windows) + 40, titles)


def _gid(index: int, start: int) -> str:
    return f"buffer-{index}-{start}"


def _places(layout: PoolLayout) -> dict[int, float]:
    """Address -> height at which it is drawn: to scale, plus `_THINNEST` for every strip."""
    edges = sorted({edge for b in layout.buffers for edge in (b.offset, b.offset + b.nbytes)} | {0})
    total = max(edges[-1], 1)
    return {edge: edge / total + _THINNEST * index for index, edge in enumerate(edges)}


def _draw_window(
    axes: Axes,
    layout: PoolLayout,
    places: dict[int, float],
    window: tuple[int, int],
    narrow: bool,
    height: int,
) -> None:
    start, end = window
    top = max(places.values()) or 1.0
    px_per_event = (250 if narrow else 620) / (end - start)
    px_per_height = (height - 30) / top
    for index, buffer in enumerate(layout.buffers):
        low, high = places[buffer.offset], places[buffer.offset + buffer.nbytes]
        lives = [
            (max(first, start), min(last + 1, end))
            for first, last in buffer.spans
            if last >= start and first < end
        ]
        places_of_lives = ((left, low, right - left, high - low) for left, right in lives)
        rectangles(axes, places_of_lives, colour_of(buffer, layout), _gid(index, start))
        name = clean(buffer.name, 40)
        for left, right in lives:
            fits = (right - left) * px_per_event > len(name) * _LETTER + 6
            if fits and (high - low) * px_per_height > 9.5:
                axes.text(
                    (left + right) / 2,
                    (low + high) / 2,
                    name,
                    ha="center",
                    va="center_baseline",
                    color=ON_FILL,
                    size=12 if (high - low) * px_per_height > 14 else 9.5,
                    clip_on=True,
                )
    axes.set_xlim(start, end)
    axes.set_ylim(0, top)
    ticks = _ticks(places, least=18 / px_per_height)
    axes.set_yticks([places[edge] for edge in ticks], [nbytes(edge) for edge in ticks])
    axes.tick_params(axis="y", labelcolor=MUTED, labelsize=11)
    axes.locator_params(axis="x", nbins=4 if narrow else 8, integer=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _ticks(places: dict[int, float], least: float) -> list[int]:
    """Addresses whose labels do not touch, both ends among them."""
    edges = sorted(places)
    end = edges[-1]
    chosen = [edges[0]]
    for edge in edges[1:-1]:
        if places[edge] - places[chosen[-1]] >= least and places[end] - places[edge] >= least:
            chosen.append(edge)
    return chosen if end == edges[0] else [*chosen, end]
