"""CaptureLife: what a manager goes through before it serves: warm up, freeze, record, verify.

`capture()` goes through all of it by itself. A host that has to prepare each bucket (an inference
engine that builds attention metadata outside the step) goes through the phases one bucket at a time
and hands over the step that it has bound.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from graphcap.buckets import BucketLadder
from graphcap.capturing import BucketCapture, Failure
from graphcap.checks import Fingerprint
from graphcap.errors import LadderError, StateError
from graphcap.explain import warn
from graphcap.fallback import Fallback
from graphcap.inputs import Inputs
from graphcap.many import ManySteps
from graphcap.operations import current_observer
from graphcap.pool import BufferPool
from graphcap.reachable import Watched, reachable
from graphcap.recorders.base import BoundStep, Recorder, Recording, garbage_collection_held
from graphcap.recorders.select import select_recorder
from graphcap.report import CaptureReport, ManagerStats
from graphcap.ring import Ring
from graphcap.settings import Settings
from graphcap.verify import Example, Verifier

logger = logging.getLogger(__name__)

Step = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""All that a model owes. Gets the slots (bucket rows each) and ``num_rows``; may write into slots in
place; returns tensors whose first dimension is the batch. May have an attribute ``kernel_choices``, a
tuple of `graphcap.operations.KernelChoice` for the report, and a method ``bucket_choice(rows)``, whose
result's text says there how it runs a bucket and why."""

Progress = Callable[[int, int, str], None]
"""Called with (done, of how many, what comes next) while capture() works."""


class Served:
    """A bucket: its recording, what it has served so far, the views it returns by row count."""

    __slots__ = ("batches", "recording", "replays", "size", "views")

    def __init__(self, size: int) -> None:
        self.size = size
        self.recording: Recording | None = None
        self.replays = 0
        self.batches: dict[int, int] = {}
        """Real rows -> replays."""
        self.views: dict[int, Mapping[str, torch.Tensor]] = {}

    @property
    def rows(self) -> int:
        return sum(rows * replays for rows, replays in self.batches.items())

    @property
    def padding_rows(self) -> int:
        return self.replays * self.size - self.rows


