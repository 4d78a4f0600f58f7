"""Counters that an engine's workers bump and another process of the same server reads."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping
from pathlib import Path

from graphcap.explain import warn
from graphcap.hosts.vllm.counter_directory import DIRECTORY_VARIABLE
from graphcap.hosts.vllm.counter_file import GAUGES, HEADER, SPARE, CounterFile

logger = logging.getLogger(__name__)


class SharedCounters:
    """The counters of one worker, readable by the other processes of the server.

    A process forked off a writer gets a file of its own at its next bump and starts at zero there.
    One thread at a time bumps. Nothing here raises for want of a directory or of space: what cannot
    be shared is dropped, after one WARNING.

    Args:
        engine: index of the engine core (data-parallel rank), vLLM's own label of that name.
        rank: of the worker within its engine (tensor-parallel rank).
        directory: None: the one that `share_directory` made in this process or in a parent.
    """

    def __init__(self, *, engine: int = 0, rank: int = 0, directory: Path | None = None) -> None:
        self.engine = engine
        self.rank = rank
        self._directory = directory
        self._file: CounterFile | None = None
        self._warned = False
        self._forget()
        self._open()
        _WRITERS.add(self)

    @property
    def path(self) -> Path | None:
        """Of this process's file; None where nothing is shared."""
        return None if self._file is None else self._file.path

    def replay(self, bucket: int, rows: int) -> None:
        """Count a step of `rows` real rows that the recording of `bucket` served."""
        cell = self._replays.get((bucket, rows))
        if cell is None:
            cell = self._replays[bucket, rows] = self._cell(f"replays {bucket} {rows}")
        self._cells[cell] += 1

    def mixed(self, bucket: int, tokens: int) -> None:
        """Count a mixed prefill-decode batch of `tokens` real tokens that a recording served."""
        cell = self._cell(f"mixed {bucket}")
        padding = self._cell(f"mixed_padding {bucket}")
        self._cells[cell] += 1
        self._cells[padding] += bucket - tokens

    def fallback(self, reason: str, rows: int | None = None) -> None:
        """Count a step that ran eagerly.

        Args:
            reason: a short name; of longer ones the first 46 bytes count.
            rows: real rows of a decode step. Each number becomes a time series of its own, so leave
                it out where it is a number of tokens.
        """
        self._add(f"fallbacks {reason}")
        if rows is not None:
            self._add(f"eager {rows}")

    def captured(
        self,
        *,
        seconds: float,
        graph_bytes: int,
        pool_bytes: int,
        bucket_bytes: Mapping[int, int] | None = None,
        bucket_ms: Mapping[int, float] | None = None,
    ) -> None:
        """Say what capture() took. Later calls replace earlier ones.

        Args:
            bucket_bytes, bucket_ms: decode bucket -> memory of its recording, time of a replay.
        """
        for name, value in zip(
            GAUGES, (round(seconds * 1e9), graph_bytes, pool_bytes), strict=True
        ):
            self._set(name, value)
        for bucket, nbytes in (bucket_bytes or {}).items():
            self._set(f"bucket_bytes {bucket}", nbytes)
        for bucket, ms in (bucket_ms or {}).items():
            self._set(f"bucket_ns {bucket}", round(ms * 1e6))

    def _set(self, name: str, value: int) -> None:
        cell = self._cell(name)  # first: it may replace self._cells
        self._cells[cell] = value

    def _add(self, name: str) -> None:
        cell = self._cell(name)  # first: it may replace self._cells
        self._cells[cell] += 1

    def _cell(self, name: str) -> int:
        cell = self._named.get(name)
        if cell is None:
            cell = self._named[name] = self._new_cell(name)
        return cell

    def _new_cell(self, name: str) -> int:
        self._open()
        if self._file is None:
            return SPARE
        try:
            cell = self._file.add(name)
        except OSError as error:
            self._warn(error)
            return SPARE
        self._cells = self._file.cells
        return cell

    def _open(self) -> None:
        if self._file is not None or self._warned:
            return
        directory = self._directory or os.environ.get(DIRECTORY_VARIABLE)
        if not directory:
            return  # nobody reads
        try:
            self._file = CounterFile(Path(directory), self.engine, self.rank)
        except OSError as error:
            self._warn(error)
        else:
            self._cells = self._file.cells

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warn(
                logger,
                "metrics",
                "graphcap metrics of engine %d rank %d are incomplete from now on: %s",
                self.engine,
                self.rank,
                error,
            )

    def _forget(self) -> None:
        """Let go of the file and of every cell in it, so that the next bump opens another."""
        self._file = None
        self._cells = memoryview(bytearray(HEADER)).cast("q")
        self._named: dict[str, int] = {}
        self._replays: dict[tuple[int, int], int] = {}


_WRITERS: weakref.WeakSet[SharedCounters] = weakref.WeakSet()


def _after_fork() -> None:
    for writer in _WRITERS:
        writer._forget()


# Here and not by comparing process ids at each bump, which would cost half as much as the bump.
os.register_at_fork(after_in_child=_after_fork)
