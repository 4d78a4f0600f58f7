"""StateCache: what gated delta nets remember of each sequence, and which slot is whose."""

from __future__ import annotations

import torch

from graphcap.decode.delta_shape import DeltaShape
from graphcap.errors import InputError

NULL_SLOT = 0
"""Never given to a sequence: padding rows point at it, and what it holds never matters."""


class StateCache:
    """Owns, per layer with a gated delta net, the tokens that its convolution still sees and its
    recurrent state.

    A slot needs no reset: the step starts a sequence at position 0 from zeros, whatever its slot holds.

    Args:
        delta: the sizes of a layer.
        layers: how many layers have one.
        num_sequences: sequences that can be held at the same time.
        dtype: the model's; recurrent states are float32.

    Attributes:
        conv: per layer (slots, C, W - 1) in the model's dtype, oldest token first.
        recurrent: per layer (slots, Gv, Dk, Dv) float32.
    """

    def __init__(
        self,
        delta: DeltaShape,
        layers: int,
        *,
        num_sequences: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self.num_sequences = num_sequences
        slots = num_sequences + 1
        conv = (slots, delta.channels, delta.conv_width - 1)
        recurrent = (slots, delta.num_value_heads, delta.key_dim, delta.value_dim)
        self.conv = [torch.zeros(conv, device=device, dtype=dtype) for _ in range(layers)]
        self.recurrent = [
            torch.zeros(recurrent, device=device, dtype=torch.float32) for _ in range(layers)
        ]
        self._free = list(range(num_sequences, NULL_SLOT, -1))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.conv, *self.recurrent))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Views of all states but the null slot's: what a step changes when it runs once more."""
        return [tensor[NULL_SLOT + 1 :] for tensor in (*self.conv, *self.recurrent)]

    def allocate(self) -> int:
        """A slot for a sequence.

        Raises:
            InputError: none is free.
        """
        if not self._free:
            raise InputError(
                f"all {self.num_sequences} recurrent states are in use; free a sequence first"
            )
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Give a slot back.

        Raises:
            InputError: it is free already, or no slot that could have been given out.
        """
        if not NULL_SLOT < slot <= self.num_sequences:
            raise InputError(f"state slots are 1 to {self.num_sequences}, found {slot}")
        if slot in self._free:
            raise InputError(f"state slot {slot} is free already; free a sequence once")
        self._free.append(slot)

    def fill_random(self, generator: torch.Generator) -> None:
        """Fill every real state from N(0, 1): what verification of a step reads there."""
        for tensor in self.tensors:
            tensor.normal_(generator=generator)

    def clear(self) -> None:
        for tensor in (*self.conv, *self.recurrent):
            tensor.zero_()
