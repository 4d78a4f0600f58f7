"""What a step writes in place besides its slots and its `state`: key-value caches, above all.

A cache that holds the right rows already makes up for a replay that writes none. So what a replay leaves in
such memory is held against what the eager step leaves there, from the same contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from graphcap.checks import Difference, first_difference
from graphcap.drawing import distinct, memory
from graphcap.reachable import Watched

LIMIT = 2**28
"""Bytes of tensors that are compared whole."""


@dataclass(frozen=True)
class Place:
    """Memory that a step writes in place.

    Attributes:
        name: for messages.
        tensor: where it lies.
        index: int64 (k,), entries of dimension `dim` that a step of the present rows writes, on the
            tensor's device; others may be among them. None: the whole tensor.
    """

    name: str
    tensor: torch.Tensor
    index: torch.Tensor | None = None
    dim: int = 0

    def read(self) -> torch.Tensor:
        tensor = _plain(self.tensor)
        return tensor.clone() if self.index is None else tensor.index_select(self.dim, self.index)

    def write(self, contents: torch.Tensor) -> None:
        with torch.inference_mode():  # also where it was made in that mode
            if self.index is None:
                _plain(self.tensor).copy_(contents)
            else:
                _plain(self.tensor).index_copy_(self.dim, self.index, contents)


Written = Callable[[Mapping[str, torch.Tensor]], Sequence[Place]]
"""Given the real rows of every slot before a step: where that step writes. For what is too large to be
compared whole; may name more than is written, never slots or the pool."""


class InPlace:
    """Chooses what is compared.

    Args:
        watched: what the step reaches by name. Of these, tensors that are no parameters are compared
            whole, the smallest first, up to `limit` bytes together.
        apart: what belongs to slots, pool, ring and `state`: it is compared by other means or not at all.
        written: of larger tensors, the places of a batch.
    """

    def __init__(
        self,
        watched: Iterable[Watched],
        apart: Iterable[torch.Tensor],
        device: torch.device,
        written: Written | None = None,
        limit: int = LIMIT,
    ) -> None:
        self._written = written
        taken = {memory(tensor) for tensor in apart}
        largest: dict[int, tuple[str, torch.Tensor]] = {}  # of those that share memory
        for item in watched:
            tensor = item.value
            if not isinstance(tensor, torch.Tensor) or isinstance(tensor, torch.nn.Parameter):
                continue
            if tensor.layout != torch.strided or tensor.device != device or not distinct(tensor):
                continue
            key = memory(tensor)
            if key not in taken and (key not in largest or tensor.nbytes > largest[key][1].nbytes):
                largest[key] = (item.name, tensor)
        self._whole: list[Place] = []
        for name, tensor in sorted(largest.values(), key=lambda pair: pair[1].nbytes):
            limit -= tensor.nbytes
            if limit < 0:
                break
            self._whole.append(Place(name, tensor))

    def places(self, slots: Mapping[str, torch.Tensor]) -> list[Place]:
        """For a step on these rows of the slots."""
        given = [] if self._written is None else list(self._written(slots))
        known = {memory(place.tensor) for place in given}
        return [*(p for p in self._whole if memory(p.tensor) not in known), *given]


class Contents:
    """What some places hold at one moment."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = {place.name: place for place in places}
        self._held = {name: place.read() for name, place in self._places.items()}

    def put(self) -> None:
        for name, place in self._places.items():
            place.write(self._held[name])

    def difference(self, other: Contents) -> tuple[Place, Difference] | None:
        """The first place whose contents differ, and where; rows are those of the whole tensor."""
        _, found = first_difference(self._held, other._held)
        if found is None:
            return None
        place = self._places[found.output]
        row = found.row
        if place.index is not None and place.dim == 0:
            row = int(place.index[row])
        return place, Difference(found.output, row, found.size, found.allowed)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Float8 as bytes: older torch can neither select from it nor compare it."""
    small = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.view(torch.uint8) if small else tensor
