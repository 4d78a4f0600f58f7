"""StaticInputs: the persistent input tensors of a step, and what their padding rows hold.

All slots lie in one arena, so that a batch from the host arrives in one copy, and a batch on the
device in one multi-tensor copy. Padding rows are restored by an operation that is recorded in front
of the step: every replay sees declared, finite values in them, whatever the step or an earlier,
larger batch left there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, Protocol

import torch

from graphcap.batch_check import rows_of
from graphcap.buckets import is_count
from graphcap.errors import InputError
from graphcap.operations import operation
from graphcap.slots import PadPolicy, Slot, check_pad
from graphcap.staging import SLOT_ALIGNMENT, SlotRows, Staging, as_bytes
from graphcap.undo import surely

__all__ = ["NUM_ROWS", "PadPolicy", "Slot", "StaticInputs"]

NUM_ROWS = "num_rows"
"""Reserved name under which a step finds the number of real rows: int32 of shape (1,), on the device."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@operation("padding")
def _restore_pads(
    words: torch.Tensor,
    pad_words: torch.Tensor,
    row_of_word: torch.Tensor,
    num_rows: torch.Tensor,
    is_pad: torch.Tensor,
) -> None:
    """Words whose row is at or beyond the number of real rows get the words of the pad image."""
    torch.ge(row_of_word, num_rows, out=is_pad)
    torch.where(is_pad, pad_words, words, out=words)


class Inputs(Protocol):
    """What a manager needs of the inputs of a step; `StaticInputs` says what each part means.

    A host whose engine owns the input buffers brings its own (see `hosts/`): there copying a batch
    in and keeping padding harmless are the engine's work.
    """

    max_batch: int
    slots: dict[str, Slot]
    device: torch.device
    rows: int
    launches: int

    def views(self, rows: int) -> Mapping[str, torch.Tensor]: ...
    def __getitem__(self, name: str) -> torch.Tensor: ...
    def restore_pads(self) -> None: ...
    def check(self, batch: Mapping[str, torch.Tensor], rows: int | None = None) -> int: ...
    def load(self, batch: Mapping[str, torch.Tensor], rows: int) -> None: ...
    def clear(self) -> None: ...
    def snapshot(self) -> Any: ...
    def restore(self, saved: Any) -> None: ...
    def pads_like_row(self, row: int) -> AbstractContextManager[None]: ...
    def poison_pads(self, rows: int) -> None: ...
    @property
    def pinned(self) -> Mapping[str, torch.Tensor]: ...
    @property
    def owned(self) -> tuple[torch.Tensor, ...]: ...


