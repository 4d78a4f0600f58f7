"""Wrapping functions of vLLM: once, whatever the number of times the plugin is loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "__graphcap__"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> bool:
    """Replace ``owner.name`` by a function that calls ``around(original, *args, **kwargs)``.

    Returns:
        False where graphcap has wrapped it before: nothing was done.
    """
    original = vars(owner).get(name) or getattr(owner, name)
    if hasattr(original, _MARK):
        return False

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)
    return True


def is_wrapped(owner: Any, name: str) -> bool:
    return hasattr(getattr(owner, name, None), _MARK)
