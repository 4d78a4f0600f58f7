"""BothRuns: a replay and the eager step from the same inputs, one after the other, held together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from graphcap.checks import Difference, compare
from graphcap.drawing import distinct
from graphcap.errors import VerificationError
from graphcap.inputs import Inputs
from graphcap.pool import BufferPool
from graphcap.recorders.base import BoundStep, Recording, autocast_casts_not_kept
from graphcap.saving import Saved, StepState, copy_back
from graphcap.undo import surely
from graphcap.written import Contents, InPlace, Place

Agree = Callable[[bool], bool]
"""Whether all ranks that run the step together say yes; each of them calls it."""


class AnotherRankFailed(Exception):
    """This rank found nothing wrong, another one did."""


@dataclass(frozen=True)
class Mismatch:
    """A replay while serving that did not equal the eager step.

    Attributes:
        error: what differs.
        outputs: the eager step's, of all rows of the bucket: the right ones. Slots and state are as
            that step left them.
        elsewhere: it was another rank's replay; here both were equal.
    """

    error: VerificationError
    outputs: Mapping[str, torch.Tensor]
    elsewhere: bool = False


@dataclass(frozen=True)
class Both:
    """What came of a replay and the eager step.

    Attributes:
        largest: relative difference of outputs, slots and state.
        error: what differs; None: they are equal.
        outputs: the eager step's, of all rows.
        explained: `error` tells the cause: no operation has to be looked for.
    """

    largest: float
    error: VerificationError | None
    outputs: Mapping[str, torch.Tensor]
    explained: bool = False


class BothRuns:
    """Runs both and compares outputs, slots, state and what is written in place.

    Args:
        inputs, pool: of the step.
        state: what a step changes and running it twice would change twice.
        agree: as in `Verifier`.

    Attributes:
        in_place: what steps write besides; None: not compared.
        advancing: names of what running a step twice changes twice although it is not in `state`.
    """

    def __init__(
        self, inputs: Inputs, pool: BufferPool, state: StepState, agree: Agree | None = None
    ) -> None:
        self.in_place: InPlace | None = None
        self.advancing: dict[str, None] = {}
        self._inputs = inputs
        self._pool = pool
        self._state = state
        self._agree = agree

    def run(self, recording: Recording, eager: BoundStep, size: int, live: bool = False) -> Both:
        """Replay, run eagerly from the same inputs, and compare.

        Afterwards everything is as the replay left it; with `live`, where they differ, as the eager step
        did; after an exception all but the outputs is as it was before. Where they differ at first, the
        eager step runs once more (on all ranks), with what is written in place put back as well: `state`
        should name what it reads there.
        """
        rows, what = self._inputs.rows, f"bucket {size} with {self._inputs.rows} rows"
        places = self._places(rows)
        after = before = self._state.save()
        written = held = Contents(places)
        replayed: dict[str, torch.Tensor] = {}
        try:
            try:
                recording.replay()
                replayed = self.outcome(recording, rows)
                after, written = self._state.save(), Contents(places)
                # What is not in `state` stays as the replay left it: a step that depends on more is found.
                self._state.restore(before)
                outputs = self.eagerly(eager)
                both = Both(*_compared(replayed, self._real(outputs, rows), what), outputs)
                changed = written.difference(Contents(places))
                again = both.error is not None or changed is not None
            except BaseException:
                self._is_agreed(False)
                raise
            if not self._is_agreed(not again):
                self._state.restore(before)
                held.put()
                outputs = self.eagerly(eager)
                if again:
                    second = Both(*_compared(replayed, self._real(outputs, rows), what), outputs)
                    found = written.difference(Contents(places))
                    both = self._judged(both, second, changed, found, held, written, what)
            if not live or both.error is None:
                self._keep_replay(recording, rows, after, written, replayed)
            return both
        except BaseException:
            surely(lambda: self._undo(before, held))
            raise

    def _undo(self, before: Saved, held: Contents) -> None:
        """Everything as it was before the replay, but outputs."""
        self._state.restore(before)
        held.put()

    def _keep_replay(
        self,
        recording: Recording,
        rows: int,
        after: Saved,
        written: Contents,
        replayed: Mapping[str, torch.Tensor],
    ) -> None:
        """Everything as the replay left it."""
        self._state.restore(after)
        written.put()
        outputs = recording.outputs.items()
        copy_back((t[:rows], replayed[n]) for n, t in outputs if distinct(t))

    def _judged(
        self,
        first: Both,
        second: Both,
        changed: tuple[Place, Difference] | None,
        found: tuple[Place, Difference] | None,
        held: Contents,
        written: Contents,
        what: str,
    ) -> Both:
        """What a second eager run, from all that the replay had found, tells of the first.

        Args:
            changed: how what the first run left in place differs from what the replay had left there.
            found: the same of the second.
        """
        if first.error is not None:
            own = held.difference(written)
            if second.error is not None or found is not None or own is None:
                return Both(first.largest, first.error, second.outputs)
            text = (
                f"{first.error.args[0]}; it equals the eager step once {own[0].name} is put back, which "
                f"the step changes: list it in state="
            )
            return Both(first.largest, VerificationError(text), second.outputs, explained=True)
        if found is None and second.error is None:  # it goes on from there, as a counter does
            assert changed is not None
            place = changed[0]
            self.advancing[place.name] = None
            if place.index is None:
                self._state.adopt(place.tensor)
            return second
        if found is None:
            return second
        place, at = found
        text = (
            f"{what}: the replay leaves something else in {place.name} than the eager step does, first in "
            f"row {at.row} (relative difference {at.size:.3g}, allowed {at.allowed:g}); the recording "
            f"misses a write in place, or writes something else"
        )
        return Both(first.largest, VerificationError(text), second.outputs)

    def _is_agreed(self, mine: bool) -> bool:
        return mine if self._agree is None else self._agree(mine)

    def eagerly(self, step: BoundStep) -> Mapping[str, torch.Tensor]:
        with torch.no_grad(), autocast_casts_not_kept(), self._pool.outside():
            return dict(step())

    def outcome(self, recording: Recording, rows: int) -> dict[str, torch.Tensor]:
        """Copies of what a replay gave and changed, real rows alone."""
        outputs = {n: t[:rows].clone() for n, t in recording.outputs.items()}
        return outputs | self._state.contents(rows)

    def _real(self, outputs: Mapping[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
        return {name: t[:rows] for name, t in outputs.items()} | self._state.contents(rows)

    def _places(self, rows: int) -> list[Place]:
        if self.in_place is None:
            return []
        return self.in_place.places(
            {name: self._inputs[name][:rows] for name in self._inputs.slots}
        )


def _compared(
    replayed: Mapping[str, torch.Tensor], eager: Mapping[str, torch.Tensor], what: str
) -> tuple[float, VerificationError | None]:
    try:
        return compare(replayed, eager, what), None
    except VerificationError as error:
        return 0.0, error
