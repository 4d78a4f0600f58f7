"""Narrowing: which operation a replay that differs from the eager step begins to differ at.

The step is recorded once more, by the same recorder, with a copy of every result as part of the recording.
One replay then leaves what each operation wrote, and a watched eager run from the same inputs, in memory with
the same contents, gives the same to hold against it, operation by operation. What does not fit a budget of
copies is looked at by further recordings.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import torch

from graphcap.checks import first_difference
from graphcap.recorders.base import BoundStep, Recorder, autocast_casts_not_kept
from graphcap.recorders.witness import StepWitness, Witnessed
from graphcap.undo import let_go

BUDGET = 2**28
"""Bytes of copies that one recording keeps."""
MOST_RECORDINGS = 20
MOST_SECONDS = 30.0


class Narrowing:
    """Finds the first operation whose result differs.

    Args:
        recorder: of the recording that differs.
        put: brings slots, state, generators and the pool to what the replay that differed found.
        known: storages that operations of the step read and do not write (weights).
        budget, most: see the module's constants.
    """

    def __init__(
        self,
        recorder: Recorder,
        put: Callable[[], None],
        known: Sequence[int] = (),
        budget: int = BUDGET,
        most: int = MOST_RECORDINGS,
    ) -> None:
        self._recorder = recorder
        self._put = put
        self._known = known
        self._budget = budget
        self._most = most

    def sentence(self, step: BoundStep, bucket: int) -> str:
        """What was found of `step`, for the end of a message. Never raises an `Exception`: what goes wrong
        here must not hide what it is about, and is told in the sentence."""
        try:
            with self._recorder.apart():
                return self._search_and_let_go(step, bucket)
        except Exception as error:
            return (
                f"the operation could not be named: looking for it ended with "
                f"{type(error).__name__}: {error.args[0] if error.args else error}"
            )

    def _search_and_let_go(self, step: BoundStep, bucket: int) -> str:
        handled = sys.exc_info()[1]
        try:
            return self._search(step, bucket)
        except BaseException as error:
            let_go(error, handled)  # the copies, before their memory is given back
            raise

    def _search(self, step: BoundStep, bucket: int) -> str:
        began, first = time.perf_counter(), 0
        for turn in range(self._most):
            replayed, end = self._replayed(step, bucket, first)
            eager = self._eager(step, first)
            for index in range(first, end):
                found = self._found(replayed, eager, index)
                if found is not None:
                    return found + self._steadiness(step, first, eager, index)
            if end >= len(replayed):
                return (
                    "recorded once more, with memory that the step leaves unwritten filled, it differs in "
                    "no operation: a kernel is not deterministic, or the step reads what nothing has written"
                )
            if turn + 1 == self._most or time.perf_counter() - began > MOST_SECONDS:
                break
            first = end
        return (
            f"the operation could not be named: none of the first {end} of {len(replayed)} differs, and the "
            f"search ended there, after {turn + 1} recordings"
        )

    # -- the two runs ----------------------------------------------------------------------------

    def _replayed(
        self, step: BoundStep, bucket: int, first: int
    ) -> tuple[Sequence[Witnessed], int]:
        witness = StepWitness(first, self._budget, self._known)
        self._put()
        recording = self._recorder.record(witness.around(step), bucket)
        try:
            self._put()
            recording.replay()
            # The recording's memory goes with it.
            seen = [
                Witnessed(w.name, w.line, tuple(t.clone() for t in w.results)) for w in witness.seen
            ]
            if any(tensor.is_cuda for w in seen for tensor in w.results):
                torch.cuda.synchronize()
        finally:
            recording.close()
        return seen, witness.end

    def _eager(self, step: BoundStep, first: int) -> Sequence[Witnessed]:
        witness = StepWitness(first, self._budget, self._known)
        self._put()
        # In the pool, as the recording: what its buffers hold where no kernel writes is then the same.
        with torch.no_grad(), autocast_casts_not_kept():
            witness.around(step)()
        return witness.seen

    # -- what is told ----------------------------------------------------------------------------

    def _found(
        self, replayed: Sequence[Witnessed], eager: Sequence[Witnessed], index: int
    ) -> str | None:
        ours = replayed[index]
        if index >= len(eager) or eager[index].name != ours.name:
            theirs = "nothing" if index >= len(eager) else _at(eager[index])
            return (
                f"the step took another way: its operation {index + 1} was {_at(ours)} when it was "
                f"recorded, and is {theirs} when it runs again"
            )
        if not differ(ours, eager[index]):
            return None
        runs = sum(
            1 for seen in replayed[:index] if (seen.name, seen.line) == (ours.name, ours.line)
        )
        again = f", at run {runs + 1} of this line" if runs else ""
        before = f", after {_at(replayed[index - 1])}" if index else ""
        what = "the first operation whose result differs is"
        if not ours.line:
            what = "of what torch runs no operation differs, only"
        return f"{what} {_at(ours)} (operation {index + 1} of {len(replayed)}{again}{before})"

    def _steadiness(
        self, step: BoundStep, first: int, eager: Sequence[Witnessed], index: int
    ) -> str:
        """Whether the eager step differs from itself, which no recording could equal."""
        try:
            again = self._eager(step, first)
        except Exception:  # it ran before: there is something to tell all the same
            return ""
        if index < len(again) and index < len(eager) and not differ(again[index], eager[index]):
            return ""
        return (
            "; it differs as well between two eager runs of the step from the same inputs: it reads what is "
            "no slot and not in state=, or is not deterministic"
        )


def differ(one: Witnessed, other: Witnessed) -> bool:
    """Whether the copies of one operation's results are not equal, within `TOLERANCE`."""
    if len(one.results) != len(other.results) or one.name != other.name:
        return True
    for a, b in zip(one.results, other.results, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return True
        if first_difference({"": a}, {"": b})[1] is not None:
            return True
    return False


def _at(seen: Witnessed) -> str:
    return f"{seen.name} at {seen.line}" if seen.line else seen.name
