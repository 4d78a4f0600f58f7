"""Many: what several steps by one call gave, as views of the ring; and whether the ring is where it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from graphcap.errors import StaleRecordingError
from graphcap.output_views import HandedOut


@dataclass(frozen=True)
class Many:
    """What several steps of n rows gave, by one call. Owned by the manager's ring; valid until the next
    step of any kind: copy it on the same stream (``.cpu()``, ``.clone()``) to keep it.

    Attributes:
        outputs: output name -> (k, n, *row_shape), of the first step first. What lies beyond
            ``counts[row]`` is of no meaning.
        counts: int64 (n,): how many of the steps belong to each row, the one that ended it included;
            0 for a row that had ended before. None: no `Stop` was given, and all k belong to all.
        live: bool (n,): the rows that have not ended. None: as above.
    """

    outputs: Mapping[str, torch.Tensor]
    counts: torch.Tensor | None
    live: torch.Tensor | None


class ManyViews(HandedOut):
    """A `Many` that is handed out at every call.

    Args:
        places: output name -> (length, M, *row_shape).
        ends: (counts, live), each (M,); None: no row ends.
        steps, rows: how much of them.
    """

    __slots__ = ("many",)

    def __init__(
        self,
        places: Mapping[str, torch.Tensor],
        ends: tuple[torch.Tensor, torch.Tensor] | None,
        steps: int,
        rows: int,
    ) -> None:
        outputs = {name: place[:steps, :rows] for name, place in places.items()}
        counts, live = (None, None) if ends is None else (ends[0][:rows], ends[1][:rows])
        self.many = Many(MappingProxyType(outputs), counts, live)
        super().__init__([*outputs.values(), *(t for t in (counts, live) if t is not None)])


class RingPlace:
    """Where a ring lies, of which callers have views.

    Args:
        tensors: what is handed out, by a name for messages.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._addresses = tuple((name, t, t.data_ptr()) for name, t in tensors.items())

    def check(self) -> None:
        """Raises `StaleRecordingError` where memory that every step writes to was given away."""
        for name, tensor, address in self._addresses:
            if tensor.data_ptr() != address:
                raise StaleRecordingError(
                    f"{name} has moved to another address, expected the memory that was recorded: its "
                    f"storage was resized. What run_many() gives belongs to the manager's ring: clone() "
                    f"what you resize or free; close() this manager and make a new one"
                )
