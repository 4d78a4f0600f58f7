"""Verification: a replay on other inputs than the recorded ones, pads poisoned, against eager."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from graphcap.checks import Difference, brought_back, compare, differing_rows
from graphcap.comparing import Agree, AnotherRankFailed, BothRuns, Mismatch
from graphcap.drawing import Drawing, distinct, memory, poison
from graphcap.errors import VerificationError
from graphcap.inputs import Inputs
from graphcap.narrowing import Narrowing
from graphcap.padding_notes import pads_notes, row_count_notes
from graphcap.pool import BufferPool
from graphcap.recorders.base import BoundStep, Loop, Recorder, Recording
from graphcap.recorders.dispatched import storage_key
from graphcap.ring import RingBuffer
from graphcap.saving import Saved, StepState, copy_back
from graphcap.timing import least_ms
from graphcap.undo import surely
from graphcap.written import InPlace


class Verifier:
    """Holds replays against the eager step.

    Args:
        inputs, pool: of the step; the bound step of each bucket is handed to `check`.
        drawing: makes batches.
        state: what a step changes and running it twice would change twice.
        rows_mix: the rows of the step depend on each other on purpose, and so on padding.
        ring: what steps write their outputs into, if they do.
        recorder: makes recordings to find the operation that differs; None: it is not looked for.
        agree: the step runs on several ranks together, whose replays and eager runs wait for each
            other: after each of them the ranks agree whether to go on. None: it runs here alone.
    """

    def __init__(
        self,
        inputs: Inputs,
        pool: BufferPool,
        drawing: Drawing,
        state: StepState,
        *,
        rows_mix: bool = False,
        ring: RingBuffer | None = None,
        recorder: Recorder | None = None,
        agree: Agree | None = None,
    ) -> None:
        self._both = BothRuns(inputs, pool, state, agree)
        self.agree = agree
        self._rows_mix = rows_mix
        self._ring = ring
        self._inputs = inputs
        self._pool = pool
        self._drawing = drawing
        self._state = state
        self._recorder = recorder
        self._padding_notes: dict[str, None] = {}

    def compare_in_place(self, in_place: InPlace | None) -> None:
        """From here on compare what steps write there as well; None: nothing."""
        self._both.in_place = in_place

    @property
    def notes(self) -> list[str]:
        """For the capture report."""
        notes = [self._drawing.note] if self._drawing.note else []
        notes += self._padding_notes
        if self._both.advancing:
            notes.append(
                f"running the step twice changes {', '.join(self._both.advancing)} twice: warm-up and "
                f"recording have changed it as well; list it in state= to have it put back"
            )
        return notes

    def check(
        self,
        recording: Recording,
        eager: BoundStep,
        size: int,
        rows: int,
        kept: Collection[torch.Tensor] = (),
        unpadded: BoundStep | None = None,
    ) -> float:
        """Replay `size` with `rows` real rows of a fresh batch and compare with `eager`.

        Before the replay, pads, pool and outputs are filled with NaN: nothing may depend on them.

        Args:
            kept: tensors that the step reads and that are not its own (weights). An output that lies
                in one of them, in a slot or in `state` is not filled: that would destroy an input.
            unpadded: the step bound to exactly `rows` rows; padding must not be felt by real rows,
                unless rows mix on purpose. None: there is no such step, and what padding holds must
                not change real rows at all.

        Returns:
            The largest relative difference.

        Raises:
            VerificationError: names output, row and, where it can be found, the first operation.
            AnotherRankFailed: another rank raised.
        """
        self._drawing.load(rows, shared=rows < size)
        self._inputs.poison_pads(rows)
        read = (*kept, *self._state.own, *self._inputs.pinned.values())
        inputs = {memory(tensor) for tensor in read}
        own = [t for t in recording.outputs.values() if memory(t) not in inputs and distinct(t)]
        before = [output.clone() for output in own]
        try:
            for output in own:
                poison(output)
            self._pool.poison()
            before_replay = self._state.save()
            with self._together():
                both = self._both.run(recording, eager, size)
                if both.error is not None:
                    if both.explained:
                        raise both.error
                    found = self._narrowed(eager, size, before_replay, kept)
                    raise VerificationError(f"{both.error.args[0]}; {found}")
                self._note(pads_notes(recording.outputs, rows))
            if rows < size and not self._rows_mix:
                declared = {n: t[:rows].clone() for n, t in recording.outputs.items()}
                after_replay = self._state.save()
                self._state.restore(before_replay)
                self._pool.poison()
                try:
                    with self._together():
                        self._compare_pads(recording, unpadded, size, declared)
                finally:
                    surely(lambda: self._state.restore(after_replay))
            return both.largest
        finally:
            # An output may lie in memory that nobody told us of: it gets its contents back.
            surely(lambda: copy_back(zip(own, before, strict=True)))

    def time(self, recording: Recording, size: int) -> float:
        """The least time in ms of a few replays of a fresh batch of `size` rows.

        Each starts from the same slots, state and generators, so that a step that advances its own
        inputs does not walk out of its cache.
        """
        self._drawing.load(size)
        before = self._state.save()
        try:
            return least_ms(
                recording.replay, self._inputs.device, before=lambda: self._state.restore(before)
            )
        finally:
            surely(lambda: self._state.restore(before))

    def check_live(self, recording: Recording, eager: BoundStep, size: int) -> Mismatch | None:
        """Replay on what the slots hold now and compare with `eager`. Afterwards everything is as the
        replay left it or, where they differ, as the eager step did, run from what was there before; after
        an exception slots, state and what is compared in place are as before."""
        try:
            both = self._both.run(recording, eager, size, live=True)
        except BaseException:
            if self.agree is not None:
                self.agree(False)
            raise
        agreed = self.agree is None or self.agree(both.error is None)
        if both.error is not None:
            return Mismatch(both.error, both.outputs)
        if agreed:
            return None
        text = f"bucket {size}: a replay differed from the eager step on another rank"
        return Mismatch(VerificationError(text), both.outputs, elsewhere=True)

    def check_loop(self, recording: Recording, loop: Loop, size: int) -> None:
        """Hold a loop against replays one by one, on a fresh batch without padding.

        Raises:
            VerificationError: it does something else, or the step draws random numbers: each replay
                gets new ones from the host, the runs of a loop would get the same.
        """
        ring = self._ring
        assert ring is not None
        self._drawing.load(size)
        steps = min(3, ring.ring.length)
        ring.anew()
        ring.begin(steps, size)
        before = self._state.save()
        for _ in range(steps):
            recording.replay()
        replayed = self._both.outcome(recording, size)
        if self._state.drew_since(before):
            raise VerificationError(
                f"bucket {size}: the step draws random numbers, which the host renews at each replay "
                f"and a loop on the device would repeat"
            )
        self._state.restore(before)
        ring.spoil_start()
        loop.launch()
        missing = int(ring.left)
        if not 0 <= missing < steps or (missing and bool(ring.live[:size].any())):
            raise VerificationError(
                f"bucket {size}: a loop of {steps} steps ended with {missing} left and "
                f"{int(ring.live[:size].sum())} live rows"
            )
        for _ in range(missing):  # it stopped early, rightly
            recording.replay()
        compare(self._both.outcome(recording, size), replayed, f"bucket {size} as a loop")

    # -- padding, ranks, the operation -----------------------------------------------------------

    def _compare_pads(
        self,
        recording: Recording,
        unpadded: BoundStep | None,
        size: int,
        declared: Mapping[str, torch.Tensor],
    ) -> None:
        """Refuse a step whose real rows feel padding.

        Two signs must agree on a row. Its outputs change with what padding holds: that alone may be a
        step that knows its padding by a value and leaves it out. And they differ from those of the
        unpadded step: that alone may be rounding, which depends on shapes, or random numbers.

        Padding is made like row 0, then like row 1: a row whose state padding like it advances as well
        feels that one only. So does one that counts the rows unlike it, but padding like it brings that
        back to the unpadded step.
        """
        rows = self._inputs.rows
        before = self._state.save()
        # Ranks that ran through must not go on to replays that all have to join.
        with self._together():
            alike = self._padded_like(0, recording)
            felt = differing_rows(alike, declared, choices=True)
        drew = self._state.drew_since(before)
        nowhere = not felt if self.agree is None else self.agree(not felt)
        if nowhere and (unpadded is None or rows == 1 or (self.agree is None and drew)):
            return
        own: dict[int, Difference] = {}
        if not nowhere and rows > 1:  # on all ranks or on none, as what follows
            self._state.restore(before)
            with self._together():
                others = differing_rows(self._padded_like(1, recording), declared, choices=True)
            if 0 in felt and 0 not in others:
                own[0] = felt.pop(0)
        both = felt
        if unpadded is not None:
            self._state.restore(before)
            exact = self._both.eagerly(unpadded)
            other_rows = differing_rows(declared, exact, choices=False)
            if own and 0 in other_rows:
                name = other_rows[0].output
                if brought_back(alike[name][0], declared[name][0], exact[name][0]):
                    felt |= own
            both = {row: what for row, what in other_rows.items() if row in felt}
            if nowhere and not drew:
                self._note(row_count_notes(declared, exact))
        if both:
            found = both[min(both)]
            raise VerificationError(
                f"bucket {size} with {rows} rows: what padding rows hold changes output "
                f"{found.output!r} in real row {found.row} (relative difference {found.size:.3g} to "
                f"{'other' if unpadded is None else 'the step without'} padding, allowed "
                f"{found.allowed:g}); the step mixes the rows of a batch, such as by a mean over "
                f"them: mask rows beyond inputs['num_rows'], or tell CaptureManager with "
                f"rows_mix=True that this is meant. Or padding writes where a real row does, such as "
                f"into its cache slot: give that slot a pad value that no real row has"
            )

    def _padded_like(self, row: int, recording: Recording) -> dict[str, torch.Tensor]:
        """Copies of what real rows are once padding is like `row`."""
        with self._inputs.pads_like_row(row):
            recording.replay()
        rows = self._inputs.rows
        return {name: tensor[:rows].clone() for name, tensor in recording.outputs.items()}

    def _note(self, texts: Iterable[str]) -> None:
        """Each once."""
        self._padding_notes.update(dict.fromkeys(texts))

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What is raised inside on one rank ends the check on all of them: what would come next there
        waits for this one."""
        if self.agree is None:
            yield
            return
        try:
            yield
        except BaseException:
            self.agree(False)
            raise
        if not self.agree(True):
            raise AnotherRankFailed("it differed on another rank")

    def _narrowed(
        self, eager: BoundStep, size: int, before: Saved, kept: Collection[torch.Tensor]
    ) -> str:
        if self.agree is not None:
            return "the operation was not looked for: other ranks take part in the step"
        if self._recorder is None:
            return "the operation was not looked for"

        def put() -> None:
            self._state.restore(before)
            self._pool.poison()

        own = (*self._inputs.pinned.values(), *self._inputs.owned, *self._state.tensors)
        apart = {storage_key(tensor) for tensor in own}
        if self._pool.frozen:
            apart.add(storage_key(self._pool.arena))
        known = {storage_key(tensor) for tensor in kept} - apart
        return Narrowing(self._recorder, put, tuple(known)).sentence(eager, size)
