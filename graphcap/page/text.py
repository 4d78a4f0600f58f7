"""Text and numbers as a page shows them. Whatever comes from a report goes through `escaped`."""

from __future__ import annotations

import html
import re

ABSENT = "-"
"""Stands where the report has no value."""

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u200b-\u200f\u202a-\u202e\u2066-\u2069]"
)


def clean(text: str, most: int = 2000) -> str:
    """`text` without what no page or drawing may hold (control characters, halves of surrogate pairs,
    marks that turn the direction of writing), cut to `most` characters."""
    text = _UNPRINTABLE.sub("\ufffd", text)
    return text if len(text) <= most else text[: most - 1] + "…"


def escaped(text: str, most: int = 2000) -> str:
    """`text` for an element or an attribute in double quotes."""
    return html.escape(clean(text, most), quote=True)


def breakable(text: str, most: int = 2000) -> str:
    """As `escaped`, for a name that may be broken after an underscore or before a dotted part."""
    return re.sub(r"(?<=_)(?=\w)|(?<=\.)(?=[a-zA-Z])", "<wbr>", escaped(text, most))


def number(value: float | int | None, digits: int = 2) -> str:
    """``1,095``, ``3.87``; `ABSENT` for None."""
    if value is None:
        return ABSENT
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def nbytes(count: int) -> str:
    """``512 B``, ``4.0 KiB``, ``9.40 MiB``."""
    if count < 2**10:
        return f"{count} B"
    if count < 2**20:
        return f"{count / 2**10:,.1f} KiB"
    return f"{count / 2**20:,.2f} MiB"


def microseconds(us: float) -> str:
    return f"{us / 1e3:,.2f} ms" if us >= 1e3 else f"{us:,.1f} µs"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
