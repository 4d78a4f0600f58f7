"""Counters that an engine's workers bump and another process of the same server reads.

Each writing process has one file in a directory that all processes of the server know. A file is a
header and records of 64 bytes: the value (int64, native byte order), then its name in UTF-8, filled
up with zeros. A record counts once ``used`` in the header says so, so a name is never read half
written, and names can come while others read.

Names are ``replays BUCKET ROWS``, ``mixed BUCKET``, ``mixed_padding BUCKET``, ``fallbacks REASON``,
``eager ROWS``, and the gauges in `GAUGES`, ``bucket_ns BUCKET`` and ``bucket_bytes BUCKET``.
"""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import shutil
import stat
import sys
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from graphcap.explain import warn

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "_GRAPHCAP_METRICS_DIR"  # internal: processes inherit it, users do not set it

GAUGES = ("capture_ns", "graph_bytes", "pool_bytes")

_WORD = 8
_RECORD = 64
_NAME = _RECORD - _WORD
_FIRST_BYTES = 1024 * _RECORD
_MOST_BYTES = 2**24  # a reader takes no more of a file; 262143 records

# The header, as words. The spare cell takes what has no record.
_MAGIC, _CREATED_NS, _ENGINE, _RANK, _USED, _SPARE = range(6)
_HEADER = 8 * _WORD
_SIGNATURE = int.from_bytes(b"\x89graphc1", sys.byteorder, signed=True)


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
        self._file: _CounterFile | None = None
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
            return _SPARE
        try:
            cell = self._file.add(name)
        except OSError as error:
            self._warn(error)
            return _SPARE
        self._cells = self._file.cells
        return cell

    def _open(self) -> None:
        if self._file is not None or self._warned:
            return
        directory = self._directory or os.environ.get(DIRECTORY_VARIABLE)
        if not directory:
            return  # nobody reads
        try:
            self._file = _CounterFile(Path(directory), self.engine, self.rank)
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
        self._cells = memoryview(bytearray(_HEADER)).cast("q")
        self._named: dict[str, int] = {}
        self._replays: dict[tuple[int, int], int] = {}


_WRITERS: weakref.WeakSet[SharedCounters] = weakref.WeakSet()


def _after_fork() -> None:
    for writer in _WRITERS:
        writer._forget()


# Here and not by comparing process ids at each bump, which would cost half as much as the bump.
os.register_at_fork(after_in_child=_after_fork)


class _CounterFile:
    """A mapped file of this process. Stays when the process ends; grows when records need it.

    Attributes:
        cells: the file as int64 words; another object after `add` has grown the file.

    Raises:
        OSError: there is no directory, or no space.
    """

    def __init__(self, directory: Path, engine: int, rank: int) -> None:
        descriptor, path = tempfile.mkstemp(
            prefix=f"{os.getpid()}-", suffix=".counters", dir=directory
        )
        os.close(descriptor)
        self.path = Path(path)
        self._map(_FIRST_BYTES)
        self.cells[_CREATED_NS] = time.time_ns()
        self.cells[_ENGINE] = engine
        self.cells[_RANK] = rank
        self.cells[_MAGIC] = _SIGNATURE  # last: before it no reader takes the file

    def add(self, name: str) -> int:
        """Append a record at zero; its index in `cells`."""
        used = self.cells[_USED]
        start = _HEADER + used * _RECORD
        if start + _RECORD > len(self._bytes):
            self._map(2 * len(self._bytes))
        text = name.encode(errors="replace")[:_NAME]
        self._bytes[start + _WORD : start + _RECORD] = text.ljust(_NAME, b"\0")
        self.cells[_USED] = used + 1
        return start // _WORD

    def _map(self, nbytes: int) -> None:
        with open(self.path, "r+b") as file:
            # Writing into a hole of a mapped file on a full disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self._bytes = memoryview(mmap.mmap(file.fileno(), nbytes))
        self.cells = self._bytes.cast("q")