class CaptureLife:
    """The life of a manager: *new → warmed → frozen → recorded*; see `CaptureManager`.

    A host calls `warm_up` for every bucket, `freeze`, `record` from the largest bucket down, `verify`
    where it can, then `finish`. A bucket that fails costs that bucket only.
    """

    def __init__(
        self,
        step: Step,
        inputs: Inputs,
        *,
        pool: BufferPool | None = None,
        ladder: BucketLadder | None = None,
        settings: Settings | None = None,
        example: Example | None = None,
        state: Sequence[torch.Tensor | torch.Generator] = (),
        rows_mix: bool = False,
        recorder: Recorder | None = None,
        watched: Callable[[], Sequence[Watched]] | None = None,
        ring: Ring | None = None,
    ) -> None:
        self.step = step
        self.inputs = inputs
        self.settings = Settings.from_env() if settings is None else settings
        self.pool = BufferPool(inputs.device) if pool is None else pool
        self.ladder = ladder or BucketLadder.parse(self.settings.buckets, inputs.max_batch)
        if self.ladder.max_batch != inputs.max_batch:
            raise LadderError(
                f"the ladder ends at {self.ladder.max_batch} and the slots have "
                f"{inputs.max_batch} rows; both must be the maximum batch: "
                f"BucketLadder(sizes, max_batch={inputs.max_batch})"
            )
        self.recorder = recorder or select_recorder(self.settings.recorder, inputs.device)
        self._many = None if ring is None else ManySteps(ring, inputs)
        buffer = None if self._many is None else self._many.buffer
        self._verifier = Verifier(inputs, self.pool, example, state, rows_mix, buffer)
        self.recorder.generators = self._verifier.generators
        if ring is not None:
            self.recorder.repeatable = True
        self._lock = threading.Lock()
        self._state = "new"
        self._watched = watched
        self._seconds = 0.0
        self._before: Sequence[Watched] | None = None
        self._captured = self._new_capture()
        self._served: dict[int, Served] = {size: Served(size) for size in self.ladder}
        self._steady: tuple[Served, int] | None = None  # the last run was a replay of so many rows
        self._fingerprint: Fingerprint | None = None
        self._report: CaptureReport | None = None
        self._fallback = Fallback(
            step if self._many is None else self._many.ending(step),
            inputs,
            self.pool,
            self.ladder,
            strict=self.settings.strict,
        )
        self._unwatched_note: str | None = None
        self._verified = 0
        self._writes_report = False  # a host that goes through the phases itself writes its own

    # -- the phases, one bucket at a time --------------------------------------------------------

    def warm_up(self, size: int, step: BoundStep | None = None) -> None:
        """Run bucket `size` once as it will be recorded, so that the pool and every kernel know it.

        Args:
            step: the step bound to the bucket by a host; None: the manager's own step over its slots.

        Raises:
            StateError: the pool is frozen, or the manager recorded or closed.
            CaptureError: the step failed and ``GRAPHCAP_STRICT=1``.
        """
        with self._phase("warm_up()", ("new", "warmed")):
            self._captured.warm_up(size, self._bound(size, step))
            self._state = "warmed"

    def freeze(self) -> None:
        """Plan the pool from what the warm-ups asked for. A pool shared with other managers is planned
        by the first call, so warm up all of them before.

        Raises:
            PoolLimitError: the plan is larger than ``GRAPHCAP_POOL_MIB``.
        """
        with self._phase("freeze()", ("warmed",)):
            if not self.pool.frozen:
                self.pool.freeze(self.settings.pool_mib)
            self._state = "frozen"
            self._before = self._found()

    def record(self, size: int, step: BoundStep | None = None) -> bool:
        """Record bucket `size`; from the largest down, so that smaller ones find memory there.

        Returns:
            Whether there is a recording now; `failure_of` says why not.
        """
        with self._phase("record()", ("frozen",)):
            self._captured.record(size, self._bound(size, step))
            return size in self._captured.recordings

    def verify(self, size: int, step: BoundStep | None = None) -> None:
        """Hold bucket `size` against `step` run eagerly; see `Verifier`. After all are recorded.

        With the fewest real rows that the bucket serves, and the manager's own step also with all: a
        host's step can be large, and the start of an engine waits for it.
        """
        with self._phase("verify()", ("frozen",)):
            fingerprint = self._pinned_down()
            below = max((other for other in self.ladder if other < size), default=0)
            self._captured.verify(
                size,
                self._bound(size, step),
                sorted({below + 1, size} if step is None else {below + 1}),
                fingerprint.tensors(),
                self._bound if step is None else None,
            )

    def time(self, size: int) -> None:
        """Measure a replay of bucket `size` on a full batch; it is in the report as ``replay_ms``.

        After `verify`, and only where that may be called: it replays a few times, and puts slots,
        `state` and random generators back as verification does. Under tensor parallelism every rank
        must come here for the same bucket, and live parts of a tape need the surroundings of the step
        as they do for `verify`.
        """
        with self._phase("time()", ("frozen",)):
            self._pinned_down()
            self._captured.time(size)

    def finish(self) -> CaptureReport:
        """End the capture: from here on the recordings serve."""
        with self._phase("finish()", ("frozen",)):
            self._pinned_down()
            self._captured.warn()
            if self._many is not None:
                self._many.make_loops(self._captured.recordings, self._verifier)
                for size, loop in self._many.loops.items():
                    self._captured.add_bytes(size, loop.nbytes)
            for size, recording in self._captured.recordings.items():
                self._served[size].recording = recording
        with self._alone("finish()"):
            self._report = self._reported(self._seconds)
            self._state = "recorded"
            return self._report

    def drop(self, size: int, reason: str, text: str) -> None:
        """Give up bucket `size`, recorded or not, for a reason that only the host knows."""
        with self._alone("drop()"):
            if self._many is not None:
                self._many.drop(size)
            self._captured.drop(size, Failure(reason, text))
            self._served[size].recording = None
            self._served[size].views.clear()
            self._steady = None

    def abandon(self) -> None:
        """Give back what an unfinished capture holds. The manager is new again."""
        with self._alone("abandon()"):
            self._give_up()

    def failure_of(self, size: int) -> str | None:
        """Why bucket `size` has no recording; None where it has one, or was not tried."""
        failure = self._captured.failures.get(size)
        return None if failure is None else failure.text

    def reason_of(self, size: int) -> str | None:
        """Under what eager steps of bucket `size` are counted; None as in `failure_of`."""
        failure = self._captured.failures.get(size)
        return None if failure is None else failure.reason

    # -- all phases ------------------------------------------------------------------------------

    def capture(self, progress: Progress | None = None) -> CaptureReport:
        """Warm up every bucket, freeze the pool, record from the largest bucket down, verify.

        Slots, `state` and random generators are afterwards as they were before. A bucket that cannot
        be recorded or verified costs that bucket only: it is in the report, a WARNING is logged, and
        its batches run eagerly.

        Raises:
            StateError: recorded already, closed, or called inside a recording.
            PoolLimitError: the plan is larger than ``GRAPHCAP_POOL_MIB``.
            CaptureError, VerificationError: a bucket failed and ``GRAPHCAP_STRICT=1``.
        """
        with self._alone("capture()"):
            if self._state in ("recorded", "closed"):
                raise StateError(
                    f"capture() was called on a manager that is {self._state}; a manager captures "
                    f"once: close() it and make a new one"
                )
        self._restart()
        try:
            with garbage_collection_held(), self._verifier.put_back():
                self._capture_all(progress or (lambda done, total, what: None))
            report = self.finish()
        except BaseException:
            with self._alone("capture()"):
                self._give_up()
            raise
        self._writes_report = self.settings.report is not None
        self._write_report(None)
        return report

    def _capture_all(self, notify: Progress) -> None:
        sizes = sorted(self.ladder, reverse=True)
        logger.info(
            "recording %d buckets (%s) with the %s recorder on %s",
            len(sizes),
            ", ".join(map(str, sizes)),
            self.recorder.name,
            self.inputs.device,
        )
        phases: list[tuple[str, Callable[[int], object]]] = [
            ("warming up", self.warm_up),
            ("recording", self.record),
        ]
        if self.settings.verify != "off":
            phases.append(("verifying", self._verify_and_time))
        done, total = 0, len(phases) * len(sizes)
        for what, phase in phases:
            if phase == self.record:
                self.freeze()
            for size in sizes:
                notify(done, total, f"{what} bucket {size}")
                phase(size)
                done += 1
        notify(total, total, "done")

    def _verify_and_time(self, size: int) -> None:
        self.verify(size)
        self.time(size)

    def _note_unwatched(self, watched: Sequence[torch.Tensor]) -> None:
        """Say what the recordings read and no name leads to: rebinding it will not be noticed."""
        known = {
            t.untyped_storage().data_ptr()
            for t in (*watched, *self.inputs.owned, *self._verifier.tensors)
        }
        unseen = {
            storage.data_ptr(): storage.nbytes()
            for recording in self._captured.recordings.values()
            for storage in recording.pinned
            if storage.data_ptr() not in known
        }
        if unseen:
            self._unwatched_note = (
                f"the step reads {len(unseen)} tensors ({sum(unseen.values()) / 2**20:.2f} MiB) that "
                f"no name leads to from it (a class attribute, another module's global, a cache): "
                f"they are kept alive, but rebinding them is not noticed"
            )

    def _bound(self, size: int, step: BoundStep | None = None) -> BoundStep:
        def bound() -> Mapping[str, torch.Tensor]:
            self.inputs.restore_pads()
            with self.pool.step():
                outputs = self.step(self.inputs.views(size)) if step is None else step()
                if self._many is not None:
                    self._many.buffer.write(outputs)
                return outputs

        return bound

    def _found(self) -> Sequence[Watched]:
        return reachable(self.step) if self._watched is None else self._watched()

    def _pinned_down(self) -> Fingerprint:
        """The fingerprint of what the recordings point at; taken when the last one is made."""
        if self._fingerprint is None:
            pinned = {**self.inputs.pinned, "pool arena": self.pool.arena}
            self._fingerprint = Fingerprint(self.step, pinned, self._before, self._found())
            self._note_unwatched(self._fingerprint.tensors())
        return self._fingerprint

    def _new_capture(self) -> BucketCapture:
        return BucketCapture(
            self.recorder, self.inputs, self._verifier, strict=self.settings.strict
        )

    def _restart(self) -> None:
        self._captured = self._new_capture()
        self._state, self._seconds, self._unwatched_note = "new", 0.0, None

    def _give_up(self) -> None:
        self._drop_recordings()
        self._state = "new"

    def _drop_recordings(self) -> None:
        if self._many is not None:
            self._many.close()
        self._captured.close()
        for served in self._served.values():
            served.views.clear()
            served.recording = None
        self._fallback.forget()
        self._steady = None
        if self._fingerprint is not None:
            self._fingerprint.close()
            self._fingerprint = None

    @contextmanager
    def _phase(self, what: str, states: tuple[str, ...]) -> Iterator[None]:
        """One phase: alone, in the right state, no garbage collection, slots as they were before."""
        with self._alone(what):
            if self._state not in states:
                raise StateError(
                    f"{what} was called on a manager that is {self._state}, expected "
                    f"{' or '.join(states)}; the phases are warm_up, freeze, record, verify, finish"
                )
            launches, started = self.inputs.launches, time.perf_counter()
            try:
                with garbage_collection_held(), self._verifier.put_back():
                    yield
            finally:
                self.inputs.launches = launches  # what verification copied serves no batch
                self._seconds += time.perf_counter() - started

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if current_observer() is not None or not self._lock.acquire(blocking=False):
            raise self._busy(what)
        try:
            yield
        finally:
            self._lock.release()

    def _busy(self, what: str) -> StateError:
        if current_observer() is not None:
            return StateError(
                f"{what} was called inside a step that is being recorded; "
                f"recordings do not nest: call it outside the step"
            )
        return StateError(
            f"{what} was called while this manager is in use, by another thread or by its own step; "
            f"a manager serves one call at a time: use one per thread, or a lock"
        )

    def _reported(self, seconds: float) -> CaptureReport:
        captured = self._captured
        largest = max(captured.recordings, default=None)
        choice = getattr(self.step, "bucket_choice", lambda size: "")
        reports = (captured.reports[size] for size in sorted(captured.reports))
        return CaptureReport(
            recorder=self.recorder.name,
            device=_device_name(self.inputs.device),
            buckets=tuple(replace(each, choice=str(choice(each.size))) for each in reports),
            failures=captured.failures_text(),
            pool_bytes=self.pool.nbytes,
            pool_lower_bound_bytes=self.pool.plan.lower_bound,
            slots_bytes=sum(t.nbytes for t in self.inputs.pinned.values()),
            seconds=seconds,
            census=None if largest is None else captured.recordings[largest].census(),
            kernels=tuple(getattr(self.step, "kernel_choices", ())),
            pool_layout=self.pool.layout,
            notes=(
                *filter(None, [self.recorder.why]),
                *self._verifier.notes,
                *filter(None, [self._unwatched_note]),
                *filter(None, [None if self._many is None else self._many.note]),
            ),
        )

    def _write_report(self, served: ManagerStats | None) -> None:
        path = self.settings.report
        if not self._writes_report or path is None:
            return
        try:
            assert self._report is not None
            self._report.write(path, served)
        except OSError as error:  # a full disk must not cost the recordings
            warn(
                logger,
                "report-not-written",
                "the capture report was not written to %s: %s",
                path,
                error,
            )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
