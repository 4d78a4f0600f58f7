"""Section: the pool, its size against the least possible, its picture, its buffers."""

from __future__ import annotations

from graphcap.lifetimes import ENDS
from graphcap.page.charts import VARIABLES
from graphcap.page.pool_picture import colour_of, pool_chart
from graphcap.page.run import Run
from graphcap.page.tables import Cell, absent, note, swatch, table
from graphcap.page.text import ABSENT, nbytes, number, plural


def pool(run: Run) -> str:
    held = run.pool
    text = f"The pool holds {nbytes(held.nbytes)}"
    if held.lower_bound:
        above = held.nbytes / held.lower_bound - 1
        text += f", {above:.1%} above" if above >= 0.0005 else ", which is"
        text += " the peak of live bytes, the least that any placement needs"
    parts = [note(text + ". All layers and buckets share it.")]
    layout = held.layout
    if layout is None:
        return parts[0] + absent(
            "where each buffer lies: the step takes none from the pool, or the report is old."
        )
    parts.append(pool_chart(layout))
    caption = f"One step of {plural(layout.events, 'event')}. "
    if layout.events > 2 * ENDS:
        caption += f"Above its first {ENDS}, below its last {ENDS}; the layers in between repeat. "
    parts.append(
        note(
            caption
            + "Buffers that are never alive together share bytes. Heights are not to scale: "
            "thin strips are drawn thicker than they are."
        )
    )
    rows: list[list[Cell]] = [
        [
            swatch(VARIABLES[colour_of(b, layout)], b.name),
            nbytes(b.offset),
            nbytes(b.nbytes),
            f"{number(b.spans[0][0])} to {number(b.spans[-1][1])}" if b.spans else ABSENT,
            number(b.lives),
        ]
        for b in layout.buffers
    ]
    listed = table(["buffer", "offset", "size", "events", "lives"], rows)
    return (
        "".join(parts)
        + f"<details><summary>{plural(len(rows), 'buffer')} by address</summary>{listed}</details>"
    )
