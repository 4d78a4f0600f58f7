"""OneCaller: an object that serves one call at a time, and none from inside a step that is recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from graphcap.errors import StateError
from graphcap.operations import current_observer


class OneCaller:
    """A second caller gets a `StateError` and harms nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if current_observer() is not None or not self._lock.acquire(blocking=False):
            raise self._busy(what)
        try:
            yield
        finally:
            self._lock.release()

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
