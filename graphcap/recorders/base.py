"""What every recorder and every recording owe."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphcap.census import Census
from graphcap.errors import BackendError, CaptureError, StateError
from graphcap.graph_addresses import PointerReport
from graphcap.live_memory import Range

BoundStep = Callable[[], Mapping[str, torch.Tensor]]
"""A step bound to the slots of one bucket: runs on the device, returns its outputs."""


class Loop(ABC):
    """A recording that the device runs again and again by itself; see `Recording.repeated`.

    Attributes:
        nbytes: device memory that making it took, measured.
    """

    nbytes: int = 0

    @abstractmethod
    def launch(self) -> None:
        """Run the step until nothing is left or live: one launch. Asynchronous, on the current stream."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is owned; before the recording is closed. Idempotent."""


class Recording(ABC):
    """A recorded step. Owns or pins every address that it uses until it is closed.

    Attributes:
        outputs: the tensors that every replay writes. Their contents last until the next replay of
            any recording that shares the step's pool.
        nbytes: memory that making this recording took, measured, in bytes.
        pinned: storages that the step reads or writes and that it did not make itself (slots, pool,
            weights, caches): kept alive as long as the recording.
        pointers: of the check of a graph's addresses; None: there is no graph, or it was not asked for.
            The entries of a tape hold tensors, and so keep alive what they point at.
    """

    outputs: Mapping[str, torch.Tensor]
    nbytes: int
    pinned: tuple[torch.UntypedStorage, ...]
    pointers: PointerReport | None = None

    def __reduce_ex__(self, protocol: object) -> Any:
        """Neither a copy nor a pickle: a recording is addresses of this process."""
        raise StateError(
            "a recording cannot be copied or pickled: it points at the tensors of this one; capture "
            "again for the copy"
        )

    @abstractmethod
    def replay(self) -> None:
        """Run the step once: one launch. Asynchronous on a CUDA device, on the current stream."""

    @abstractmethod
    def census(self) -> Census:
        """What one replay launches."""

    def repeated(
        self,
        left: torch.Tensor,
        live: torch.Tensor,
        begin: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Loop:
        """This recording as the body of a loop on the device.

        Args:
            left: int32 (1,), at least 1 at each launch: the most runs. The loop counts it down.
            live: bool (rows,), contiguous: the loop ends before the run at whose start none is set, but
                runs at least once. Read after each run.
            begin: (place, source), both int64 (n,) and contiguous: each launch copies the source to its
                place before anything else, by the same launch. `left` may lie there. None: nothing.

        Raises:
            BackendError: says why this recording, driver or torch has no such loop.
        """
        raise BackendError("this recorder makes no graphs, which a loop on the device needs")

    @abstractmethod
    def close(self) -> None:
        """Give back everything that is owned. A closed recording cannot be replayed. Idempotent."""


class Recorder(ABC):
    """Makes recordings. Close it after the recordings that it made."""

    name: str
    why: str | None = None
    """Why it is this recorder, where the device might have let expect another; for reports."""
    generators: tuple[torch.Generator, ...] = ()
    """Random generators of the step's own that its recordings draw from."""
    watched: bool = True
    """Whether a step's operations are watched while a CUDA graph captures them: what no graph can hold is
    refused by name before it breaks the capture, operations are counted one by one, and what they read
    is kept alive. Of many like recordings (the buckets of a large model) the first is enough, by a host
    that keeps the model alive itself; the others then take half the time. A tape always watches."""

    checks_pointers: bool = True
    """Whether a captured graph's addresses are held against live memory before the graph is replayed."""
    named: Sequence[Range] = ()
    """Memory that is known by name, for messages of that check and its report. Set it before."""

    stranded: int = 0
    """Bytes that failed attempts cost as long as other recordings live: what they took in memory that all
    share, and what others take because they can no longer share it. See `reclaim`."""

    repeatable: bool = False
    """Whether its recordings keep what `Recording.repeated` needs, where torch can. Set it before."""

    @abstractmethod
    def warm_up(self, step: BoundStep) -> Mapping[str, torch.Tensor]:
        """Run `step` eagerly in the surroundings (stream, modes) in which it will be recorded."""

    @abstractmethod
    def record(self, step: BoundStep, bucket: int) -> Recording:
        """Record `step`, which is bound to a batch of `bucket` rows and has been warmed up.

        Raises:
            CaptureError: names the operation, the source line and the cure. The device is usable
                and what the attempt took is given back.
        """

    def dangling(self, recordings: Mapping[int, Recording]) -> Mapping[int, CaptureError]:
        """Look again at what recordings point at and nobody known keeps alive, for the last time: after
        all are made and before the first is replayed.

        Args:
            recordings: by bucket; of this recorder.

        Returns:
            Of those that point at memory which has been freed since they were made.
        """
        return {}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Recordings that are made inside, and closed there, share no memory with others: all that they
        took is given back at the end."""
        yield

    def reclaim(self) -> None:
        """All recordings are closed: give back what is `stranded`."""
        self.stranded = 0

    def close(self) -> None:
        """Give back what the recordings shared. Idempotent."""
        return


@contextmanager
def autocast_casts_not_kept() -> Iterator[None]:
    """Without autocast's cache, which keeps casts of weights from one run of a step to the next: a
    recording would read the cast of then and follow no change of the weight."""
    kept = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)


@contextmanager
def garbage_collection_held() -> Iterator[None]:
    """Collect now, then not again until the end: a collection inside a capture can free CUDA memory
    or call the driver, which breaks the capture, and costs seconds over many buckets."""
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
