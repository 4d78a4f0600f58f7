"""What is counted of a step is the step's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphcap.manager import CaptureManager


@contextmanager
def without_checks(manager: CaptureManager) -> Iterator[None]:
    """Inside, no replay is held against the eager step (``GRAPHCAP_VERIFY=N``): its copies, its
    allocations and the eager run are none of a step's."""
    asked = manager.settings
    manager.settings = replace(asked, verify_every=0)
    try:
        yield
    finally:
        manager.settings = asked
