"""The file of a process's counters, which other processes of the same server read while it is written.

A file is a header and records of 64 bytes: the value (int64, native byte order), then its name in UTF-8,
filled up with zeros. A record counts once ``used`` in the header says so, so a name is never read half
written, and names can come while others read.

Names are ``replays BUCKET ROWS``, ``mixed BUCKET``, ``mixed_padding BUCKET``, ``fallbacks REASON``,
``eager ROWS``, and the gauges in `GAUGES`, ``bucket_ns BUCKET`` and ``bucket_bytes BUCKET``.
"""

from __future__ import annotations

import mmap
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

GAUGES = ("capture_ns", "graph_bytes", "pool_bytes")

_WORD = 8
_RECORD = 64
_NAME = _RECORD - _WORD
_FIRST_BYTES = 1024 * _RECORD
_MOST_BYTES = 2**24  # a reader takes no more of a file; 262143 records

# The header, as words. The spare cell takes what has no record.
_MAGIC, CREATED_NS, ENGINE, RANK, USED, SPARE = range(6)
HEADER = 8 * _WORD
_SIGNATURE = int.from_bytes(b"\x89graphc1", sys.byteorder, signed=True)


class CounterFile:
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
        self.cells[CREATED_NS] = time.time_ns()
        self.cells[ENGINE] = engine
        self.cells[RANK] = rank
        self.cells[_MAGIC] = _SIGNATURE  # last: before it no reader takes the file

    def add(self, name: str) -> int:
        """Append a record at zero; its index in `cells`."""
        used = self.cells[USED]
        start = HEADER + used * _RECORD
        if start + _RECORD > len(self._bytes):
            self._map(2 * len(self._bytes))
        text = name.encode(errors="replace")[:_NAME]
        self._bytes[start + _WORD : start + _RECORD] = text.ljust(_NAME, b"\0")
        self.cells[USED] = used + 1
        return start // _WORD

    def _map(self, nbytes: int) -> None:
        with open(self.path, "r+b") as file:
            # Writing into a hole of a mapped file on a full disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self._bytes = memoryview(mmap.mmap(file.fileno(), nbytes))
        self.cells = self._bytes.cast("q")


def read(path: Path) -> bytes | None:
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
    header = os.pread(descriptor, HEADER, 0)
    if len(header) < HEADER:
        return None
    head = words(header)
    if head[_MAGIC] != _SIGNATURE or head[USED] < 0:
        return None
    nbytes = min(HEADER + head[USED] * _RECORD, _MOST_BYTES)
    # Copying a word while it is written may mix old and new bytes; no two copies do so alike.
    data = b""
    for _ in range(4):
        before, data = data, os.pread(descriptor, nbytes, 0)
        if data == before:
            break
    return data if len(data) >= HEADER else None


def words(data: bytes) -> memoryview:
    """The header of what was read; `CREATED_NS`, `ENGINE`, `RANK` and `USED` are places in it."""
    return memoryview(data)[:HEADER].cast("q")


def records(data: bytes) -> Iterator[tuple[str, int]]:
    """Names and values of what was read."""
    for start in range(HEADER, len(data) - _RECORD + 1, _RECORD):
        value = int.from_bytes(data[start : start + _WORD], sys.byteorder, signed=True)
        text = data[start + _WORD : start + _RECORD].partition(b"\0")[0]
        if value >= 0:
            yield text.decode(errors="ignore"), value  # a name cut short may end in half a letter
