"""Field: a value of a JSON file that knows where it stands, so that a wrong one can be named."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from graphcap.errors import InputError

CURE = "write the report anew: `graphcap decode --json > run.json`, or GRAPHCAP_REPORT=run.json under vLLM"
_LARGEST = 2**63


class Field:
    """One value of the file `source`, at `path` in it. Every reader raises `InputError`."""

    def __init__(self, value: Any, source: str, path: str = "") -> None:
        self.value = value
        self._source = source
        self._path = path

    def wrong(self, expected: str) -> InputError:
        where = f"{self._source}: {self._path}" if self._path else self._source
        return InputError(f"{where}: expected {expected}, found {shown(self.value)}; {CURE}")

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def __getitem__(self, key: str) -> Field:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        if key not in self.value:
            raise self.wrong(f"an object with {key!r}")
        return self._inner(self.value[key], f".{key}" if self._path else key)

    def get(self, key: str) -> Field | None:
        """The field `key`; None where it is absent or null."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return None if self.value.get(key) is None else self[key]

    def items(self) -> Iterator[tuple[str, Field]]:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        for key in self.value:
            yield key, self[key]

    def list(self) -> list[Field]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return [self._inner(item, f"[{index}]") for index, item in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("text")
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def count(self) -> int:
        """An integer of at least 0."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.wrong("an integer")
        if not 0 <= self.value < _LARGEST:
            raise self.wrong("an integer of at least 0 that fits 64 bits")
        return self.value

    def number(self) -> float:
        """A finite number of at least 0."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise self.wrong("a number")
        if isinstance(self.value, int):
            return float(self.count())
        if not math.isfinite(self.value) or self.value < 0:
            raise self.wrong("a finite number of at least 0")
        return self.value

    def _inner(self, value: Any, step: str) -> Field:
        return Field(value, self._source, self._path + step)


def parse(content: bytes, source: str) -> Field:
    """The file `content`, which must be one JSON object."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        why = str(error).splitlines()[0] if isinstance(error, ValueError) else "nested too deeply"
        raise InputError(
            f"{source}: expected a report as JSON, found none ({why}); {CURE}"
        ) from None
    field = Field(value, source)
    if not isinstance(value, dict):
        raise field.wrong("a report, which is a JSON object")
    return field


def shown(value: Any, most: int = 60) -> str:
    """A value as it stands in a message: one line, not long."""
    if isinstance(value, dict):
        keys = ", ".join(map(repr, list(value)[:8]))
        text = f"an object with {keys or 'nothing in it'}"
        return text[: 3 * most]
    if isinstance(value, list):
        return f"a list of {len(value)}"
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "an integer of thousands of digits"
    return text if len(text) <= most else text[: most - 1] + "…"
