"""EngineInputs: the slots of a step whose memory belongs to vLLM's model runner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

from graphcap.errors import InputError
from graphcap.inputs import NUM_ROWS
from graphcap.slots import Slot


class EngineInputs:
    """Follows `graphcap.inputs.Inputs` over buffers that the engine owns, fills and pads.

    The engine writes a batch into its buffers before the step and keeps padding harmless (a slot
    mapping of -1); nothing is copied and nothing is recorded for that here. Buffers become known when
    the engine first shows them to a step, largest bucket first: `adopt`.

    Args:
        max_batch: rows of the largest bucket (sequences, or tokens of a mixed batch).
        vocabulary: token ids that verification may draw.
        max_position: positions that verification may draw.
    """

    def __init__(
        self, max_batch: int, device: torch.device, vocabulary: int, max_position: int
    ) -> None:
        self.max_batch = max_batch
        self.device = device
        self.slots: dict[str, Slot] = {}
        self.rows = 0
        self.launches = 0
        self._limits = {"input_ids": vocabulary, "positions": max_position}
        self._buffers: dict[str, torch.Tensor] = {}
        with torch.inference_mode(False):
            self._num_rows = torch.zeros(1, dtype=torch.int32, device=device)

    def adopt(self, **buffers: torch.Tensor | None) -> None:
        """Take note of the engine's buffers, as views of the rows of the largest bucket."""
        for name, tensor in buffers.items():
            if tensor is None or name in self._buffers or tensor.dim() != 1:
                continue
            if tensor.shape[0] >= self.max_batch:
                self._buffers[name] = tensor[: self.max_batch]
                self.slots[name] = Slot((), tensor.dtype)

    def moved(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the engine now keeps buffer `name` somewhere else."""
        known = self._buffers.get(name)
        return known is not None and known.data_ptr() != tensor.data_ptr()

    def draw(self, rows: int, generator: torch.Generator) -> Mapping[str, torch.Tensor]:
        """A batch for verification: any tokens at any positions, each in a cache slot of its own.

        Slot 0 stays as it is: that is where the dummy block table of a capture points.
        """
        batch: dict[str, torch.Tensor] = {}
        for name, buffer in self._buffers.items():
            if name == "slot_mapping":
                values = torch.arange(1, rows + 1)
            else:
                values = torch.randint(0, self._limits.get(name, 1), (rows,), generator=generator)
            batch[name] = values.to(buffer.dtype)
        return batch

    # -- graphcap.inputs.Inputs ------------------------------------------------------------------

    def views(self, rows: int) -> Mapping[str, torch.Tensor]:
        views = {name: buffer[:rows] for name, buffer in self._buffers.items()}
        return MappingProxyType({**views, NUM_ROWS: self._num_rows[:]})

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._buffers[name]

    def restore_pads(self) -> None:
        """The engine has done it."""

    def check(self, batch: Mapping[str, torch.Tensor], rows: int | None = None) -> int:
        found = rows if rows is not None else self.rows
        if not 1 <= found <= self.max_batch:
            raise InputError(
                f"expected 1 to {self.max_batch} rows, found {found}; run larger batches eagerly"
            )
        return found

    def load(self, batch: Mapping[str, torch.Tensor], rows: int) -> None:
        with torch.inference_mode():
            for name, tensor in batch.items():
                self._buffers[name][:rows].copy_(tensor)
        self.rows = rows

    def clear(self) -> None:
        self.rows = 0

    def snapshot(self) -> Any:
        return {name: buffer.clone() for name, buffer in self._buffers.items()}, self.rows

    def restore(self, saved: Any) -> None:
        buffers, self.rows = saved
        with torch.inference_mode():
            for name, contents in buffers.items():
                self._buffers[name].copy_(contents)

    @contextmanager
    def pads_like_row(self, row: int) -> Iterator[None]:
        """Padding gets the token and position of row `row`; its cache slot stays none."""
        with torch.inference_mode():
            for name, buffer in self._buffers.items():
                if name != "slot_mapping":
                    buffer[self.rows :].copy_(buffer[row].clone())
        yield

    def poison_pads(self, rows: int) -> None:
        """Padding gets another token than a fresh buffer holds; garbage would be read out of range."""
        with torch.inference_mode():
            for name, buffer in self._buffers.items():
                if name == "slot_mapping":
                    buffer[rows:].fill_(-1)
                else:
                    buffer[rows:].fill_(self._limits.get(name, 1) - 1)

    @property
    def pinned(self) -> Mapping[str, torch.Tensor]:
        return {f"vLLM's buffer {name}": buffer for name, buffer in self._buffers.items()}

    @property
    def owned(self) -> tuple[torch.Tensor, ...]:
        return (self._num_rows,)
