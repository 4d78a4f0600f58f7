"""The plot of bench/speed.py's result: milliseconds a token against batch, with the floor, as SVG.

Written by hand and not by a library, so that the same result gives the same bytes everywhere. It is
readable in light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT = 720, 430
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 74, 48

WAYS = {
    "eager": ("eager", "#8a6d3b", "#d9b26f"),
    "torch graph": ("plain torch in a CUDA graph", "#2f6fb0", "#6fb1ee"),
    "torch.compile": ("torch.compile, reduce-overhead", "#7b4fa3", "#bb94e0"),
    "vLLM": ("vLLM's best", "#3d7d4a", "#7cc48b"),
    "graphcap": ("graphcap", "#c0392b", "#ff8a7a"),
    "floor": ("floor: the bytes it must read", "#666666", "#a0a0a0"),
}
"""Series -> (label, colour in light, colour in dark), in the order of drawing."""

Points = Sequence[tuple[int, float]]


def series_of(result: Mapping[str, Any], vllm: Mapping[int, float]) -> dict[str, Points]:
    """Milliseconds by batch of each series that `result` has, at its main context; `vllm`: the best of
    vLLM's modes by batch."""
    rows = sorted(
        (row for row in result["rows"] if row["context"] == result["context"]),
        key=lambda row: row["batch"],
    )
    found: dict[str, Points] = {}
    for name in WAYS:
        if name == "floor":
            points = [(row["batch"], row["floor_ms"]) for row in rows]
        elif name == "vLLM":
            points = [(row["batch"], vllm[row["batch"]]) for row in rows if row["batch"] in vllm]
        else:
            points = [(r["batch"], r["ways"][name]["ms"]) for r in rows if name in r["ways"]]
        if points:
            found[name] = points
    return found


def plot(result: Mapping[str, Any], vllm: Mapping[int, float]) -> str:
    series = series_of(result, vllm)
    batches = sorted({batch for points in series.values() for batch, _ in points})
    times = [ms for points in series.values() for _, ms in points]
    low, high = math.log(min(times) / 1.15), math.log(max(times) * 1.15)
    # One batch alone stands in the middle.
    first, last = math.log(batches[0] / 1.1), math.log(batches[-1] * 1.1)

    def x(batch: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log(batch) - first) / (last - first)

    def y(ms: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log(ms) - low) / (high - low)

    machine = result["machine"]
    title = f"{result['shape']} on {machine['card'] or 'a CPU'}: milliseconds a token against batch"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<style>{_style()}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        *_legend(series),
    ]
    for ms in _ticks(math.exp(low), math.exp(high)):
        parts.append(
            f'<path class="grid" d="M{LEFT} {y(ms):.1f}H{WIDTH - RIGHT}"/>'
            f'<text x="{LEFT - 8}" y="{y(ms) + 4:.1f}" text-anchor="end">{ms:g}</text>'
        )
    for batch in batches:
        parts.append(
            f'<path class="grid" d="M{x(batch):.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
            f'<text x="{x(batch):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{batch}</text>'
        )
    parts.append(f'<text x="{LEFT - 8}" y="{TOP - 8}" text-anchor="end">ms</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">batch</text>')
    for name, points in series.items():
        way = _class(name)
        line = "L".join(f"{x(batch):.1f} {y(ms):.1f}" for batch, ms in points)
        parts.append(f'<path class="line {way}" d="M{line}"/>')
        for batch, ms in points:
            parts.append(
                f'<circle class="dot {way}" cx="{x(batch):.1f}" cy="{y(ms):.1f}" r="3.5">'
                f"<title>{WAYS[name][0]}, batch {batch}: {ms:.2f} ms</title></circle>"
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(series: Mapping[str, Points]) -> list[str]:
    parts = []
    for index, name in enumerate(series):
        left, top = LEFT + (index % 3) * 215, 20 + (index // 3) * 20
        parts.append(
            f'<path class="line {_class(name)}" d="M{left} {top - 4}h22"/>'
            f'<text x="{left + 28}" y="{top}">{WAYS[name][0]}</text>'
        )
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [tick for tick in every if low <= tick <= high]


def _class(name: str) -> str:
    return "way-" + name.lower().replace(" ", "-").replace(".", "-")


def _style() -> str:
    light = "".join(f".{_class(n)}{{stroke:{c};--c:{c}}}" for n, (_, c, _) in WAYS.items())
    dark = "".join(f".{_class(n)}{{stroke:{c};--c:{c}}}" for n, (_, _, c) in WAYS.items())
    return (
        "text{font:12px sans-serif;fill:#444}.paper{fill:#fff}.grid{stroke:#e3e3e3;fill:none}"
        ".line{fill:none;stroke-width:2}.dot{fill:var(--c);stroke:none}"
        ".way-graphcap{stroke-width:3}.way-floor{stroke-dasharray:5 4}"
        f"{light}"
        "@media (prefers-color-scheme:dark){text{fill:#c8c8c8}.paper{fill:#0d1117}"
        f".grid{{stroke:#2b3038}}{dark}}}"
    )
