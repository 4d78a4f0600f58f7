"""Typed access to a config.json: every error names the model, the key, what was found and the cure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from graphcap.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
"""The dtypes of weights that the decode step has kernels for."""


def same(found: Any, accepted: Any) -> bool:
    # In Python True == 1 and False == 0; in a config they are different statements.
    return isinstance(found, bool) == isinstance(accepted, bool) and bool(found == accepted)


def refuse(label: str, found: Any, expected: str, cure: str) -> CheckpointError:
    """The error for one value: what it is called, what was expected, what was found, the cure."""
    kind = type(found).__name__
    return CheckpointError(f"{label}: expected {expected}, found {found!r} ({kind}). {cure}")


def check_int(label: str, value: Any, minimum: int, cure: str) -> int:
    """`value` if it is an int (not a bool) of at least `minimum`; otherwise CheckpointError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise refuse(label, value, f"an integer >= {minimum}", cure)
    return value


def check_float(label: str, value: Any, cure: str) -> float:
    """`value` as a float if it is a finite number > 0 (not a bool); otherwise CheckpointError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refuse(label, value, "a number > 0", cure)
    if not (math.isfinite(value) and value > 0):
        raise refuse(label, value, "a finite number > 0", cure)
    return float(value)


def check_bool(label: str, value: Any, cure: str) -> bool:
    """`value` if it is True or False; otherwise CheckpointError."""
    if not isinstance(value, bool):
        raise refuse(label, value, "true or false", cure)
    return value


def check_ints(label: str, value: Any, cure: str) -> tuple[int, ...]:
    """`value` as a tuple if it is a list or tuple of integers >= 0; otherwise CheckpointError."""
    if not isinstance(value, (list, tuple)):
        raise refuse(label, value, "a list of integers >= 0", cure)
    return tuple(check_int(f"{label}[{i}]", item, 0, cure) for i, item in enumerate(value))


class Reader:
    """Typed access to one config; every error names the model, the key, and the cure."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name

    def label(self, key: str) -> str:
        return f"config of {self.name}: '{key}'"

    def refuse(self, key: str, found: Any, expected: str, cure: str) -> CheckpointError:
        return refuse(self.label(key), found, expected, cure)

    def value(self, *keys: str, default: Any = None) -> tuple[str, Any]:
        """The first present key of several spellings of one value; they must not disagree."""
        present = [(k, self.config[k]) for k in keys if self.config.get(k) is not None]
        for key, value in present[1:]:
            if not same(value, present[0][1]):
                raise self.refuse(
                    key,
                    value,
                    f"the same as '{present[0][0]}', {present[0][1]!r}",
                    "Remove the wrong one.",
                )
        return present[0] if present else (keys[0], default)

    def required(self, *keys: str) -> tuple[str, Any]:
        key, value = self.value(*keys)
        if value is None:
            raise CheckpointError(
                f"config of {self.name}: '{key}' is missing. The model cannot be computed without it;"
                " add it to config.json with the value the model was trained with."
            )
        return key, value

    def integer(self, *keys: str, minimum: int = 1) -> int:
        key, value = self.required(*keys)
        return check_int(self.label(key), value, minimum, "Correct config.json.")

    def number(self, key: str) -> float:
        return check_float(self.label(key), self.required(key)[1], "Correct config.json.")

    def flag(self, key: str, default: bool | None) -> bool:
        value = self.required(key)[1] if default is None else self.value(key, default=default)[1]
        return check_bool(self.label(key), value, "Correct config.json.")


def parse_dtype(label: str, value: Any) -> torch.dtype:
    """A dtype of `DTYPES`, given as a torch.dtype or as its name with or without "torch."."""
    name = str(value).removeprefix("torch.")
    if not isinstance(value, (str, torch.dtype)) or name not in DTYPES:
        cure = "Convert the weights, or ask for one of these dtypes."
        raise refuse(label, value, "one of " + ", ".join(DTYPES), cure)
    return DTYPES[name]
