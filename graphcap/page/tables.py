"""Tables as HTML. Cells are text and get escaped here, except for `Html`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphcap.page.text import breakable, escaped

MOST_ROWS = 300


@dataclass(frozen=True)
class Html:
    """Made by us from parts that are escaped."""

    text: str


Cell = str | Html


def _cell(value: Cell, is_text: bool) -> str:
    if isinstance(value, Html):
        return value.text
    return breakable(value) if is_text else escaped(value)


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    text_columns: int = 1,
    foot: Sequence[Sequence[Cell]] = (),
) -> str:
    """A table in a box that scrolls sideways by itself where a phone is too narrow for it.

    Args:
        text_columns: so many columns from the left hold text, the others figures.
        foot: rows below a line: sums.
    """

    def line(cells: Sequence[Cell], tag: str) -> str:
        marked = (
            f"<{tag}{'' if index < text_columns else ' class=n'}>{_cell(value, index < text_columns)}</{tag}>"
            for index, value in enumerate(cells)
        )
        return f"<tr>{''.join(marked)}</tr>"

    left = len(rows) - MOST_ROWS
    body = "".join(line(row, "td") for row in rows[:MOST_ROWS])
    more = (
        f"<p class=note>… and {left:,} more rows, which are in the report.</p>" if left > 0 else ""
    )
    feet = "".join(line(row, "td") for row in foot)
    return (
        f'<div class="scroll" tabindex="0"><table><thead>{line(columns, "th")}</thead>'
        f"<tbody>{body}</tbody>{f'<tfoot>{feet}</tfoot>' if feet else ''}</table></div>{more}"
    )


def named(name: str, detail: str) -> Html:
    """A name with something smaller below it."""
    below = f"<small>{breakable(detail, 200)}</small>" if detail else ""
    return Html(f"<b>{breakable(name, 200)}</b>{below}")


def swatch(variable: str, name: str) -> Html:
    """A name beside the colour that it has in a chart; `variable` is ours."""
    return Html(f'<i style="background:var({variable})"></i>{breakable(name, 200)}')


def note(text: str) -> str:
    return f'<p class="note">{escaped(text)}</p>'


def absent(what: str) -> str:
    """What stands where a report lacks the data."""
    return f'<p class="absent">Not in this report: {escaped(what)}</p>'
