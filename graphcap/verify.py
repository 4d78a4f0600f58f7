"""Verification: a replay on other inputs than the recorded ones, pads poisoned, against eager."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphcap.checks import Difference, compare, first_difference
from graphcap.errors import VerificationError
from graphcap.inputs import Inputs
from graphcap.pool import BufferPool
from graphcap.recorders.base import BoundStep, Loop, Recording, autocast_casts_not_kept
from graphcap.ring import RingBuffer
from graphcap.timing import least_ms

Example = Callable[[int, torch.Generator], Mapping[str, torch.Tensor]]
"""Given a number of rows and a seeded CPU generator: a realistic batch with every slot."""


class Verifier:
    """Holds replays against the eager step.

    Args:
        inputs, pool: of the step; the bound step of each bucket is handed to `check`.
        example: makes realistic batches. Without it floating-point slots are drawn from N(0, 1),
            booleans at random, and integer slots, whose valid range is not known, keep their pad
            value; `notes` says so.
        state: tensors that the step changes and that running twice would change twice, and its own
            random generators.
        rows_mix: the rows of the step depend on each other on purpose, and so on padding.
        ring: what steps write their outputs into, if they do.
    """

    def __init__(
        self,
        inputs: Inputs,
        pool: BufferPool,
        example: Example | None,
        state: Sequence[torch.Tensor | torch.Generator],
        rows_mix: bool = False,
        ring: RingBuffer | None = None,
    ) -> None:
        self._rows_mix = rows_mix
        self._ring = ring
        self._inputs = inputs
        self._pool = pool
        self._example = example
        self._state = tuple(item for item in state if isinstance(item, torch.Tensor))
        self._saved = (*self._state, *(() if ring is None else ring.tensors))
        self._generators = tuple(item for item in state if isinstance(item, torch.Generator))
        self._generator = torch.Generator("cpu").manual_seed(20240917)
        self.notes: list[str] = []
        unvaried = [n for n, s in inputs.slots.items() if _is_integer(s.dtype)]
        if example is None and unvaried:
            self.notes.append(
                f"verified with integer slots at their pad values ({', '.join(unvaried)}); "
                f"give CaptureManager an example to vary them"
            )

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
            VerificationError: names output and row.
        """
        batch = self._draw(rows)
        self._inputs.load(batch, self._inputs.check(batch, rows))
        self._inputs.poison_pads(rows)
        read = (*kept, *self._state, *self._inputs.pinned.values())
        inputs = {_memory(tensor) for tensor in read}
        own = [t for t in recording.outputs.values() if _memory(t) not in inputs and _distinct(t)]
        before = [output.clone() for output in own]
        try:
            for output in own:
                _poison(output)
            self._pool.poison()
            before_replay = self._save()
            worst = self._compare(recording, eager, size)
            if rows < size and not self._rows_mix:
                declared = {n: t[:rows].clone() for n, t in recording.outputs.items()}
                after_replay = self._save()
                self._restore(before_replay)
                self._pool.poison()
                try:
                    self._compare_pads(recording, unpadded, size, declared)
                finally:
                    self._restore(after_replay)
            return worst
        finally:
            # An output may lie in memory that nobody told us of: it gets its contents back.
            with torch.inference_mode():
                for output, contents in zip(own, before, strict=True):
                    output.copy_(contents)

    def time(self, recording: Recording, size: int) -> float:
        """The least time in ms of a few replays of a fresh batch of `size` rows.

        Each starts from the same slots, state and generators, so that a step that advances its own
        inputs does not walk out of its cache.
        """
        batch = self._draw(size)
        self._inputs.load(batch, self._inputs.check(batch, size))
        before = self._save()
        try:
            return least_ms(
                recording.replay, self._inputs.device, before=lambda: self._restore(before)
            )
        finally:
            self._restore(before)

    def check_live(self, recording: Recording, eager: BoundStep, size: int) -> float:
        """Replay on what the slots hold now and compare with `eager`; keeps what the replay did."""
        return self._compare(recording, eager, size)

    def check_loop(self, recording: Recording, loop: Loop, size: int) -> None:
        """Hold a loop against replays one by one, on a fresh batch without padding.

        Raises:
            VerificationError: it does something else, or the step draws random numbers: each replay
                gets new ones from the host, the runs of a loop would get the same.
        """
        ring = self._ring
        assert ring is not None
        batch = self._draw(size)
        self._inputs.load(batch, self._inputs.check(batch, size))
        steps = min(3, ring.ring.length)
        ring.anew()
        ring.begin(steps, size)
        before = self._save()
        for _ in range(steps):
            recording.replay()
        replayed = self._outcome(recording, size)
        if self._drew_since(before):
            raise VerificationError(
                f"bucket {size}: the step draws random numbers, which the host renews at each replay "
                f"and a loop on the device would repeat"
            )
        self._restore(before)
        loop.launch()
        missing = int(ring.left)
        if not 0 <= missing < steps or (missing and bool(ring.live[:size].any())):
            raise VerificationError(
                f"bucket {size}: a loop of {steps} steps ended with {missing} left and "
                f"{int(ring.live[:size].sum())} live rows"
            )
        for _ in range(missing):  # it stopped early, rightly
            recording.replay()
        compare(self._outcome(recording, size), replayed, f"bucket {size} as a loop")

    def _outcome(self, recording: Recording, rows: int) -> dict[str, torch.Tensor]:
        return {n: t[:rows].clone() for n, t in recording.outputs.items()} | self._changed(rows)

    def _drew_since(self, saved: tuple[Any, ...]) -> bool:
        _, _, *random_before = saved
        _, _, *random_now = self._save()
        return any(
            not torch.equal(one, other)
            for one, other in zip(_flat(random_before), _flat(random_now), strict=True)
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a step touches besides slots and what it names: `state`, and the ring."""
        return (*self._state, *(() if self._ring is None else self._ring.owned))

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The random generators of `state`."""
        return self._generators

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Slots, state and random generators are afterwards as they were."""
        saved = self._save()
        try:
            yield
        finally:
            self._restore(saved)

    def _compare(self, recording: Recording, eager: BoundStep, size: int) -> float:
        rows = self._inputs.rows
        before = self._save()
        recording.replay()
        replayed = {name: t[:rows].clone() for name, t in recording.outputs.items()}
        replayed |= self._changed(rows)
        after = self._save()
        try:
            self._restore(before)
            with torch.no_grad(), autocast_casts_not_kept(), self._pool.outside():
                outputs = {name: tensor[:rows] for name, tensor in eager().items()}
            outputs |= self._changed(rows)
            return compare(replayed, outputs, f"bucket {size} with {rows} rows")
        finally:
            self._restore(after)
            with torch.inference_mode():
                for name, output in recording.outputs.items():
                    if _distinct(output):
                        output[:rows].copy_(replayed[name])

    def _compare_pads(
        self,
        recording: Recording,
        unpadded: BoundStep | None,
        size: int,
        declared: Mapping[str, torch.Tensor],
    ) -> None:
        """Refuse a step whose real rows feel padding.

        Two signs must agree. Outputs change with what padding holds: that alone may be a step that
        knows its padding by a value and leaves it out. And they differ from those of the unpadded
        step: that alone may be rounding, which depends on shapes, or random numbers.
        """
        rows = self._inputs.rows
        before = self._save()
        with self._inputs.pads_like_row(0):
            recording.replay()
        other = {name: tensor[:rows] for name, tensor in recording.outputs.items()}
        _, felt = first_difference(other, declared)
        if felt is None:
            return
        found: Difference | None = felt
        if unpadded is not None:
            self._restore(before)
            with torch.no_grad(), autocast_casts_not_kept(), self._pool.outside():
                exact = dict(unpadded())
            _, found = first_difference(declared, exact)
        if found is not None:
            raise VerificationError(
                f"bucket {size} with {rows} rows: what padding rows hold changes output "
                f"{found.output!r} in real row {found.row} (relative difference {found.size:.3g} to "
                f"{'other' if unpadded is None else 'the step without'} padding, allowed "
                f"{found.allowed:g}); the step mixes the rows of a batch, such as by a mean over "
                f"them: mask rows beyond inputs['num_rows'], or tell CaptureManager with "
                f"rows_mix=True that this is meant"
            )

    def _changed(self, rows: int) -> dict[str, torch.Tensor]:
        """Copies of what a step changes besides its outputs."""
        slots = {f"slot {name}": self._inputs[name][:rows].clone() for name in self._inputs.slots}
        state = {f"state {i}": t.clone().reshape(-1) for i, t in enumerate(self._state)}
        ring = {} if self._ring is None else self._ring.contents(rows)
        return slots | state | {name: tensor.clone() for name, tensor in ring.items()}

    def _draw(self, rows: int) -> Mapping[str, torch.Tensor]:
        if self._example is not None:
            return self._example(rows, self._generator)
        batch: dict[str, torch.Tensor] = {}
        for name, slot in self._inputs.slots.items():
            shape = (rows, *slot.row_shape)
            if slot.dtype == torch.bool:
                batch[name] = torch.rand(shape, generator=self._generator, device="cpu") < 0.5
            elif _is_integer(slot.dtype):
                batch[name] = torch.full(shape, slot.pad.value, dtype=slot.dtype, device="cpu")
            else:
                batch[name] = torch.randn(shape, generator=self._generator, device="cpu").to(
                    slot.dtype
                )
        return batch

    def _save(self) -> tuple[Any, ...]:
        device = self._inputs.device
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return (
            self._inputs.snapshot(),
            [tensor.clone() for tensor in self._saved],
            [generator.get_state() for generator in self._generators],
            torch.get_rng_state(),
            on_device,
        )

    def _restore(self, saved: tuple[Any, ...]) -> None:
        slots, state, generators, on_host, on_device = saved
        for generator, value in zip(self._generators, generators, strict=True):
            generator.set_state(value)
        self._inputs.restore(slots)
        with torch.inference_mode():
            for tensor, value in zip(self._saved, state, strict=True):
                tensor.copy_(value)
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, self._inputs.device)


def _flat(states: list[Any]) -> list[torch.Tensor]:
    flat = [s for item in states for s in (item if isinstance(item, list) else [item])]
    return [state for state in flat if state is not None]


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def _poison(tensor: torch.Tensor) -> None:
    with torch.inference_mode():  # also where the step made its tensors in that mode
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(-1 if tensor.dtype.is_signed else 1)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _distinct(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory, as those of an expanded tensor do."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return not any(length > 1 and stride == 0 for length, stride in sizes)
