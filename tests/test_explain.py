"""Each error and WARNING points to a section of docs/troubleshooting.md, and each section is pointed to."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphcap import cli, errors, explain
from graphcap.errors import CaptureError, GraphcapError, PoolFrozenError, anchor_in, pointed
from graphcap.page.fallbacks import REASONS

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "graphcap").rglob("*.py"))
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, GraphcapError) and kind is not GraphcapError
}


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            yield path, node


def called(node: ast.AST) -> str | None:
    """The bare name of what a call calls."""
    if not isinstance(node, ast.Call):
        return None
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", None)


def literals(node: ast.AST) -> list[str]:
    return [
        n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]


def warnings() -> list[tuple[str, ast.Call]]:
    """Anchor and call of each `warn(logger, anchor, text, …)`."""
    found = []
    for path, node in nodes():
        if called(node) == "warn" and isinstance(node, ast.Call) and len(node.args) >= 3:
            (anchor,) = literals(node.args[1])[-1:] or pytest.fail(f"{path}:{node.lineno}")
            found.append((anchor, node))
    return found


def made() -> set[str]:
    """Kinds of errors that the code makes, whether it raises them there or hands them on."""
    return {name for _, node in nodes() if (name := called(node)) in KINDS}


# -- every message has a section, every section a message --------------------------------------------


def test_every_error_that_is_made_has_a_section():
    assert len(made()) >= 12
    for name in made():
        assert KINDS[name].anchor in explain.sections(), name


def test_kinds_have_anchors_of_their_own():
    anchors = [kind.__dict__.get("anchor") for kind in KINDS.values()]
    assert None not in anchors
    assert len(set(anchors)) == len(anchors)


def test_the_base_is_never_raised_and_no_kind_hides_its_pointer():
    for path, node in nodes():
        assert called(node) != "GraphcapError", path
        if isinstance(node, ast.ClassDef) and node.name != "GraphcapError":
            bases = {ast.unparse(base) for base in node.bases}
            if bases & {*KINDS, "GraphcapError"}:
                assert path.name == "errors.py", f"{path}: {node.name} belongs into errors.py"


def test_every_warning_has_a_section_with_its_text():
    found = warnings()
    assert len(found) >= 20
    for anchor, call in found:
        section = explain.sections()[anchor]
        text = " ".join(literals(call.args[2]))
        for piece in re.split(r"%[sd]|: ", text.split(";")[0]):
            piece = piece.strip(" ,()")
            if len(piece) > 12:
                assert piece in section, f"{anchor} does not tell of: {text}"


def test_no_warning_goes_without_a_pointer():
    for path, node in nodes():
        if (
            called(node) in ("warning", "error", "critical", "exception")
            and path.name != "explain.py"
        ):
            value = getattr(node.func, "value", None)  # type: ignore[attr-defined]
            assert getattr(value, "id", "") not in ("logger", "logging"), f"{path}:{node.lineno}"  # type: ignore[attr-defined]


def test_every_section_is_pointed_to():
    used = {KINDS[name].anchor for name in made()} | {anchor for anchor, _ in warnings()}
    assert set(explain.sections()) == used


def test_quoted_messages_are_messages_of_the_code():
    cells = re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)
    quoted = [message for cell in cells for message in re.findall(r"`(.*?)`", cell)]
    assert len(quoted) >= 70
    source = " ".join(path.read_text() for path in SOURCES)
    # Messages stand in the source as adjacent string literals, with values in braces.
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    source = re.sub(r"\{[^{}]*\}|%s|%d", "…", source)
    for message in quoted:
        for part in re.split(r"…| N |: |\(|\)", message):
            assert part.strip(" :;()") in source, message


# -- what a user sees ----------------------------------------------------------------------------


def test_an_error_ends_with_one_pointer_and_quotes_none():
    inner = PoolFrozenError("the pool is frozen")
    assert str(inner) == "the pool is frozen (graphcap explain pool-frozen)"
    assert inner.args == ("the pool is frozen",)
    outer = CaptureError(f"bucket 8: {inner}; skipped")
    assert str(outer) == "bucket 8: the pool is frozen; skipped (graphcap explain capture)"
    assert anchor_in(str(inner), "fallback") == "pool-frozen"
    assert anchor_in("no pointer here", "fallback") == "fallback"
    assert str(GraphcapError("plain")) == "plain"


def test_a_warning_ends_with_one_pointer(caplog: pytest.LogCaptureFixture):
    logger = logging.getLogger("graphcap.test")
    error = PoolFrozenError("100% full")
    with caplog.at_level(logging.WARNING, "graphcap"):
        explain.warn(logger, "capture", "bucket %d: %s", 8, error)
        explain.warn(logger, "capture", "100% full")
    first, second = caplog.records
    assert first.getMessage() == "bucket 8: 100% full (graphcap explain capture)"
    assert second.getMessage() == "100% full (graphcap explain capture)"
    assert first.filename == "test_explain.py"  # where it was said, not the helper


def test_the_pointer_is_a_command_that_works(capsys: pytest.CaptureFixture[str]):
    (command,) = re.findall(r"\(graphcap (.*)\)$", pointed("a message", "pool-frozen"))
    assert cli.main(command.split()) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("A step asked the frozen pool")
    assert "Warm up with the largest shapes" in printed
    assert "\n#" not in printed


def test_explain_lists_every_section(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
    assert all(line.endswith(".") for line in lines)


def test_explain_prints_json(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["explain", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == list(explain.sections())
    assert cli.main(["explain", "nvtx", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"anchor": "nvtx", "text": explain.sections()["nvtx"]}


def test_a_name_that_is_none_gets_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["explain", "pol-frozen"]) == 2
    assert "did you mean pool-frozen?" in capsys.readouterr().err
    assert cli.main(["explain", "###"]) == 2
    assert "graphcap explain lists what is" in capsys.readouterr().err


def test_a_section_ends_at_the_next_heading():
    assert all("\n## " not in text and text for text in explain.sections().values())


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_a_reason_of_a_fallback_is_explained(reason: str) -> None:
    """By the name that counters, logs and reports give; what has a section of its own has that."""
    text = explain.section(reason)
    if reason != "verification":
        assert text == explain.section("fallback")
        assert f"| `{reason}` |" in text


def test_what_only_looks_like_a_reason_is_not() -> None:
    for name in ("message", "above_max", "not_recorded` | the bucket"):
        with pytest.raises(errors.InputError, match="nothing is told under"):
            explain.section(name)
