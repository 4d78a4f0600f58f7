"""Writes the table of docs/footguns.md, "What graphcap refuses, and why", from the docstrings of these tests.

python tests/footguns/footguns_page.py            rewrite the page between its markers
python tests/footguns/footguns_page.py --check    exit code 1 if the page is not what the tests say

A test is called test_NN_… after its case. The docstring of one test of each case has two sentences,
``Elsewhere: what went wrong in other capture layers.`` and ``Here: what graphcap does.`` Every other
test tells a further way into the same fault: ``Kin: …``
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "footguns.md"
BEGIN, END = "<!-- footguns: begin -->", "<!-- footguns: end -->"
CASES = range(1, 26)

_GROUPS = {
    1: "Ladder and dispatch",
    8: "Pool and addresses",
    14: "Capture",
    20: "Padding",
    24: "Reports",
}
_STATED = re.compile(r"Elsewhere: (?P<fault>.+?)\.? Here: (?P<answer>.+?)\.?$")
_KIN = re.compile(r"Kin: (?P<kin>.+?)\.?$")


@dataclass
class Case:
    """What the tests say of one case."""

    number: int
    faults: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    kin: list[str] = field(default_factory=list)
    on_a_device: int = 0
    """How many of its tests need a CUDA device."""


def documented_tests() -> Iterator[tuple[Path, str, str]]:
    """File, name and docstring (on one line) of every test, those of a CPU first."""
    files = [*sorted(HERE.glob("test_footgun_*.py")), *sorted((HERE / "gpu").glob("test_*.py"))]
    for path in files:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield path, node.name, " ".join((ast.get_docstring(node) or "").split())


def cases() -> dict[int, Case]:
    """Every case by its number.

    Raises:
        ValueError: names a test whose name or docstring has another form.
    """
    found = {number: Case(number) for number in CASES}
    for path, name, text in documented_tests():
        number = re.match(r"test_(\d\d)_", name)
        stated, kin = _STATED.match(text), _KIN.match(text)
        if number is None or int(number[1]) not in found or not (stated or kin):
            raise ValueError(
                f"{path.name}: {name}: expected test_NN_… with 'Elsewhere: … Here: …' or 'Kin: …', "
                f"found {text!r}"
            )
        case = found[int(number[1])]
        case.on_a_device += path.parent.name == "gpu"
        if stated:
            case.faults.append(stated["fault"])
            case.answers.append(stated["answer"])
        elif kin:
            case.kin.append(kin["kin"])
    return found


def table() -> str:
    """One row for each case."""
    lines = ["| | elsewhere | graphcap | further ways tried |", "|--:|---|---|--:|"]
    for case in cases().values():
        if case.number in _GROUPS:
            lines.append(f"| | **{_GROUPS[case.number]}** | | |")
        lines.append(f"| {case.number} | {case.faults[0]} | {case.answers[0]} | {len(case.kin)} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """`text` with the table as the tests say."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def main() -> int:
    text = PAGE.read_text()
    wanted = filled(text)
    if "--check" in sys.argv:
        return 0 if wanted == text else 1
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
