"""Serving: how a manager that has recorded serves a batch, by replay or eagerly, one step or many."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import MappingProxyType

import torch

from graphcap.batch_check import check_agreed
from graphcap.capturing import Failure
from graphcap.errors import InputError, StaleRecordingError, StateError, VerificationError
from graphcap.explain import warn
from graphcap.life import CaptureLife
from graphcap.many import ManySteps
from graphcap.many_views import Many
from graphcap.output_views import OutputViews
from graphcap.recorders.base import BoundStep, Recording
from graphcap.recorders.source import is_out_of_memory
from graphcap.served import Served
from graphcap.undo import let_go

logger = logging.getLogger(__name__)


def checked_batch(batch: Mapping[str, torch.Tensor] | None) -> Mapping[str, torch.Tensor]:
    """What run() was given, None as an empty batch. Raises `InputError` where it is no mapping."""
    if batch is None:
        return {}
    if type(batch) is not dict and not isinstance(batch, Mapping):
        raise InputError(
            f"a batch: expected a mapping of slot names to tensors, found {type(batch).__name__}; "
            f"give {{'name of the slot': tensor}}"
        )
    return batch


class Serving(CaptureLife):
    """The inside of `CaptureManager`'s run(), run_many() and replay(): called by whoever holds the lock."""

    def _run(
        self, batch: Mapping[str, torch.Tensor], rows: int | None, agreed_batch: int | None
    ) -> Mapping[str, torch.Tensor]:
        self._must_be_recorded("run()")
        if not batch and self._fallback.continues(rows):
            if agreed_batch is not None:
                check_agreed(agreed_batch, self._fallback.overflow_rows)
            return self._fallback.run_on()
        count = self.inputs.check(batch, rows)
        if agreed_batch is not None:
            check_agreed(agreed_batch, count)
        served, reason = self._who_serves(agreed_batch or count)
        if served is None:
            return self._run_eagerly(batch, count, reason)
        return self._replay(served, count, batch, settles=agreed_batch is None)

    def _run_many(self, steps: int, batch: Mapping[str, torch.Tensor], rows: int | None) -> Many:
        many = self._ring_of_steps()
        self._must_be_recorded("run_many()")
        many.check(steps)
        on = not batch and self._fallback.continues(rows)
        count = self._fallback.overflow_rows if on else self.inputs.check(batch, rows)
        served, reason = self._who_serves(count)
        if served is None:
            if self.settings.strict:
                self._fallback.announce(count, reason)  # raises, before anything is launched
            many.check_place()
            if batch:
                many.anew()
            many.buffer_of(count).begin(steps, count)
            for index in range(steps):
                if on or (index and count > self.inputs.max_batch):
                    self._fallback.run_on()
                else:
                    self._steady = None
                    self._fallback.run({} if index else batch, count, reason)
            return many.buffer_of(count).result(steps, count)
        return self._replay_many(many, served, count, steps, batch)

    def _run_many_on(self, steps: int, served: Served, count: int) -> Many:
        """run_many() without a batch, after a replay of `count` rows by `served`."""
        many = self._ring_of_steps()
        many.check(steps)
        return self._replay_many(many, served, count, steps)

    def _replay_many(
        self,
        many: ManySteps,
        served: Served,
        count: int,
        steps: int,
        batch: Mapping[str, torch.Tensor] | None = None,
    ) -> Many:
        due = self._due(served, steps)
        served.check_outputs()
        self._prepare(count, batch)
        self._serve_many(many, served, count, steps, due)
        self._steady = None if served.recording is None else (served, count)
        return many.buffer.result(steps, count)

    def _ring_of_steps(self) -> ManySteps:
        if self._many is None:
            raise StateError(
                "run_many() was called on a manager without a ring, which keeps the outputs of its steps; "
                "make it with CaptureManager(..., ring=Ring(length=, outputs=))"
            )
        return self._many

    def _must_be_recorded(self, what: str) -> None:
        if self._state != "recorded":
            raise StateError(
                f"{what} was called on a manager that is {self._state}; "
                + ("make a new one" if self._state == "closed" else "call capture() first")
            )

    def _who_serves(self, count: int) -> tuple[Served | None, str]:
        """The bucket whose recording serves `count` rows, or why there is none."""
        size = self.ladder.bucket_for(count)
        if size is None:
            return None, "above_max_batch"
        if size not in self._captured.recordings:
            return None, self._captured.failures[size].reason
        return self._served[size], ""

    def _run_eagerly(
        self, batch: Mapping[str, torch.Tensor], count: int, reason: str
    ) -> Mapping[str, torch.Tensor]:
        self._steady = None
        if self.settings.strict:
            self._fallback.announce(count, reason)  # raises, before anything is launched
        if batch and self._many is not None:
            self._many.came(count)
        return self._fallback.run(batch, count, reason)

    def _due(self, served: Served, steps: int = 1) -> bool:
        """Whether a replay of the next `steps` of `served` is held against eager (``GRAPHCAP_VERIFY=N``).

        Called once a step, before anything can go wrong with it: ranks that run the step together count
        alike. They also agree that all of them can replay, as each runs the step twice.
        """
        every = self.settings.verify_every
        if not every:
            return False
        before, self._turns = self._turns, self._turns + steps
        if before % every + steps < every:
            return False
        if self._agree is None:
            return True
        assert self._fingerprint is not None
        self._fingerprint.expect_change()
        try:
            served.check_outputs()
            self._fingerprint.check()
        except StaleRecordingError:  # raised again by whoever is about to replay
            self._agree(False)
            return False
        return self._agree(True)

    def _serve(self, served: Served, recording: Recording, count: int) -> None:
        recording.replay()
        self._count(served, count, 1)

    def _serve_checked(
        self, served: Served, recording: Recording, count: int, eager: BoundStep
    ) -> Mapping[str, torch.Tensor] | None:
        """Replay, and hold it against `eager`. Where there is no memory for that, replay alone.

        Returns:
            None; where they differ the eager step's outputs, of all rows: the bucket is given up.

        Raises:
            VerificationError: they differ and fallbacks are errors.
        """
        handled = sys.exc_info()[1]
        try:
            found = self._verifier.check_live(recording, eager, served.size)
        except Exception as error:
            if self._agree is not None or not is_out_of_memory(error):
                raise
            let_go(error, handled)
            self._note_unverified(served.size, error)
            self._serve(served, recording, count)
            return None
        if found is None:
            self._verified += 1
            self._count(served, count, 1)
            return None
        size, text = served.size, str(found.error)
        self._drop(size, Failure("rank_failed" if found.elsewhere else "verification", text))
        if self.settings.strict:
            raise VerificationError(f"{text}; GRAPHCAP_STRICT=1 forbids to go on eagerly")
        warn(
            logger,
            "verification",
            "while serving, %s; this step has the eager step's result, and batches of bucket %d run "
            "eagerly from here on",
            text,
            size,
        )
        self._fallback.count(count, "rank_failed" if found.elsewhere else "verification")
        return found.outputs

    def _note_unverified(self, size: int, error: Exception) -> None:
        if not self._warned_unverified:
            self._warned_unverified = True
            warn(
                logger,
                "verification",
                "a replay of bucket %d served its step but was not held against the eager one: %s; leave "
                "the device more free memory, or unset GRAPHCAP_VERIFY",
                size,
                error,
            )

    @staticmethod
    def _count(served: Served, count: int, steps: int) -> None:
        served.replays += steps
        served.batches[count] = served.batches.get(count, 0) + steps

    def _serve_many(
        self, many: ManySteps, served: Served, count: int, steps: int, due: bool
    ) -> None:
        loop = None if due else many.loops.get(served.size)
        if loop is not None:
            many.buffer.expect(steps, count)
            loop.launch()
            self._count(served, count, steps)
            return
        recording = served.recording
        assert recording is not None
        many.buffer.begin(steps, count)
        if due:
            self._serve_many_checked(served, recording, count, steps)
            return
        replay = recording.replay
        for _ in range(steps):
            replay()
        self._count(served, count, steps)

    def _serve_many_checked(
        self, served: Served, recording: Recording, count: int, steps: int
    ) -> None:
        """One by one, those that are to be checked against the eager step."""
        every, turn = self.settings.verify_every, self._turns - steps
        for index in range(steps):
            if served.recording is None:  # given up in this call
                self._fallback.run({}, count, self._captured.failures[served.size].reason)
            elif (turn + index + 1) % every:
                self._serve(served, recording, count)
            else:
                self._serve_checked(served, recording, count, self._bound(served.size))

    def _prepare(self, count: int, batch: Mapping[str, torch.Tensor] | None) -> None:
        """Make sure that what was recorded is in place, and bring the batch in."""
        assert self._fingerprint is not None
        self._fingerprint.check()
        many = self._many
        if many is not None and not batch:
            many.check_place()
        elif many is not None:  # in front: no interrupt leaves a new batch and who had ended before
            many.came(count)
        if batch or count != self.inputs.rows:
            self.inputs.load(batch or {}, count)
        self._fallback.forget()

    def _replay(
        self,
        served: Served,
        count: int,
        batch: Mapping[str, torch.Tensor] | None = None,
        settles: bool = True,
    ) -> Mapping[str, torch.Tensor]:
        due = self._due(served)
        served.check_outputs()
        self._prepare(count, batch)
        recording = served.recording
        assert recording is not None
        if not due:
            recording.replay()
            self._count(served, count, 1)
        else:
            outputs = self._serve_checked(served, recording, count, self._bound(served.size))
            if outputs is not None:
                return MappingProxyType({name: t[:count] for name, t in outputs.items()})
        self._steady = (served, count) if settles else None
        views = served.views.get(count)
        if views is None or not views.intact():
            views = served.views[count] = OutputViews(recording.outputs, count)
        return views.outputs

    @property
    def _replays(self) -> int:
        return sum(served.replays for served in self._served.values())
