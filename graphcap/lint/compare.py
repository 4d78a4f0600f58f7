"""What differs between two runs of a step: state kept in Python, and branches on the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from graphcap.lint.finding import RECORDERS, Notes
from graphcap.lint.places import Place, Site
from graphcap.lint.signature import difference
from graphcap.lint.trace import Entry, LintTrace

_BAKED = (
    "a recording keeps what it was when it was recorded, so that replays differ from the step "
    "(verification refuses the bucket)"
)
_AS_TENSOR = (
    "keep what changes in a tensor that is updated in place, listed in state=, or pass it as a slot"
)


def note_state(first: LintTrace, second: LintTrace, notes: Notes) -> None:
    """Notes where the second run of a step did other things than the first, on the same batch.

    A difference in shapes or in the operations themselves makes all that follows differ, so that it is
    the last one that is noted; of differing values one is noted for each line.
    """
    lines: set[Place | None] = set()
    for before, after in zip_longest(first.entries, second.entries):
        if before is None or after is None or before.name != after.name:
            found = after or before
            names = [entry.name if entry else "nothing" for entry in (before, after)]
            what = f"another operation in the next run: {names[0]}, then {names[1]}"
            _note(notes, what, found.site)
            return
        changed = difference(before.signature, after.signature)
        if changed is None and before.outside != after.outside:
            changed = "a tensor that is another one in the next run"
        if changed is None:
            continue
        if after.site.place not in lines:
            lines.add(after.site.place)
            _note(notes, f"{after.name} of a value that changes: {changed}", after.site)
        if "shape" in changed:
            return


def _note(notes: Notes, what: str, site: Site) -> None:
    notes.note("state", what, _BAKED, _AS_TENSOR, breaks=RECORDERS, site=site)


def note_branches(large: LintTrace, small: LintTrace, largest: int, notes: Notes) -> None:
    """Notes where the step takes another way at a small batch than at the largest. That is allowed:
    each bucket has a recording of its own."""
    ways = [_lines(trace.entries) for trace in (large, small)]
    for there, here in zip_longest(*ways):
        if there != here:
            found = here or there
            notes.note(
                "batch size",
                f"another way than at batch {largest}",
                "each bucket is recorded with the way that its size takes",
                "nothing, if the branch follows from the batch size alone",
                site=Site(found, None),
            )
            return


def _lines(entries: Sequence[Entry]) -> list[Place | None]:
    """The lines that operations were called from, each run of equal ones once."""
    lines: list[Place | None] = []
    for entry in entries:
        if not lines or lines[-1] != entry.site.place:
            lines.append(entry.site.place)
    return lines
