"""ManySteps: what lets a manager run several steps by one call: the ring at the end of every step, and
loops on the device where they can be had."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from graphcap.buckets import is_count
from graphcap.errors import BackendError, GraphcapError, InputError
from graphcap.explain import warn
from graphcap.inputs import Inputs
from graphcap.recorders.base import Loop, Recording
from graphcap.ring import Ring, RingBuffer
from graphcap.undo import let_go
from graphcap.verify import Verifier

logger = logging.getLogger(__name__)

Step = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""All that a model owes. Gets the slots (bucket rows each) and ``num_rows``; may write into slots in
place; returns tensors whose first dimension is the batch. May have an attribute ``kernel_choices``, a
tuple of `graphcap.operations.KernelChoice` for the report, and a method ``bucket_choice(rows)``, whose
result's text says there how it runs a bucket and why."""


class ManySteps:
    """Owns the ring of a manager and the loops of its recordings.

    Attributes:
        buffer: the ring for all batches that fit the slots.
        loops: by bucket, of the recordings that have one.
        why_not: why the others have none; None: they all have, or none was tried yet.
    """

    def __init__(self, ring: Ring, inputs: Inputs) -> None:
        self.ring = ring
        self.buffer = RingBuffer(ring, inputs.max_batch, inputs.device)
        self.loops: dict[int, Loop] = {}
        self.why_not: str | None = None
        self._device = inputs.device
        self._wide: RingBuffer | None = None

    def ending(self, step: Step) -> Step:
        """`step`, and then the write into the ring."""

        def kept(inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            buffer = self.buffer_of(next(iter(inputs.values())).shape[0])
            buffer.place.check()
            outputs = step(inputs)
            buffer.write(outputs)
            return outputs

        return kept

    def buffer_of(self, rows: int) -> RingBuffer:
        """The ring of batches of `rows` rows; one of its own for a batch that is too large for the slots."""
        if rows <= self.buffer.rows:
            return self.buffer
        if self._wide is None or self._wide.rows != rows:
            self._wide = RingBuffer(self.ring, rows, self._device)
        return self._wide

    def check_place(self) -> None:
        """Raises `StaleRecordingError` where memory of the ring, which every step writes to, has moved."""
        self.buffer.place.check()
        if self._wide is not None:
            self._wide.place.check()

    def anew(self) -> None:
        """Another batch has come: none of its rows has ended."""
        self.buffer.anew()
        self._wide = None

    def came(self, rows: int) -> None:
        """As `anew`, in front of a step that may be the last of one of the `rows` rows: one launch where
        rows can end. Raises as `check_place`."""
        self.check_place()
        self.anew()
        if self.ring.stop is not None:
            self.buffer_of(rows).revive(rows)

    def check(self, steps: int) -> None:
        """Raises `InputError` where the ring has no room for so many `steps`."""
        if not is_count(steps):
            raise InputError(f"run_many: expected a number of steps of at least 1, found {steps!r}")
        if steps > self.ring.length:
            raise InputError(
                f"run_many: expected at most {self.ring.length} steps, the length of the ring, found "
                f"{steps}; make the manager with Ring(length={steps}, ...) or call it more often"
            )

    def make_loops(self, recordings: Mapping[int, Recording], verifier: Verifier) -> None:
        """A loop of each recording, held against replays one by one. One that cannot be had costs the
        speed of its bucket and nothing else."""
        for size, recording in recordings.items():
            try:
                buffer = self.buffer
                loop = recording.repeated(buffer.left, buffer.live[:size], buffer.start)
            except BackendError as error:
                self.why_not = str(error.args[0])
                continue
            except Exception as error:  # no memory for the loop, a driver that fails
                self._without(size, error)
                continue
            try:
                verifier.check_loop(recording, loop, size)
                self.loops[size] = loop
            except BaseException as error:
                loop.close()
                if not isinstance(error, Exception):
                    raise
                self._without(size, error)
        self.anew()

    def _without(self, size: int, error: Exception) -> None:
        let_go(error, None)
        self.why_not = (
            str(error.args[0])
            if isinstance(error, GraphcapError)
            else f"{type(error).__name__}: {error}"
        )
        warn(
            logger, "run-many", "run_many() replays bucket %d step by step: %s", size, self.why_not
        )

    @property
    def note(self) -> str | None:
        """For the capture report: what keeps `run_many` from one launch a call."""
        if self.why_not is None:
            return None
        having = f"; buckets {sorted(self.loops)} have one" if self.loops else ""
        return (
            f"run_many() enqueues its replays one by one, without a loop on the device: "
            f"{self.why_not}{having}"
        )

    def drop(self, size: int) -> None:
        """Bucket `size` is given up."""
        if size in self.loops:
            self.loops.pop(size).close()

    def close(self) -> None:
        """Give back the loops; before their recordings. Idempotent."""
        for size in list(self.loops):
            self.loops[size].close()  # once more where an interrupt comes between
            del self.loops[size]
        self.why_not, self._wide = None, None
        self.buffer.anew()
