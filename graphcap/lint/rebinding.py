"""Names that a step binds to another tensor or module while it runs, and the lines that do it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from graphcap.lint.finding import WEAKENS, Notes
from graphcap.lint.places import Place, Site, is_step_code
from graphcap.reachable import Watched, reachable


class Rebinding:
    """Watches what can be reached by name from `step`; `changed` is what a run has rebound."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._before = reachable(step)

    def changed(self) -> list[Watched]:
        rebound = [item for item in self._before if item.found() is not item.value]
        # What hangs below a rebound object has gone with it.
        names = [item.name for item in rebound]
        return [r for r in rebound if not any(r.name.startswith((f"{n}.", f"{n}[")) for n in names)]


@contextmanager
def lines_that_change(items: Sequence[Watched]) -> Iterator[dict[str, Place]]:
    """While the step runs inside: name -> the line after which it was bound to something else.

    Looks after every line of the step's code, which takes time: only for the few items that are known
    to change.
    """
    found: dict[str, Place] = {}
    values = {item.name: item.found() for item in items}
    last: list[Place | None] = [None]

    def look(frame: FrameType, event: str, _: Any) -> Any:
        for item in items:
            now = item.found()
            if now is not values[item.name]:
                values[item.name] = now
                if last[0] is not None:
                    found.setdefault(item.name, last[0])
        last[0] = Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        return look

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return look if is_step_code(frame.f_code.co_filename) else None

    previous = sys.gettrace()
    if items:
        sys.settrace(enter)
    try:
        yield found
    finally:
        if items:
            sys.settrace(previous)
            look(sys._getframe(), "return", None)


def note_rebinding(items: Sequence[Watched], lines: dict[str, Place], notes: Notes) -> None:
    for item in items:
        notes.note(
            "rebinding",
            f"{item.name} is bound to another {'object' if item.address is None else 'tensor'}",
            "a recording goes on writing to the tensor of the recorded run, and nothing watches the "
            "name any more",
            "copy into it in place: tensor.copy_(new)",
            severity=WEAKENS,
            site=Site(lines.get(item.name), None),
        )
