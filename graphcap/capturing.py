"""BucketCapture: warms up, records and verifies one bucket after another; a failure costs its bucket."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from graphcap.census import Census
from graphcap.comparing import AnotherRankFailed
from graphcap.errors import CaptureError, GraphcapError, VerificationError, anchor_in
from graphcap.explain import warn
from graphcap.inputs import NUM_ROWS, Inputs
from graphcap.recorders.base import BoundStep, Recorder, Recording
from graphcap.recorders.source import is_out_of_memory, raising_line
from graphcap.report import BucketReport
from graphcap.undo import let_go
from graphcap.verify import Verifier

logger = logging.getLogger(__name__)


_STRANDED_BYTES = 2**20
"""What a failed attempt may leave behind while other recordings live."""


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
                census = recording.census()
                if self._strict:
                    check_allocations(census, size)
            except BaseException:
                recording.close()
                raise
            self.recordings[size] = recording
            self.reports[size] = BucketReport(
                size,
                census.total,
                census.allocations,
                recording.nbytes,
                took,
                pointers=recording.pointers,
            )

    def check_pointers(self) -> tuple[int, ...]:
        """Give up buckets whose recordings point at memory that was freed since they were made.

        Returns:
            Those buckets.
        """
        dangling = self._recorder.dangling(self.recordings)
        for size, error in dangling.items():
            with self._costs_only(size, "not_recorded", "recorded"):
                raise error
        for size, recording in self.recordings.items():
            self.reports[size] = replace(self.reports[size], pointers=recording.pointers)
        return tuple(dangling)

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

    def taken_back(self) -> list[int]:
        """The buckets to record once more, from the largest down, because memory is stranded: a failed
        attempt took it in the graph memory pool of the recordings, which torch gives back only as a
        whole. Their recordings are closed. Empty: nothing worth it."""
        if self._recorder.stranded <= _STRANDED_BYTES or not self.recordings:
            return []
        sizes = sorted(self.recordings, reverse=True)
        self.close()
        for size in sizes:
            del self.reports[size]
        self._recorder.reclaim()
        return sizes

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
        handled = sys.exc_info()[1]
        try:
            yield
        except AnotherRankFailed as error:
            elsewhere = VerificationError(f"bucket {size}: {error}")
            let_go(error, handled)
            self.drop(size, Failure("rank_failed", str(elsewhere)))
            if self._strict:
                raise elsewhere from error
        except GraphcapError as error:
            let_go(error, handled)
            self.drop(size, Failure(reason, str(error)))
            if self._strict:
                raise
        except Exception as error:
            text = _explained(error, size, phase)
            let_go(error, handled)
            self.drop(size, Failure(reason, str(CaptureError(text))))
            if self._strict:
                raise CaptureError(text) from error
        finally:
            del handled


def _explained(error: Exception, size: int, phase: str) -> str:
    line = raising_line(error.__traceback__)
    if is_out_of_memory(error):
        return (
            f"bucket {size}: out of memory at {line} while the step was {phase}: {error}; record fewer "
            f"or smaller buckets (GRAPHCAP_BUCKETS) or leave the device more free memory"
        )
    return (
        f"bucket {size}: {type(error).__name__} at {line} while the step was {phase}: {error}; "
        f"{_cure(phase)}"
    )


def _cure(phase: str) -> str:
    """What to do where a step fails while it is `phase`."""
    if phase == "warmed up":
        return "it fails without graphcap as well"
    if phase == "recorded":
        return "the same step ran when it was warmed up: look for what differs from run to run"
    if phase == "verified":
        return (
            "verification also runs the step eagerly, on other inputs than the recorded ones: run it so "
            "by itself, or give CaptureManager an example of realistic batches"
        )
    return "run() would fail the same way: mend it, or leave it out with GRAPHCAP_VERIFY=off"


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
        is_dense = isinstance(tensor, torch.Tensor) and not tensor.is_nested
        if not is_dense or tensor.layout != torch.strided or tensor.shape[:1] != (size,):
            if not is_dense:
                found = (
                    "a nested one" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                )
            elif tensor.layout != torch.strided:
                found = f"one of layout {tensor.layout}"
            else:
                found = str(tuple(tensor.shape))
            raise CaptureError(
                f"bucket {size}: output {name!r} must be a tensor whose first dimension is the "
                f"batch ({size} rows), found {found}; return per-row tensors"
            )
