"""Charts by matplotlib as inline SVG: twice, for wide pages and for phones, in the page's colours.

matplotlib is given placeholder colours, which become CSS variables afterwards: one drawing serves light
and dark. Text stays text.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from graphcap.errors import BackendError
from graphcap.page.text import clean, escaped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = 720, 340
"""Widths in CSS pixels at which a chart is drawn."""

INK, MUTED, GRID = "#010101", "#020202", "#030303"
BEFORE, AFTER, REFERENCE = "#040404", "#050505", "#060606"
ON_FILL = "#070707"
SERIES = tuple(f"#0808{index:02x}" for index in range(10))
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    BEFORE: "--before",
    AFTER: "--after",
    REFERENCE: "--reference",
    ON_FILL: "--on-fill",
    **{colour: f"--series-{index}" for index, colour in enumerate(SERIES)},
}

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "graphcap",  # the same report gives the same page
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.family": "sans-serif",
    "font.size": 12,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}

Draw = Callable[["Figure", bool], None]
"""Draws into a figure; the flag says whether it is the narrow one."""


def require_matplotlib() -> None:
    """Raises `BackendError` where matplotlib cannot be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BackendError(
            f"graphcap report draws with matplotlib, which cannot be imported ({error}); "
            f"pip install 'vllm-graphcap[plot]'"
        ) from None


def chart(
    name: str, label: str, draw: Draw, height: int, titles: Mapping[str, str] | None = None
) -> str:
    """A chart as HTML.

    Args:
        name: makes the ids of this chart its own.
        label: what it shows, for who cannot see it.
        draw: called for each width.
        height: in CSS pixels.
        titles: gid of something that is drawn -> what a mouse over it shows.
    """
    drawn = (
        f'<div class="{kind}">'
        f"{_svg(f'{name}-{kind}', label, draw, (width, height), titles or {})}</div>"
        for kind, width in (("wide", WIDE), ("narrow", NARROW))
    )
    return f'<div class="chart">{"".join(drawn)}</div>'


def _svg(
    name: str, label: str, draw: Draw, size: tuple[int, int], titles: Mapping[str, str]
) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # glyphs that its own font lacks: the page's font draws them
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72)
        FigureCanvasSVG(figure)
        draw(figure, size[0] == NARROW)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(written.getvalue())
    for element in list(root):
        if element.tag == f"{{{_SVG}}}metadata":
            root.remove(element)
    for element in list(root.iter()):
        title = titles.get(element.get("id", ""))
        if title is not None:
            child = ElementTree.Element(f"{{{_SVG}}}title")
            child.text = clean(title, 200)
            element.insert(0, child)
        for key, value in list(element.attrib.items()):
            element.set(key, _own(key, value, name))
        if element.tag == f"{{{_SVG}}}style":
            element.text = ""  # matplotlib's is for a whole document
    root.attrib.pop("width"), root.attrib.pop("height")
    root.set("role", "img")
    root.set("aria-label", clean(label))
    return ElementTree.tostring(root, encoding="unicode")


def _own(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key in ("href", f"{{{_XLINK}}}href") and value.startswith("#"):
        return f"#{name}-{value[1:]}"
    if key == "clip-path":
        return value.replace("url(#", f"url(#{name}-")
    if key == "d":
        return re.sub(r"(\.\d\d)\d+", r"\1", value).replace("\n", "")
    if key == "style":
        value = re.sub(r"#[0-9a-f]{6}", _variable, value)
        return re.sub(r"font: (?:\w+ )*([\d.]+px) [^;]*", r"font-size: \1", value)
    return value


def _variable(match: re.Match[str]) -> str:
    variable = VARIABLES.get(match[0])
    return match[0] if variable is None else f"var({variable})"


def bare(axes: Axes) -> None:
    """Without ticks and lines on the left: names stand there instead."""
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False, length=0)


def rectangles(
    axes: Axes, places: Iterable[tuple[float, float, float, float]], colour: str, gid: str | None
) -> None:
    """Any number of rectangles (left, bottom, width, height) of one colour as one element, which takes a
    tenth of the text that one element each would take."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    vertices: list[tuple[float, float]] = []
    for left, low, width, height in places:
        right, high = left + width, low + height
        vertices += [(left, low), (right, low), (right, high), (left, high), (left, low)]
    if not vertices:
        return
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    path = Path(vertices, codes * (len(vertices) // len(codes)))
    axes.add_patch(PathPatch(path, facecolor=colour, linewidth=0, gid=gid, snap=False))


def legend(entries: list[tuple[str, str]]) -> str:
    """(placeholder colour, text) as HTML, which wraps where matplotlib's would not."""
    items = (
        f'<li><i style="background:var({VARIABLES[colour]})"></i>{escaped(text, 60)}</li>'
        for colour, text in entries
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def bars(
    figure: Figure, entries: list[tuple[str, float, str, str]], *, narrow: bool, longest: int = 40
) -> Any:
    """Horizontal bars, each with its name above it, so that names of any length fit a phone.

    Args:
        entries: (name, value, value as text, colour), from top to bottom.
    """
    axes = figure.add_subplot()
    top = max((value for _, value, _, _ in entries), default=0) or 1
    for index, (name, value, text, colour) in enumerate(entries):
        axes.barh(-index, value, height=0.36, color=colour)
        axes.text(0, -index + 0.24, clean(name, longest), va="bottom", ha="left", color=MUTED)
        axes.text(value + top * 0.012, -index, text, va="center", ha="left", weight="bold")
    axes.set_xlim(0, top * (1.28 if narrow else 1.12))
    axes.set_ylim(-len(entries) + 0.7, 0.75)
    axes.axis("off")
    return axes
