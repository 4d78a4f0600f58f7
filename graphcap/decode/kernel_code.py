"""The code of a source file without what only people read: how fast a kernel is does not depend on that."""

from __future__ import annotations

import io
import re
import tokenize

_CUDA_COMMENT = re.compile(r"""("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/""", re.DOTALL)

_BETWEEN_STATEMENTS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)


def code_of(name: str, source: bytes) -> bytes:
    """`source` without comments, docstrings, empty lines and what a line ends with; the same under every
    Python.

    Args:
        name: of the file; one that ends in ``.py`` is Python, any other CUDA C++.
    """
    text = source.decode()
    text = _python(text) if name.endswith(".py") else _CUDA_COMMENT.sub(_kept, text)
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line).encode()


def _kept(found: re.Match[str]) -> str:
    return found[1] or " "


def _python(text: str) -> str:
    """Cut out by position, as Pythons differ in the tokens of an f-string."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    kept, end, before = [], 0, tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        docstring = token.type == tokenize.STRING and before in _BETWEEN_STATEMENTS
        if docstring or token.type == tokenize.COMMENT:
            kept.append(text[end : starts[token.start[0] - 1] + token.start[1]])
            end = starts[token.end[0] - 1] + token.end[1]
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return "".join([*kept, text[end:]])
