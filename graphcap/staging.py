"""Where batches go: kept views of the slots, and pinned host images of them, through which a batch on the
host reaches the device in one copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

SLOT_ALIGNMENT = 64
"""Bytes to which each slot is aligned in the arena; smaller gaps are copied along."""


MOST_KEPT = 1024
"""Views of slots that are kept, about 1 KiB of the host's memory each."""


class SlotRows:
    """The first rows of each slot, as they are and as bytes. Made once: every batch asks for them.

    Args:
        slots: name -> the whole slot. A slot that lies elsewhere later gives other views.
    """

    def __init__(self, slots: Mapping[str, torch.Tensor]) -> None:
        self._slots = slots
        self._kept: dict[tuple[str, int], tuple[int, torch.Tensor, torch.Tensor]] = {}

    def of(self, name: str, rows: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """(address, (rows, *row_shape), (bytes,)); nobody else's, so nobody reshapes them."""
        kept = self._kept.get((name, rows))
        address = self._slots[name].data_ptr()
        if kept is None or kept[0] != address:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            with torch.inference_mode(
                False
            ):  # an inference tensor could be written only in that mode
                view = self._slots[name][:rows]
                kept = self._kept[name, rows] = (address, view, as_bytes(view))
        return kept


class Image:
    """A pinned copy of the arena on the host.

    Attributes:
        header: int32 (1,): the number of real rows.
    """

    def __init__(
        self, arena: torch.Tensor, slots_of: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
    ) -> None:
        self._bytes = torch.zeros(arena.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._arena = arena
        self._rows = SlotRows(slots_of(self._bytes))
        self.header = self._bytes[:4].view(torch.int32)
        self.sent = torch.cuda.Event()
        self._spans: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor` (n, *row_shape), of any strides, into the first rows of a slot."""
        self._rows.of(name, tensor.shape[0])[1].copy_(tensor)

    def copy(self, start: int, end: int) -> None:
        """Bytes from `start` to `end` to the arena. Asynchronous, on the current stream."""
        pair = self._spans.get((start, end))
        if pair is None:
            pair = self._spans[start, end] = self._arena[start:end], self._bytes[start:end]
        pair[0].copy_(pair[1], non_blocking=True)


class Staging:
    """Images of the arena, used in turn so that none is rewritten while it is copied.

    Args:
        slots_of: the slots that lie in an arena, by name.
    """

    COPIES = 4

    def __init__(
        self, arena: torch.Tensor, slots_of: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
    ) -> None:
        self._device = arena.device
        self._images = [Image(arena, slots_of) for _ in range(self.COPIES)]
        self._turn = 0

    def begin(self) -> Image:
        """The next image, free to be written: its last copy has ended."""
        self._turn = (self._turn + 1) % self.COPIES
        image = self._images[self._turn]
        image.sent.synchronize()
        return image

    def send(self, spans: list[tuple[int, int]]) -> int:
        """Copy byte ranges of the image to the arena, neighbours as one. Returns the copies made.

        Ranges are given in order. Two are neighbours when only alignment gaps lie between them.
        """
        merged: list[tuple[int, int]] = []
        for start, end in spans:
            if merged and start - merged[-1][1] < SLOT_ALIGNMENT:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        image = self._images[self._turn]
        for start, end in merged:
            image.copy(start, end)
        # The stream of the copies, which is the current one of the arena's device, not of any other.
        image.sent.record(torch.cuda.current_stream(self._device))
        return len(merged)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as bytes, so that slots of different dtypes share one multi-tensor copy."""
    flat = tensor.view(-1)
    if flat.numel() == 1:  # contiguous whatever its stride is, and torch wants 1
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)
