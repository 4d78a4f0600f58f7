"""PointerWatch: what a recorder knows of its device's memory, and the check of its graphs against it."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from graphcap.errors import BackendError, DanglingPointerError
from graphcap.graph_addresses import SHOWN, GraphAddresses, PointerReport
from graphcap.live_memory import AllocatorState, PoolId, Range, RangeMap
from graphcap.pointer_check import KEPT, Findings, Memory, check
from graphcap.recorders.graph_pointers import PointerReader

logger = logging.getLogger(__name__)

NO_BINDINGS = "cuda-bindings cannot be imported (pip install 'vllm-graphcap[cuda]')"
NO_SNAPSHOT = "this allocator gives no snapshot of its memory"


class PointerWatch:
    """Takes the state of torch's allocator when a recording begins and holds its graph against the state
    at its end, and later again.

    Args:
        driver: ``cuda.bindings.driver``, or what answers as it does; None: there is none, and reports
            say that nothing was checked.
        snapshot: gives the segments of torch's allocator; by default torch's own answer.
    """

    def __init__(self, driver: Any, snapshot: Any = None) -> None:
        self.reader = None if driver is None else PointerReader(driver)
        self._snapshot = snapshot or _segments
        self.earlier = RangeMap()

    def look(self) -> AllocatorState | None:
        """The allocator as it is now. What it holds counts as memory of the device from here on, also
        where it is given back. None: it cannot be asked, or there is no use in it."""
        if self.reader is None:
            return None
        try:
            state = AllocatorState(self._snapshot())
        except (RuntimeError, NotImplementedError, KeyError, TypeError) as error:
            logger.debug("the allocator gives no snapshot: %r", error)
            return None
        self.earlier = self.earlier.joined(state.segments)
        return state

    def began(self) -> RecordedPointers:
        """A recording is about to begin."""
        pointers = RecordedPointers(self)
        pointers.begin()
        return pointers


class RecordedPointers:
    """The addresses of one graph. Call `begin` before its capture, `read` at its end, `made` after it, then
    `check`.

    Attributes:
        report: of the first check, with what a later one found.
    """

    def __init__(self, watch: PointerWatch) -> None:
        self.report = PointerReport()
        self._watch = watch
        self._before: AllocatorState | None = None
        self._addresses: GraphAddresses | None = None
        self._pool: PoolId = (-1, -1)
        self._workspaces: PoolId | None = None
        self._kept: list[Range] = []

    def begin(self) -> None:
        """The capture is about to begin."""
        with self._timed():
            self._before = self._watch.look()

    def read(self, graph: Any, operations: Sequence[tuple[int, int, str]] = ()) -> None:
        """Read `graph`, which is being captured or is kept. Never raises: what cannot be read is in the
        report.

        Args:
            graph: its handle; None: it could not be had.
            operations: see `GraphAddresses`.
        """
        with self._timed():
            if self._watch.reader is None:
                self.not_read(NO_BINDINGS)
            elif graph is None:
                self.not_read("the driver does not show the graph that is captured")
            elif self._before is None:
                self.not_read(NO_SNAPSHOT)
            else:
                try:
                    self._addresses = self._watch.reader.read(graph)
                    self._addresses.operations = operations
                except BackendError as error:
                    self.not_read(str(error.args[0]))
                except (AttributeError, TypeError, ValueError) as error:
                    # Bindings unlike those known: no reason to lose the recording.
                    self.not_read(f"the graph cannot be read: {error!r}")

    def made(
        self,
        pool: PoolId,
        storages: Iterable[torch.UntypedStorage],
        workspaces: PoolId | None = None,
    ) -> None:
        """The recording is made.

        Args:
            pool: the memory pool of the graph.
            storages: what the recording keeps alive.
            workspaces: the memory pool of the stream's workspaces.
        """
        self._pool, self._workspaces = pool, workspaces
        self._kept = [
            Range(s.data_ptr(), s.data_ptr() + s.nbytes(), "a tensor that the step reads", KEPT)
            for s in storages
        ]

    def check(self, bucket: int, named: Sequence[Range], now: AllocatorState | None = None) -> None:
        """Resolve every address; from the second time on those whose memory nobody known keeps alive.

        Args:
            named: memory that is known by name.
            now: what `PointerWatch.look` gave after the capture; None: it is asked.

        Raises:
            DanglingPointerError: names node, kernel, argument and what is nearest.
        """
        addresses, reader = self._addresses, self._watch.reader
        if addresses is None or reader is None:
            return
        with self._timed():
            now = now or self._watch.look()
            if now is None:
                self._unchecked(NO_SNAPSHOT)
                return
            known = RangeMap((*named, *self._kept))
            memory = Memory(
                now,
                self._pool,
                known,
                addresses.own,
                self._watch.earlier,
                reader.range_of,
                workspaces=self._workspaces,
            )
            try:
                found = check(addresses, memory, self._before)
            except BackendError as error:
                self._unchecked(str(error.args[0]))
                return
        self._note(found)
        logger.debug("bucket %d: %s", bucket, self.report)
        if found.faults:
            more = f"; {len(found.faults) - 1} more like it" if len(found.faults) > 1 else ""
            raise DanglingPointerError(
                f"bucket {bucket}: {found.faults[0]}{more}; keep the tensor alive as long as the manager: "
                f"make it an attribute of the step, a slot or a buffer of the pool"
            )

    def forget(self) -> None:
        """There will be no further check."""
        self._addresses = self._before = None
        self._kept = []

    def _note(self, found: Findings) -> None:
        assert self._addresses is not None
        if self._before is not None:
            self.report = replace(found.report, ms=self.report.ms)
        elif found.unsure:
            self.report = replace(
                self.report,
                pointers_checked=self.report.pointers_checked - len(found.unsure),
                unsure=(*self.report.unsure, *found.unsure)[:SHOWN],
            )
        self._before, self._addresses.words = None, found.loose
        if not found.loose:
            self.forget()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            took = (time.perf_counter() - started) * 1e3
            self.report = replace(self.report, ms=self.report.ms + took)

    def _unchecked(self, why: str) -> None:
        if self._before is not None:
            self.not_read(why)
        else:  # a later check: what the first one found stands
            logger.debug("pointers are not checked again: %s", why)
            self.forget()

    def not_read(self, why: str) -> None:
        """Nothing of the graph can be checked, and why."""
        self.report = PointerReport(nodes=self.report.nodes, not_checked={why: self.report.nodes})
        self.forget()


def named_ranges(tensors: Iterable[tuple[str, torch.Tensor]], owner: str) -> list[Range]:
    """The memory of `tensors`, for what asks whose an address is. Keeps nothing alive."""
    ranges = []
    for name, tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            start, nbytes = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a tensor that has no memory of its own
            continue
        if start and nbytes:
            ranges.append(Range(start, start + nbytes, name, owner))
    return ranges


def _segments() -> Any:
    return torch.cuda.memory_snapshot(**_without_traces())


@cache
def _without_traces() -> dict[str, bool]:
    """Leaves out the history of allocations, which takes time where one is kept (torch 2.11)."""
    known = inspect.signature(torch.cuda.memory_snapshot).parameters
    return {"include_traces": False} if "include_traces" in known else {}
