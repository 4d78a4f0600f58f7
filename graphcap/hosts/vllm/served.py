"""At the end of a server its reports are written again, with what was served.

By the process that made the directory of the counters (the API server, or the one with the `LLM`): it
ends in good order and last, whereas vLLM may kill its workers. What they counted is in their files.
"""

from __future__ import annotations

import atexit
import json
import logging
from pathlib import Path
from typing import Any

from graphcap.explain import warn
from graphcap.hosts.vllm.counter_directory import made_here
from graphcap.hosts.vllm.worker_counts import WorkerCounts, read_workers
from graphcap.report import served_json, write_json

logger = logging.getLogger(__name__)

_registered: set[Path] = set()


def path_of_rank(path: Path, rank: int) -> Path:
    """Where a rank writes the report that ``GRAPHCAP_REPORT`` names: ``run.json``, ``run.rank1.json``, …"""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def write_at_exit(path: Path | None) -> None:
    """Have the reports at `path` written again when this process ends, if it is the one to do so."""
    directory = made_here()
    if path is None or directory is None or path in _registered:
        return
    _registered.add(path)
    # Exit functions run last in, first out: before the one that removes the directory.
    atexit.register(_at_exit, path.absolute())


def _at_exit(path: Path) -> None:
    directory = made_here()
    if directory is not None:  # None in a forked child, which inherits the exit function
        write_served(directory, path)


def write_served(directory: Path, path: Path) -> None:
    """Add ``served`` to the report of every rank that has captured (`graphcap.report.served_json`)."""
    for (_, rank), worker in sorted(read_workers(directory).items()):
        if "capture_ns" not in worker.gauges:
            continue  # no capture, so a report that is there is of another run
        report = path_of_rank(path, rank)
        try:
            plain: dict[str, Any] = json.loads(report.read_text())
            write_json(report, {**plain, "served": served_of(worker)})
        except (OSError, ValueError, TypeError) as error:
            warn(
                logger,
                "report-not-written",
                "what was served was not written to %s: %s",
                report,
                error,
            )


def served_of(worker: WorkerCounts) -> dict[str, Any]:
    """The decode steps of a worker: see `graphcap.report.served_json`."""
    padding = dict.fromkeys(worker.bucket_replays, 0)
    for (bucket, rows), steps in worker.replays.items():
        padding[bucket] += (bucket - rows) * steps
    return served_json(worker.batches, worker.bucket_replays, padding, worker.fallbacks)
