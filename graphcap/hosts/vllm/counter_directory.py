"""The directory that the processes of one server share, with a file of counters of each."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from pathlib import Path

from graphcap.explain import warn

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "_GRAPHCAP_METRICS_DIR"  # internal: processes inherit it, users do not set it


def share_directory() -> Path | None:
    """The directory of this server's counters; made, and told to later children, where there is none.

    Called before children are started. The process that made it removes it at its exit; one that is
    killed leaves it in the temporary directory, where nobody reads it. None where it cannot be made.
    """
    known = os.environ.get(DIRECTORY_VARIABLE)
    if known and os.path.isdir(known):
        return Path(known)
    try:
        made = tempfile.mkdtemp(prefix="graphcap-metrics-")
    except OSError as error:
        warn(logger, "metrics", "graphcap metrics are not shown: no temporary directory: %s", error)
        return None
    os.environ[DIRECTORY_VARIABLE] = made
    _MADE.append((made, os.getpid()))
    atexit.register(_remove, made, os.getpid())
    return Path(made)


_MADE: list[tuple[str, int]] = []
"""Directories and the processes that made them: of this one, and inherited where it was forked."""


def made_here() -> Path | None:
    """The directory of this server's counters where this process made it: it sees the others end."""
    return next((Path(made) for made, creator in _MADE if creator == os.getpid()), None)


def _remove(directory: str, creator: int) -> None:
    if os.getpid() == creator:  # a forked child inherits the exit function
        shutil.rmtree(directory, ignore_errors=True)
