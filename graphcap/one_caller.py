"""OneCaller: an object that serves one call at a time, and none from inside a step that is recorded.

An interrupt (Ctrl-C) may arrive in any call, also in the one that has just acquired the lock. So the lock
is one that knows its owner, it is acquired inside the ``try`` that gives it back, and whether there is
anything to give back is asked of the lock itself. What remains: a second interrupt while the first one is
on its way out, and on Python 3.10, which looks for interrupts between any two instructions, the two or
three of them in front of ``release()``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from graphcap.errors import StateError
from graphcap.operations import current_observer

_Caller = TypeVar("_Caller", bound="OneCaller")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Method = Callable[Concatenate[_Caller, _Arguments], _Result]


class OneCaller:
    """A second caller gets a `StateError` and harms nothing."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # never acquired twice: it is asked for its owner before

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        lock = self._lock
        if current_observer() is not None or lock._is_owned():  # type: ignore[attr-defined]
            raise self._busy(what)
        try:
            if not lock.acquire(blocking=False):
                raise self._busy(what)
            yield
        finally:
            try:  # noqa: SIM105  a with statement would be calls in front of this one
                lock.release()
            except RuntimeError:  # another thread's
                pass

    def _busy(self, what: str) -> StateError:
        if current_observer() is not None:
            return StateError(
                f"{what} was called inside a step that is being recorded; "
                f"recordings do not nest: call it outside the step"
            )
        return StateError(
            f"{what} was called while this manager is in use, by another thread or by its own step; "
            f"a manager serves one call at a time: use one per thread, or a lock"
        )


def alone(
    method: _Method[_Caller, _Arguments, _Result],
) -> _Method[_Caller, _Arguments, _Result]:
    """Decorator: a method of a `OneCaller` that is called at every step. As `_alone`, without making a
    context manager."""
    what = f"{method.__name__}()"

    @wraps(method)
    def call(self: _Caller, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        lock = self._lock
        if current_observer() is not None or lock._is_owned():  # type: ignore[attr-defined]
            raise self._busy(what)
        try:
            if lock.acquire(False):
                return method(self, *args, **kwargs)
        finally:
            try:  # noqa: SIM105  a with statement would be calls in front of this one
                lock.release()
            except RuntimeError:  # another thread's
                pass
        raise self._busy(what)

    return call
