"""Pinned host images of the slots, through which a batch on the host reaches the device in one copy."""

from __future__ import annotations

import torch

SLOT_ALIGNMENT = 64
"""Bytes to which each slot is aligned in the arena; smaller gaps are copied along."""


class Staging:
    """Pinned host images of the arena, used in turn so that none is rewritten while it is copied."""

    COPIES = 4

    def __init__(self, arena: torch.Tensor) -> None:
        self._arena = arena
        self._images = [
            torch.zeros(arena.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
            for _ in range(self.COPIES)
        ]
        self._sent = [torch.cuda.Event() for _ in range(self.COPIES)]
        self._turn = 0

    def begin(self) -> torch.Tensor:
        """The next image, free to be written: its last copy has ended."""
        self._turn = (self._turn + 1) % self.COPIES
        self._sent[self._turn].synchronize()
        return self._images[self._turn]

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
            self._arena[start:end].copy_(image[start:end], non_blocking=True)
        # The stream of the copies, which is the current one of the arena's device, not of any other.
        self._sent[self._turn].record(torch.cuda.current_stream(self._arena.device))
        return len(merged)
