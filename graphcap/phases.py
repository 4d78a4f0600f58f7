"""CapturePhases: warm up, freeze, record, verify, one bucket at a time, before a manager serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphcap.buckets import BucketLadder
from graphcap.capturing import BucketCapture, Failure
from graphcap.checks import Fingerprint
from graphcap.comparing import Agree
from graphcap.drawing import Drawing, Example
from graphcap.errors import LadderError, StateError
from graphcap.fallback import Fallback
from graphcap.inputs import Inputs
from graphcap.live_memory import Range
from graphcap.many import ManySteps, Step
from graphcap.one_caller import OneCaller
from graphcap.pointer_check import not_checked_note
from graphcap.pool import BufferPool
from graphcap.reachable import Watched, reachable
from graphcap.recorders.base import BoundStep, Recorder, garbage_collection_held
from graphcap.recorders.pointer_watch import named_ranges
from graphcap.recorders.select import select_recorder
from graphcap.report import CaptureReport
from graphcap.ring import Ring
from graphcap.saving import StepState
from graphcap.served import Served
from graphcap.settings import Settings
from graphcap.summary import report_of, stranded_note, unwatched_note
from graphcap.verify import Verifier
from graphcap.written import InPlace, Written


class CapturePhases(OneCaller):
    """The life of a manager: *new → warmed → frozen → recorded*; see `CaptureManager`.

    A host that prepares each bucket itself (attention metadata outside the step) hands over the step that
    it has bound: `warm_up` for every bucket, `freeze`, `record` from the largest bucket down, `verify` where
    it can, then `finish`. A bucket that fails costs that bucket only.
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
        written: Written | None = None,
        agree: Agree | None = None,
    ) -> None:
        super().__init__()
        self.step = step
        self.inputs = inputs
        self.settings = Settings.from_env() if settings is None else settings
        self.pool = BufferPool(inputs.device) if pool is None else pool
        self.ladder = ladder or BucketLadder.parse(self.settings.buckets, inputs.max_batch)
        if not isinstance(self.ladder, BucketLadder):
            raise LadderError(
                f"ladder: expected a BucketLadder, found {self.ladder!r}; "
                f"BucketLadder(sizes, max_batch={inputs.max_batch}) makes one"
            )
        if self.ladder.max_batch != inputs.max_batch:
            raise LadderError(
                f"the ladder ends at {self.ladder.max_batch} and the slots have "
                f"{inputs.max_batch} rows; both must be the maximum batch: "
                f"BucketLadder(sizes, max_batch={inputs.max_batch})"
            )
        self.recorder = recorder or select_recorder(self.settings.recorder, inputs.device)
        self._many = None if ring is None else ManySteps(ring, inputs)
        buffer = None if self._many is None else self._many.buffer
        self._state_of_step = StepState(inputs, state, buffer)
        self._verifier = Verifier(
            inputs,
            self.pool,
            Drawing(inputs, example),
            self._state_of_step,
            rows_mix=rows_mix,
            ring=buffer,
            recorder=self.recorder,
            agree=agree,
        )
        self.recorder.generators = self._state_of_step.generators
        if ring is not None:
            self.recorder.repeatable = True
        self._state = "new"
        self._watched = watched
        self._written = written
        self._agree = agree
        self._seconds = 0.0
        self._before: Sequence[Watched] | None = None
        self._named: Sequence[Range] = ()
        self._pointers_checked = False
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
        self._capturer: object | None = None  # the call of capture() in progress
        self._verified = self._turns = 0  # replays that were checked; steps asked of recordings
        self._writes_report = self._warned_unverified = self._given_back = False

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
            self._named = self._known()

    def record(self, size: int, step: BoundStep | None = None) -> bool:
        """Record bucket `size`; from the largest down, so that smaller ones find memory there.

        Returns:
            Whether there is a recording now; `failure_of` says why not.
        """
        with self._phase("record()", ("frozen",)):
            self.recorder.named = self._named
            self.recorder.checks_pointers = self.settings.verify != "off"
            self._captured.record(size, self._bound(size, step))
            return size in self._captured.recordings

    def check_pointers(self) -> tuple[int, ...]:
        """Look once more whether the recordings point at live memory: what only the preparation of a
        bucket held is gone by now. After all are recorded and before the first is replayed; where a host
        does not ask for it, the phase that comes next begins with it.

        Returns:
            The buckets that this costs.
        """
        with self._phase("check_pointers()", ("frozen",)):
            return self._look_again()

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
                self._served[size].serve(recording)
        with self._alone("finish()"):
            self._report = self._reported(self._seconds)
            self._state = "recorded"
            return self._report

    def drop(self, size: int, reason: str, text: str) -> None:
        """Give up bucket `size`, recorded or not, for a reason that only the host knows."""
        with self._alone("drop()"):
            self._drop(size, Failure(reason, text))

    def abandon(self) -> None:
        """Give back what an unfinished capture holds. The manager is new again, unless it is closed."""
        with self._alone("abandon()"):
            self._give_up()
            self._captured = self._new_capture()

    def failure_of(self, size: int) -> str | None:
        """Why bucket `size` has no recording; None where it has one, or was not tried."""
        failure = self._captured.failures.get(size)
        return None if failure is None else failure.text

    def reason_of(self, size: int) -> str | None:
        """Under what eager steps of bucket `size` are counted; None as in `failure_of`."""
        failure = self._captured.failures.get(size)
        return None if failure is None else failure.reason

    # -- inside ---------------------------------------------------------------------------------

    def _drop(self, size: int, failure: Failure) -> None:
        self._steady = None
        if self._many is not None:
            self._many.drop(size)
        self._captured.drop(size, failure)
        self._served[size].stop()

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
            for name in self.inputs.slots:
                if not any(self.inputs[name] is tensor for tensor in pinned.values()):
                    pinned[f"slot {name}"] = self.inputs[name]
            self._fingerprint = Fingerprint(self.step, pinned, self._before, self._found())
            own = (*self.inputs.owned, *self._state_of_step.tensors)
            known = (*self._fingerprint.tensors(), *own)
            self._unwatched_note = unwatched_note(self._captured.recordings, known)
            watched, apart = self._fingerprint.watched, (*pinned.values(), *own)
            in_place = InPlace(watched, apart, self.inputs.device, self._written)
            self._verifier.compare_in_place(in_place)
            self._look_again()
        return self._fingerprint

    def _look_again(self) -> tuple[int, ...]:
        if self._pointers_checked:
            return ()
        self._pointers_checked = True
        self.recorder.named = self._named
        return self._captured.check_pointers()

    def _known(self) -> Sequence[Range]:
        """The memory that a recording may use, by name."""
        inputs = [*self.inputs.pinned.items(), *(("slots", t) for t in self.inputs.owned)]
        watched = [(w.name, w.value) for w in self._before or () if w.address is not None]
        state = [("state or ring", tensor) for tensor in self._state_of_step.tensors]
        return (
            *named_ranges(inputs, "slots"),
            *named_ranges([("pool arena", self.pool.arena)], "pool"),
            *named_ranges([*watched, *state], "named"),
        )

    def _new_capture(self) -> BucketCapture:
        return BucketCapture(
            self.recorder, self.inputs, self._verifier, strict=self.settings.strict
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        """Neither a copy nor a pickle: recordings are addresses of this process."""
        raise StateError(
            "a manager cannot be copied or pickled: its recordings point at the tensors of this one; "
            "make a new manager for the copy and capture again"
        )

    def _give_up(self) -> None:
        self._drop_recordings()
        if self._state != "closed":
            self._state = "new"

    def _drop_recordings(self) -> None:
        self._steady = None
        if self._many is not None:
            self._many.close()
        self._captured.close()
        for served in self._served.values():
            served.stop()
        self._fallback.forget()
        # What was looked at keeps tensors alive that the step may have let go since.
        if self._fingerprint is not None:
            self._fingerprint.close()
            self._fingerprint = None
        self._before, self._named, self._pointers_checked = None, (), False
        self._verifier.compare_in_place(None)
        self._state_of_step.forget_adopted()

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
                with garbage_collection_held(), self._state_of_step.put_back():
                    yield
            finally:
                self.inputs.launches = launches  # what verification copied serves no batch
                self._seconds += time.perf_counter() - started

    def _reported(self, seconds: float) -> CaptureReport:
        notes = (
            self.recorder.why,
            *self._verifier.notes,
            self._unwatched_note,
            stranded_note(self.recorder, self._captured.recordings),
            not_checked_note(bucket.pointers for bucket in self._captured.reports.values()),
            None if self._many is None else self._many.note,
        )
        return report_of(
            self._captured, self.recorder, self.inputs, self.pool, self.step, seconds, notes
        )
