"""The page: one HTML file without scripts, fonts or links, so that nothing is fetched and nothing runs."""

from __future__ import annotations

from graphcap import __version__
from graphcap.page.buckets import buckets
from graphcap.page.fallbacks import fallbacks
from graphcap.page.launches import launch_table, per_token
from graphcap.page.pool import pool
from graphcap.page.run import Run
from graphcap.page.style import CSS
from graphcap.page.tables import Cell, note, table
from graphcap.page.text import escaped, nbytes, number
from graphcap.page.timeline import timeline

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(run: Run) -> str:
    """The whole HTML document of `run`."""
    parts = (
        ("Per token", per_token(run)),
        ("Launches by operation", launch_table(run)),
        ("Buckets", buckets(run)),
        ("Pool", pool(run)),
        ("Timeline of one step", timeline(run)),
        ("Fallbacks", fallbacks(run)),
        ("Run", _machine(run)),
    )
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>graphcap: {escaped(run.title, 120)}</title><style>{CSS}</style></head><body>"
        f"<header><h1>{escaped(run.title, 200)}</h1>"
        f'<p class="source">graphcap {escaped(__version__)}, from {escaped(run.source, 200)}</p>'
        f"{_tiles(run)}</header><main>{body}</main></body></html>\n"
    )


def _tiles(run: Run) -> str:
    tiles: list[tuple[str, str]] = []
    before, after = run.before, run.after
    counted = run.kind == "decode"
    for label, attribute in (
        ("launches per token" if counted else "operations → launches", "launches"),
        ("ms per token", "ms"),
        ("allocations per token", "allocations"),
    ):
        one, two = getattr(before, attribute, None), getattr(after, attribute, None)
        if one is not None and two is not None:
            tiles.append((label, f"{number(one)} → {number(two)}"))
    recorded = sum(len(recordings.buckets) for recordings in run.recordings)
    asked = recorded + sum(len(recordings.failures) for recordings in run.recordings)
    tiles.append(("buckets recorded", f"{recorded} of {asked}"))
    tiles.append(("pool", nbytes(run.pool.nbytes)))
    if run.fallbacks is not None:
        tiles.append(("steps that fell back", number(sum(run.fallbacks.values()))))
    if run.equal is not None:
        tiles.append(("tokens of both ways", "equal" if run.equal else "NOT EQUAL"))
    drawn = (
        f'<div class="tile"><span>{escaped(label)}</span><b>{escaped(value)}</b></div>'
        for label, value in tiles
    )
    return f'<div class="tiles">{"".join(drawn)}</div>'


def _machine(run: Run) -> str:
    rows: list[list[Cell]] = [[label, value] for label, value in run.facts]
    return table(["", ""], rows, text_columns=2) + "".join(note(text) for text in run.notes)
