"""The plan in a file: what ``graphcap plan --json`` prints, for ``GRAPHCAP_BUCKETS=plan:FILE``."""

from __future__ import annotations

import json
from pathlib import Path

from graphcap.errors import LadderError

PREFIX = "plan:"
_CURE = "write one with: graphcap plan … --json > FILE"


def is_plan(text: str) -> bool:
    """Whether a value of ``GRAPHCAP_BUCKETS`` names a plan."""
    return text.strip().lower().startswith(PREFIX)


def read_plan(text: str) -> tuple[int, ...]:
    """The buckets of the plan that ``plan:FILE`` names, ascending.

    Raises:
        LadderError: the file cannot be read or holds no plan; says what it holds.
    """
    name = text.strip()[len(PREFIX) :].strip()
    if not name:
        raise LadderError(f"expected plan:FILE, found no file after {PREFIX!r}; {_CURE}")
    path = Path(name)
    try:
        text = path.expanduser().read_text(encoding="utf-8", errors="replace")
    except (OSError, RuntimeError) as error:  # RuntimeError: no such home
        why = getattr(error, "strerror", None) or error
        raise LadderError(
            f"the plan {path} cannot be read ({why}, in {Path.cwd()}); {_CURE}"
        ) from error
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LadderError(f"the plan {path} is not JSON: {error}; {_CURE}") from error
    buckets = plain.get("buckets") if isinstance(plain, dict) else None
    if not isinstance(buckets, list):
        found = (
            f"keys {', '.join(list(plain)[:5])}"
            if isinstance(plain, dict)
            else type(plain).__name__
        )
        raise LadderError(
            f"{path} is not a plan: expected an object with 'buckets', found {found}; {_CURE}"
        )
    wrong = [b for b in buckets if isinstance(b, bool) or not isinstance(b, int) or b < 1]
    if wrong or not buckets:
        found = f"{str(wrong[0])[:60]!r} among them" if wrong else "none"
        raise LadderError(
            f"{path} is not a plan: expected 'buckets' to be positive integers, found {found}; {_CURE}"
        )
    return tuple(sorted(set(buckets)))
