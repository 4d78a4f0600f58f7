"""What scenarios found, gathered once in a test run, whatever the number of its processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from environments import ScriptFailed, locked


def folder_of_run(factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test run have in common."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def gathered_once(
    folder: Path, version: str, gather: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    """What `gather` returned in the first process that asked; the others wait and read it.

    Raises ScriptFailed in every process where it did in the first.
    """
    file = folder / f"gathered-{version}.json"
    with locked(file.with_suffix(".lock")):
        if not file.exists():
            try:
                found: dict[str, Any] = {"found": dict(gather())}
            except ScriptFailed as failure:
                found = {"failed": str(failure)}
            file.write_text(json.dumps(found))
    found = json.loads(file.read_text())
    if "failed" in found:
        raise ScriptFailed(found["failed"])
    return found["found"]