class StaticInputs:
    """The slots of a step. Owns their memory; addresses never change.

    Args:
        max_batch: rows of every slot.
        slots: name -> `Slot`. ``num_rows`` is reserved.
        device: where the slots lie.

    Raises:
        InputError: no slot, a reserved name, or a pad value that the dtype cannot hold exactly.
    """

    def __init__(
        self, max_batch: int, slots: Mapping[str, Slot], device: torch.device | str
    ) -> None:
        if not is_count(max_batch):
            raise InputError(f"max_batch: expected an integer of at least 1, found {max_batch!r}")
        if not slots:
            raise InputError("a step needs at least one slot, found none")
        self.max_batch = int(max_batch)
        self.slots = dict(slots)
        self.device = torch.empty(0, device=device).device  # "cuda" -> "cuda:0"
        self.rows = 0
        """Real rows that the slots hold now."""
        self.launches = 0
        """Host calls so far that copied a batch or a row count into the slots."""
        with torch.inference_mode(False):  # an inference tensor could be written only in that mode
            self._layout()
            on_gpu = self.device.type == "cuda"
            self._staging = Staging(self._arena, self._slots_in) if on_gpu else None
        self._rows_of = SlotRows(self._tensors)

    # -- what a step reads -----------------------------------------------------------------------

    def views(self, rows: int) -> Mapping[str, torch.Tensor]:
        """The first `rows` rows of every slot, and ``num_rows``; read-only.

        New tensors at every call: what a step does to the tensor itself and not to its contents (its
        shape, a gradient) must not outlive the step.
        """
        views = {name: tensor[:rows] for name, tensor in self._tensors.items()}
        views[NUM_ROWS] = self._num_rows[:]
        return MappingProxyType(views)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The whole slot: (max_batch, *row_shape). Writing into it in place is allowed."""
        return self._tensors[name]

    def restore_pads(self) -> None:
        """Give every row beyond the real ones its pad value. Recorded in front of every step."""
        _restore_pads(self._words, self._pad_words, self._row_of_word, self._num_rows, self._is_pad)

    # -- loading a batch -------------------------------------------------------------------------

    def check(self, batch: Mapping[str, torch.Tensor], rows: int | None = None) -> int:
        """The number of rows of `batch`, checked before anything is launched. Any number >= 1.

        Args:
            batch: slot name -> tensor (n, *row_shape) of the slot's dtype, on the host or the
                slots' device. Slots left out keep the contents they have.
            rows: n, where `batch` is empty or to make sure.

        Raises:
            InputError: names the slot, what was expected, what was found, and the cure.
        """
        return rows_of(batch, rows, self.slots, self.device, self.rows)

    def load(self, batch: Mapping[str, torch.Tensor], rows: int) -> None:
        """Copy a checked `batch` into the slots: one launch for all tensors of the host, one for all
        of the device, none for a batch that is there already."""
        with torch.no_grad():
            self._load(batch, rows)

    def _load(self, batch: Mapping[str, torch.Tensor], rows: int) -> None:
        resized = rows != self.rows
        self.rows = 0  # a copy that fails leaves neither the old batch nor the new one
        if batch:
            near: list[tuple[torch.Tensor, torch.Tensor]] = []
            far: dict[str, torch.Tensor] = {}
            arena = self._arena.data_ptr()
            for name, given in batch.items():
                if given.device != self.device:
                    far[name] = given
                    continue
                tensor = given
                if tensor.is_conj() or tensor.is_neg():
                    tensor = tensor.resolve_conj().resolve_neg()
                address, target, target_bytes = self._rows_of.of(name, rows)
                start = tensor.data_ptr()
                if start == address and tensor.is_contiguous():
                    continue  # it is there already
                if arena <= start < arena + self._arena.nbytes:
                    # Rows of slots, moved within the slots: read all before any is written.
                    tensor = tensor.clone(memory_format=torch.contiguous_format)
                near.append(
                    (target_bytes, as_bytes(tensor)) if tensor.is_contiguous() else (target, tensor)
                )
            if near:
                if resized and not far:
                    near.append((as_bytes(self._num_rows), as_bytes(self._count_of(rows))))
                    resized = False
                self._copy_near(near)
            if far:
                assert self._staging is not None
                spans = [self._spans[name] for name in self.slots if name in far]
                if resized:
                    spans.insert(0, self._header)
                    resized = False
                image = self._staging.begin()
                image.header.fill_(rows)
                for name, tensor in far.items():
                    image.put(name, tensor)
                self.launches += self._staging.send(spans)
        if resized:
            self._num_rows.copy_(self._count_of(rows))
            self.launches += 1
        self.rows = rows

    def _count_of(self, rows: int) -> torch.Tensor:
        """`rows` as a tensor on the device, so that it travels with the copies of a batch."""
        return self._counts[rows : rows + 1]

    def _copy_near(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        groups: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for target, source in pairs:
            groups.setdefault(source.dtype, []).append((target, source))
        for group in groups.values():
            torch._foreach_copy_([t for t, _ in group], [s for _, s in group])
            self.launches += 1

    # -- for the manager -------------------------------------------------------------------------

    @property
    def arena(self) -> torch.Tensor:
        """All slots and the row count, as bytes."""
        return self._arena

    @property
    def pinned(self) -> Mapping[str, torch.Tensor]:
        """What a recording of the step points at, by a name for messages."""
        return {f"slot arena of {len(self.slots)} slots": self._arena}

    @property
    def owned(self) -> tuple[torch.Tensor, ...]:
        """Every tensor on the device that belongs to the slots, and to nobody else."""
        return (self._arena, self._pad_words, self._row_of_word, self._is_pad, self._counts)

    def clear(self) -> None:
        """No real row: every row becomes padding when a step runs next."""
        self._num_rows.fill_(0)
        self.rows = 0

    def snapshot(self) -> tuple[torch.Tensor, int]:
        """Contents of every slot and the row count, to hand to `restore`."""
        return self._arena.clone(), self.rows

    def restore(self, saved: tuple[torch.Tensor, int]) -> None:
        arena, self.rows = saved
        self._arena.copy_(arena)

    @contextmanager
    def pads_like_row(self, row: int) -> Iterator[None]:
        """For a while padding rows get what row `row` holds, instead of their declared values."""
        declared = self._pad_words.clone()
        image = self._pad_words.view(torch.uint8)
        try:
            for name, slot in self.slots.items():
                start, end = self._spans[name]
                target = image[start:end].view(slot.dtype).view(self._tensors[name].shape)
                target.copy_(self._tensors[name][row].clone().expand_as(target))
            yield
        finally:
            surely(lambda: self._pad_words.copy_(declared))

    def poison_pads(self, rows: int) -> None:
        """Fill rows from `rows` on with 0xFF bytes (NaN, -1): a check that they are restored."""
        garbage = -1 if self._words.dtype != torch.uint8 else 0xFF
        self._words.masked_fill_(self._row_of_word >= rows, garbage)

    # -- inside ----------------------------------------------------------------------------------

    def _layout(self) -> None:
        offset = SLOT_ALIGNMENT  # the header: the number of real rows
        self._header = (0, 4)
        self._spans: dict[str, tuple[int, int]] = {}
        word = 8
        for name, slot in self.slots.items():
            if name == NUM_ROWS:
                raise InputError(f"the slot name {NUM_ROWS!r} is reserved; use another")
            check_pad(name, slot)
            row_bytes = math.prod(slot.row_shape) * slot.dtype.itemsize
            if row_bytes == 0:
                raise InputError(f"slot {name!r}: row shape {slot.row_shape} has no element")
            self._spans[name] = (offset, offset + self.max_batch * row_bytes)
            offset = -(-self._spans[name][1] // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
            word = math.gcd(word, row_bytes)
        self._arena = torch.zeros(offset, dtype=torch.uint8, device=self.device)
        pads = torch.zeros(offset, dtype=torch.uint8, device="cpu")
        rows = torch.full((offset // word,), -1, dtype=torch.int32, device="cpu")
        for name, slot in self.slots.items():
            start, end = self._spans[name]
            # Copied: fill_ knows no float8 before torch 2.2.
            pad = torch.tensor(slot.pad.value, dtype=slot.dtype, device="cpu")
            pads[start:end].view(slot.dtype).copy_(pad)
            rows[start // word : end // word].view(self.max_batch, -1).copy_(
                torch.arange(self.max_batch, dtype=torch.int32, device="cpu")[:, None]
            )
        self._tensors = self._slots_in(self._arena)
        self._words = self._arena.view(_WORDS[word])
        self._pad_words = pads.to(self.device).view(_WORDS[word])
        self._row_of_word = rows.to(self.device)
        self._is_pad = torch.zeros(rows.shape, dtype=torch.bool, device=self.device)
        self._num_rows = self._arena[: self._header[1]].view(torch.int32)
        self._counts = torch.arange(self.max_batch + 1, dtype=torch.int32, device=self.device)
        self.restore_pads()

    def _slots_in(self, arena: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> (max_batch, *row_shape), of an arena or of an image of it."""
        return {
            name: arena[start:end]
            .view(self.slots[name].dtype)
            .view(self.max_batch, *self.slots[name].row_shape)
            for name, (start, end) in self._spans.items()
        }