@dataclass
class WorkerCounts:
    """What the processes that were one worker of an engine have counted.

    Attributes:
        replays: (bucket, real rows) -> replays.
        fallbacks: reason -> steps run eagerly.
        eager: real rows -> steps run eagerly, of those whose rows were told.
        mixed, mixed_padding: bucket, in tokens -> mixed batches served, tokens of padding in them.
        gauges: name in `GAUGES` -> latest value.
        bucket_bytes, bucket_ns: decode bucket -> memory of its recording, time of a replay; latest.
    """

    replays: Counter[tuple[int, int]] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    eager: Counter[int] = field(default_factory=Counter)
    gauges: dict[str, int] = field(default_factory=dict)
    mixed: Counter[int] = field(default_factory=Counter)
    mixed_padding: Counter[int] = field(default_factory=Counter)
    bucket_bytes: dict[int, int] = field(default_factory=dict)
    bucket_ns: dict[int, int] = field(default_factory=dict)

    @property
    def padding_rows(self) -> int:
        return sum((bucket - rows) * count for (bucket, rows), count in self.replays.items())

    @property
    def bucket_replays(self) -> Counter[int]:
        totals: Counter[int] = Counter()
        for (bucket, _), count in self.replays.items():
            totals[bucket] += count
        return totals

    @property
    def batches(self) -> Counter[int]:
        """Real rows -> steps, replayed and eager."""
        totals = Counter(self.eager)
        for (_, rows), count in self.replays.items():
            totals[rows] += count
        return totals

    def add(self, name: str, value: int) -> None:
        """Add a record. One that is not understood is left out."""
        kind, _, rest = name.partition(" ")
        try:
            if kind == "replays":
                bucket, rows = rest.split(" ")
                self.replays[int(bucket), int(rows)] += value
            elif kind == "eager":
                self.eager[int(rest)] += value
            elif kind == "mixed":
                self.mixed[int(rest)] += value
            elif kind == "mixed_padding":
                self.mixed_padding[int(rest)] += value
            elif kind == "bucket_bytes":
                self.bucket_bytes[int(rest)] = value
            elif kind == "bucket_ns":
                self.bucket_ns[int(rest)] = value
            elif kind == "fallbacks":
                self.fallbacks[rest] += value
            elif name in GAUGES:
                self.gauges[name] = value
        except ValueError:
            logger.debug("not a counter: %r", name)


def read_workers(directory: Path) -> dict[tuple[int, int], WorkerCounts]:
    """(engine, rank) -> what was counted there, by living and by dead processes.

    Where several processes have been the same worker, counts are summed and the gauges are those of
    the process that began last. Files that are no counters, or not yet, are left out. Never raises.
    """
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix == ".counters")
    except OSError:
        return {}
    contents = sorted(
        (data for path in paths if (data := _read(path)) is not None),
        key=lambda data: _words(data)[_CREATED_NS],
    )
    workers: dict[tuple[int, int], WorkerCounts] = {}
    for data in contents:
        words = _words(data)
        worker = workers.setdefault((words[_ENGINE], words[_RANK]), WorkerCounts())
        for name, value in _records(data):
            worker.add(name, value)
    return workers


def _read(path: Path) -> bytes | None:
    """Header and records of a counter file; None where it is something else."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would make us wait
            return None
        # Not mapped: should the file shrink, reading a mapping would kill the process.
        with path.open("rb") as file:
            return _read_steadily(file.fileno())
    except OSError:
        return None


def _read_steadily(descriptor: int) -> bytes | None:
    header = os.pread(descriptor, _HEADER, 0)
    if len(header) < _HEADER:
        return None
    words = _words(header)
    if words[_MAGIC] != _SIGNATURE or words[_USED] < 0:
        return None
    nbytes = min(_HEADER + words[_USED] * _RECORD, _MOST_BYTES)
    # Copying a word while it is written may mix old and new bytes; no two copies do so alike.
    data = b""
    for _ in range(4):
        before, data = data, os.pread(descriptor, nbytes, 0)
        if data == before:
            break
    return data if len(data) >= _HEADER else None


def _words(data: bytes) -> memoryview:
    return memoryview(data)[:_HEADER].cast("q")


def _records(data: bytes) -> Iterator[tuple[str, int]]:
    for start in range(_HEADER, len(data) - _RECORD + 1, _RECORD):
        value = int.from_bytes(data[start : start + _WORD], sys.byteorder, signed=True)
        text = data[start + _WORD : start + _RECORD].partition(b"\0")[0]
        if value >= 0:
            yield text.decode(errors="ignore"), value  # a name cut short may end in half a letter
