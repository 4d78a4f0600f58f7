"""What every recorder and every recording owe."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from graphcap.census import Census
from graphcap.errors import BackendError

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
    """

    outputs: Mapping[str, torch.Tensor]
    nbytes: int
    pinned: tuple[torch.UntypedStorage, ...]

    @abstractmethod
    def replay(self) -> None:
        """Run the step once: one launch. Asynchronous on a CUDA device, on the current stream."""

    @abstractmethod
    def census(self) -> Census:
        """What one replay launches."""

    def repeated(self, left: torch.Tensor, live: torch.Tensor) -> Loop:
        """This recording as the body of a loop on the device.

        Args:
            left: int32 (1,), at least 1 at each launch: the most runs. The loop counts it down.
            live: bool (rows,), contiguous: the loop ends before the run at whose start none is set, but
                runs at least once. Read after each run.

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
