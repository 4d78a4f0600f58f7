"""Troubleshooting: the sections of docs/troubleshooting.md, and warnings that point to them."""

from __future__ import annotations

import difflib
import logging
import re
from pathlib import Path

from graphcap.errors import InputError, pointed

_PAGE = Path(__file__).with_name("troubleshooting.md")
"""A link to docs/troubleshooting.md in the repository; an installed graphcap has a copy."""


def warn(logger: logging.Logger, anchor: str, text: str, *values: object) -> None:
    """Log a WARNING that ends with a pointer to section `anchor`, and with no other.

    Args:
        text, values: as for `logging.Logger.warning`.
    """
    logger.warning("%s", pointed(text % values if values else text, anchor), stacklevel=2)


def sections() -> dict[str, str]:
    """Anchor -> text in Markdown, of every section, in the order of the page."""
    parts = re.split(r"^### (.+)\n", _PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    # A heading of a higher level ends a section.
    texts = (re.split(r"^#{1,2} ", text, maxsplit=1, flags=re.MULTILINE)[0] for text in parts[1::2])
    return dict(zip(parts[::2], (text.strip() for text in texts), strict=True))


def section(anchor: str) -> str:
    """The text of one section; of ``fallback`` for the reason of a fallback, such as ``not_recorded``.

    Raises:
        InputError: there is none of that name; names the nearest.
    """
    found = sections()
    if anchor not in found and f"\n| `{anchor}` |" in found["fallback"]:
        anchor = "fallback"
    if anchor not in found:
        near = difflib.get_close_matches(anchor, found, n=1)
        raise InputError(
            f"nothing is told under {anchor!r}; "
            + (f"did you mean {near[0]}?" if near else "graphcap explain lists what is")
        )
    return found[anchor]


def first_sentence(text: str) -> str:
    """What a section begins with, as plain text."""
    return re.split(r"(?<=\.)\s", " ".join(text.replace("`", "").split()), maxsplit=1)[0]
