"""A page as tests read it: its tables, its text, its ids, and whatever could fetch or run something."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "wbr", "br", "img", "input"}


class Page(HTMLParser):
    """What is on a page.

    Attributes:
        tables: heading of the section -> tables -> rows -> cells.
        text: of each section.
        elements: (tag, attributes) in order.
        unclosed: tags that were open at the end, or closed without being open.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[list[str]]]] = {}
        self.text: dict[str, str] = {}
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.unclosed: list[str] = []
        self._open: list[str] = []
        self._section = ""
        self.feed(html)
        self.close()
        self.unclosed += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "h2":
            self._section = ""
        elif tag == "table":
            self.tables.setdefault(self._section, []).append([])
        elif tag == "tr":
            self.tables[self._section][-1].append([])
        elif tag in ("td", "th"):
            self.tables[self._section][-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1] == tag:
            self._open.pop()
        else:
            self.unclosed.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        if "h2" in self._open:
            self._section += data
        self.text[self._section] = self.text.get(self._section, "") + data
        cell = {"td", "th"} & set(self._open)
        if cell:
            separator = " " if "small" in self._open else ""
            self.tables[self._section][-1][-1][-1] += separator + data

    @property
    def everything(self) -> str:
        return " ".join(self.text.values())

    @property
    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.elements if "id" in attributes]
