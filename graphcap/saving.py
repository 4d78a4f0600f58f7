"""StepState: what running a step changes (slots, state, the ring, random generators), to be put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphcap.inputs import Inputs
from graphcap.ring import RingBuffer
from graphcap.undo import surely

Saved = tuple[Any, ...]


class StepState:
    """Saves and restores.

    Args:
        inputs: the slots.
        state: the step's own tensors that running it twice changes twice, and its random generators.
        ring: what steps write their outputs into, if they do.
    """

    def __init__(
        self,
        inputs: Inputs,
        state: Sequence[torch.Tensor | torch.Generator],
        ring: RingBuffer | None,
    ) -> None:
        self._inputs = inputs
        self._ring = ring
        self.own = tuple(item for item in state if isinstance(item, torch.Tensor))
        """The tensors of `state`."""
        self.generators = tuple(item for item in state if isinstance(item, torch.Generator))
        self._saved = (*self.own, *(() if ring is None else ring.tensors))
        self._first = len(self._saved)  # others are adopted
        self._kept: Saved | None = None  # what the outermost put_back saved

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a step touches besides slots and what it names: `state`, and the ring."""
        return (*self.own, *(() if self._ring is None else self._ring.owned))

    def adopt(self, tensor: torch.Tensor) -> None:
        """Save and restore this one as well from here on. What was saved before knows nothing of it, save
        what `put_back` is to put back: it gets the present contents."""
        if self._kept is not None:
            _, kept, *_ = self._kept
            kept.append(tensor.clone())
        self._saved = (*self._saved, tensor)

    def forget_adopted(self) -> None:
        """Save and restore no more than at first."""
        self._saved = self._saved[: self._first]

    def save(self) -> Saved:
        device = self._inputs.device
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return (
            self._inputs.snapshot(),
            [tensor.clone() for tensor in self._saved],
            [generator.get_state() for generator in self.generators],
            torch.get_rng_state(),
            on_device,
        )

    def restore(self, saved: Saved) -> None:
        slots, state, generators, on_host, on_device = saved
        for generator, value in zip(self.generators, generators, strict=True):
            generator.set_state(value)
        self._inputs.restore(slots)
        copy_back(zip(self._saved, state, strict=False))  # see adopt
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, self._inputs.device)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Slots, state and random generators are afterwards as they were.

        One inside another puts back what the other saved, and takes no memory for it.
        """
        outer = self._kept
        saved = self.save() if outer is None else outer
        try:
            self._kept = saved
            yield
        finally:
            self._kept = outer
            surely(lambda: self.restore(saved))

    def drew_since(self, saved: Saved) -> bool:
        """Whether random numbers were drawn since `saved`."""
        _, _, *random_before = saved
        _, _, *random_now = self.save()
        return any(
            not torch.equal(one, other)
            for one, other in zip(_flat(random_before), _flat(random_now), strict=True)
        )

    def contents(self, rows: int) -> dict[str, torch.Tensor]:
        """Copies of what a step of `rows` real rows changes besides its outputs."""
        slots = {f"slot {name}": self._inputs[name][:rows].clone() for name in self._inputs.slots}
        state = {f"state {i}": t.clone().reshape(-1) for i, t in enumerate(self.own)}
        ring = {} if self._ring is None else self._ring.contents(rows)
        return slots | state | {name: tensor.clone() for name, tensor in ring.items()}


def copy_back(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Into the first tensor of each pair what the second holds."""
    with torch.inference_mode():  # also where the step made its tensors in that mode
        for tensor, contents in pairs:
            tensor.copy_(contents)


def _flat(states: list[Any]) -> list[torch.Tensor]:
    flat = [s for item in states for s in (item if isinstance(item, list) else [item])]
    return [state for state in flat if state is not None]
