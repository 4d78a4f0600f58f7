"""A report is data: whatever it says, it says it on the page and does nothing there."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from altered import hostile
from html_reading import Page

pytest.importorskip("matplotlib", reason="the page's charts need matplotlib: the extra `plot`")

from graphcap.page.document import page
from graphcap.page.reading import read_run

TEXTS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</title></style></svg></textarea>-->",
    "]]><![CDATA[<b>",
    "&lt;b&gt; &amp; &#60;",
    "$\\frac{1}{$ \\input{x} $$",
    "\x00\x01\x1b[31m\x7f\ud800\ufffe",
    "\u202egnp.exe\u2066",
    "漢字 한글 \U0001f600 عربى",
    "url(#wide) var(--ink) #010101",
    "x" * 100_000,
]


def drawn(report: dict[str, Any], text: str) -> str:
    content = json.dumps(hostile(report, text)).encode()
    return page(read_run(content, f"run{text}.json"))


OURS = ("title", "style", "svg", "table", "tr", "td", "th", "section", "div", "b", "i", "p", "li")


@pytest.fixture(scope="module")
def harmless(decoded: dict[str, Any], plugged: dict[str, Any]) -> dict[str, Counter[str]]:
    """Elements of the page of each report with a text that means nothing to a browser."""
    return {
        kind: Counter(tag for tag, _ in Page(drawn(report, " harmless")).elements)
        for kind, report in (("decoded", decoded), ("plugged", plugged))
    }


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("kind", ["decoded", "plugged"])
def test_texts_stay_text(
    request: pytest.FixtureRequest, harmless: dict[str, Counter[str]], kind: str, text: str
):
    html = drawn(request.getfixturevalue(kind), text)
    html.encode()  # no half of a surrogate pair
    found = Page(html)
    assert found.unclosed == []
    elements = Counter(tag for tag, _ in found.elements)
    for tag in OURS:  # no more than there were, and no fewer
        assert elements[tag] == harmless[kind][tag], tag
    assert elements.keys() - harmless[kind].keys() <= {"wbr"}
    for _, attributes in found.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
    assert not any((ord(c) < 32 and c not in "\t\n") or 0xD800 <= ord(c) < 0xE000 for c in html)
    assert len(html) < 2_000_000
    start = text[:20]
    if start.isprintable():
        assert start in found.everything
