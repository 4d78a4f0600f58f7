"""BucketCapture: warms up, records and verifies one bucket after another; a failure costs its bucket."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from graphcap.census import Census
from graphcap.errors import CaptureError, GraphcapError, anchor_in
from graphcap.explain import warn
from graphcap.inputs import NUM_ROWS, Inputs
from graphcap.recorders.base import BoundStep, Recorder, Recording
from graphcap.recorders.source import raising_line
from graphcap.report import BucketReport
from graphcap.verify import Verifier

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """Why a bucket has no recording: the reason under which its steps are counted, and the text."""

    reason: str
    text: str


class BucketCapture:
    """The recordings of a manager as they come into being.

    Attributes:
        recordings, reports: of the buckets that are recorded (and have not failed verification).
        failures: of the other buckets that were tried.
    """

    def __init__(
        self, recorder: Recorder, inputs: Inputs, verifier: Verifier, *, strict: bool
    ) -> None:
        self.recordings: dict[int, Recording] = {}
        self.reports: dict[int, BucketReport] = {}
        self.failures: dict[int, Failure] = {}
        self._recorder = recorder
        self._inputs = inputs
        self._verifier = verifier
        self._strict = strict

    def warm_up(self, size: int, step: BoundStep) -> None:
        """Run `step` once, every row padding."""
        with self._costs_only(size, "not_recorded", "warmed up"):
            self._inputs.clear()
            check_outputs(self._recorder.warm_up(step), size)
            left = int(self._inputs.views(1)[NUM_ROWS])
            if left != 0:
                raise CaptureError(
                    f"bucket {size}: the step changed inputs['{NUM_ROWS}'] (from 0 to {left}), which "
                    f"tells padding from real rows; write the result into a tensor of its own"
                )

    def record(self, size: int, step: BoundStep) -> None:
        """Record a bucket that could be warmed up."""
        if size in self.failures:
            return
        with self._costs_only(size, "not_recorded", "recorded"):
            self._inputs.clear()
            started = time.perf_counter()
            recording = self._recorder.record(step, size)
            took = (time.perf_counter() - started) * 1e3
            try:
                check_outputs(recording.outputs, size)
                if self._strict:
                    check_allocations(recording.census(), size)
            except CaptureError:
                recording.close()
                raise
            census = recording.census()
            self.recordings[size] = recording
            self.reports[size] = BucketReport(
                size, census.total, census.allocations, recording.nbytes, took
            )

    def verify(
        self,
        size: int,
        step: BoundStep,
        rows: Sequence[int],
        kept: Collection[torch.Tensor],
        unpadded: Callable[[int], BoundStep] | None,
    ) -> None:
        """Hold a recorded bucket against the eager step, once for each number of real `rows`.

        Args:
            kept: tensors that the step reads and that are not its own; see `Verifier.check`.
            unpadded: the step bound to exactly so many rows; None: see `Verifier.check`.
        """
        if size not in self.recordings:
            return
        with self._costs_only(size, "verification", "verified"):
            recording = self.recordings[size]
            worst = max(
                self._verifier.check(
                    recording, step, size, n, kept, None if unpadded is None else unpadded(n)
                )
                for n in rows
            )
            self.reports[size] = replace(self.reports[size], largest_difference=worst)

    def time(self, size: int) -> None:
        """Measure a replay of a recorded bucket."""
        if size not in self.recordings:
            return
        with self._costs_only(size, "verification", "timed"):
            took = self._verifier.time(self.recordings[size], size)
            self.reports[size] = replace(self.reports[size], replay_ms=took)

    def add_bytes(self, size: int, nbytes: int) -> None:
        """A recorded bucket takes more memory than its recording did."""
        report = self.reports[size]
        self.reports[size] = replace(report, nbytes=report.nbytes + nbytes)

    def drop(self, size: int, failure: Failure) -> None:
        """Give up a bucket for a reason from outside."""
        self.failures[size] = failure
        if size in self.recordings:
            self.recordings.pop(size).close()
            del self.reports[size]

    def warn(self) -> None:
        """One WARNING for each different failure, naming all the buckets that it costs."""
        sizes: dict[str, list[int]] = {}
        for size, failure in self.failures.items():
            sizes.setdefault(failure.text.removeprefix(f"bucket {size}: "), []).append(size)
        for text, failed in sizes.items():
            warn(
                logger,
                anchor_in(text, "capture"),
                "%d of %d buckets (%s) are not recorded and run eagerly: %s",
                len(failed),
                len(self.failures) + len(self.recordings),
                ", ".join(map(str, sorted(failed))),
                text,
            )

    def failures_text(self) -> dict[int, str]:
        return {size: failure.text for size, failure in self.failures.items()}

    def close(self) -> None:
        for recording in self.recordings.values():
            recording.close()
        self.recordings.clear()

    @contextmanager
    def _costs_only(self, size: int, reason: str, phase: str) -> Iterator[None]:
        """A failure inside costs bucket `size` and nothing else, unless fallbacks are errors."""
        try:
            yield
        except Exception as error:
            failure: Exception = error
            if not isinstance(error, GraphcapError):
                failure = CaptureError(
                    f"bucket {size}: {type(error).__name__} at {raising_line(error.__traceback__)} "
                    f"while the step was {phase}: {error}"
                    + ("; it fails without graphcap as well" if phase == "warmed up" else "")
                )
            self.drop(size, Failure(reason, str(failure)))
            if self._strict:
                raise failure from error


def check_allocations(census: Census, size: int) -> None:
    """Raises `CaptureError` where a replay allocates; names the operations that do."""
    names = [f"{row.operation} ({row.allocations})" for row in census.rows if row.allocations]
    if names:
        raise CaptureError(
            f"bucket {size}: a replay makes {census.allocations} allocations and GRAPHCAP_STRICT=1 "
            f"allows none; operations that return new storage: {', '.join(names)}; use their "
            f"out= form with a buffer of the pool"
        )


def check_outputs(outputs: Mapping[str, torch.Tensor], size: int) -> None:
    """Raises `CaptureError` unless `outputs` maps names to tensors of `size` rows."""
    if not isinstance(outputs, Mapping) or len(outputs) == 0:
        found = "an empty one" if isinstance(outputs, Mapping) else type(outputs).__name__
        raise CaptureError(
            f"bucket {size}: a step must return a mapping of output names to tensors, found {found}; "
            f"return {{'out': tensor}}"
        )
    for name, tensor in outputs.items():
        if not isinstance(tensor, torch.Tensor) or tensor.shape[:1] != (size,):
            is_tensor = isinstance(tensor, torch.Tensor)
            found = str(tuple(tensor.shape)) if is_tensor else type(tensor).__name__
            raise CaptureError(
                f"bucket {size}: output {name!r} must be a tensor whose first dimension is the "
                f"batch ({size} rows), found {found}; return per-row tensors"
            )
