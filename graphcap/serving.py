"""Serving: how a manager that has recorded serves a batch, by replay or eagerly, one step or many."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from graphcap.errors import InputError, StateError
from graphcap.life import CaptureLife, Served
from graphcap.many import ManySteps
from graphcap.recorders.base import BoundStep, Recording
from graphcap.ring import Many


class Serving(CaptureLife):
    """The inside of `CaptureManager`'s run(), run_many() and replay(): called by whoever holds the lock."""

    def _run(
        self, batch: Mapping[str, torch.Tensor], rows: int | None, agreed_batch: int | None
    ) -> Mapping[str, torch.Tensor]:
        self._must_be_recorded("run()")
        if not batch and self._fallback.continues(rows):
            return self._fallback.run_on()
        count = self.inputs.check(batch, rows)
        if agreed_batch is not None and agreed_batch < count:
            raise InputError(
                f"agreed_batch is {agreed_batch} but this rank has {count} rows; "
                f"agree on the maximum over all ranks"
            )
        served, reason = self._who_serves(agreed_batch or count)
        if served is None:
            return self._run_eagerly(batch, count, reason)
        return self._replay(served, count, batch, settles=agreed_batch is None)

    def _run_many(self, steps: int, batch: Mapping[str, torch.Tensor], rows: int | None) -> Many:
        many = self._many
        if many is None:
            raise StateError(
                "run_many() was called on a manager without a ring, which keeps the outputs of its "
                "steps; make it with CaptureManager(..., ring=Ring(length=, outputs=))"
            )
        self._must_be_recorded("run_many()")
        many.check(steps)
        on = not batch and self._fallback.continues(rows)
        count = self._fallback.overflow_rows if on else self.inputs.check(batch, rows)
        served, reason = self._who_serves(count)
        if served is None:
            if self.settings.strict:
                self._fallback.announce(count, reason)  # raises, before anything is launched
            if batch or (not on and count != self.inputs.rows):
                many.anew()
            many.buffer_of(count).begin(steps, count)
            for index in range(steps):
                if on or (index and count > self.inputs.max_batch):
                    self._fallback.run_on()
                else:
                    self._steady = None
                    self._fallback.run({} if index else batch, count, reason)
            return many.buffer_of(count).result(steps, count)
        self._prepare(count, batch)
        many.buffer.begin(steps, count)
        self._serve_many(many, served, count, steps)
        self._steady = (served, count)
        return many.buffer.result(steps, count)

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
        if self._many is not None and (batch or count != self.inputs.rows):
            self._many.anew()
        return self._fallback.run(batch, count, reason)

    def _serve(
        self, served: Served, recording: Recording, count: int, eager: BoundStep | None
    ) -> None:
        every = self.settings.verify_every
        # A replay whose check failed is not counted, so the next run is checked again.
        if every and eager is not None and (self._replays + 1) % every == 0:
            self._verifier.check_live(recording, eager, served.size)
            self._verified += 1
        else:
            recording.replay()
        served.replays += 1
        served.batches[count] = served.batches.get(count, 0) + 1

    def _serve_many(self, many: ManySteps, served: Served, count: int, steps: int) -> None:
        recording = served.recording
        assert recording is not None
        every = self.settings.verify_every
        if every and self._replays % every + steps >= every:  # one of them is to be checked
            for _ in range(steps):
                self._serve(served, recording, count, self._bound(served.size))
            return
        loop = many.loops.get(served.size)
        if loop is not None:
            loop.launch()
        else:
            replay = recording.replay
            for _ in range(steps):
                replay()
        served.replays += steps
        served.batches[count] = served.batches.get(count, 0) + steps

    def _prepare(self, count: int, batch: Mapping[str, torch.Tensor] | None) -> None:
        """Make sure that what was recorded is in place, and bring the batch in."""
        assert self._fingerprint is not None
        self._fingerprint.check()
        if batch or count != self.inputs.rows:
            self.inputs.load(batch or {}, count)
            if self._many is not None:
                self._many.anew()
        self._fallback.forget()

    def _replay(
        self,
        served: Served,
        count: int,
        batch: Mapping[str, torch.Tensor] | None = None,
        settles: bool = True,
    ) -> Mapping[str, torch.Tensor]:
        self._prepare(count, batch)
        recording = served.recording
        assert recording is not None
        self._serve(served, recording, count, self._bound(served.size))
        self._steady = (served, count) if settles else None
        views = served.views.get(count)
        if views is None:
            # Read-only: these are handed out again at every run of as many rows.
            views = MappingProxyType({n: tensor[:count] for n, tensor in recording.outputs.items()})
            served.views[count] = views
        return views

    @property
    def _replays(self) -> int:
        return sum(served.replays for served in self._served.values())
