"""Fallback: runs the steps that no recording serves eagerly, counts them, and says so once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from graphcap.buckets import BucketLadder
from graphcap.errors import FallbackError, anchor_in
from graphcap.explain import warn
from graphcap.inputs import NUM_ROWS, Inputs
from graphcap.pool import BufferPool
from graphcap.recorders.base import autocast_casts_not_kept

logger = logging.getLogger(__name__)

_REMEDIES = {
    "above_max_batch": "raise max_batch (and the ladder), or limit the batch to it",
    "not_recorded": "see the WARNING of capture() and stats().failures for why",
    "rank_failed": "see the log of the other ranks for what differed there",
    "verification": "see the WARNING of capture() and stats().failures for what differed",
}


class Fallback:
    """Eager steps of a manager.

    A batch that fits the slots is copied into them and runs unpadded. A larger one lives in tensors
    of its own until another batch comes, so that a step that advances its inputs can go on.

    Attributes:
        counts: reason -> steps run eagerly.
        batches: real rows -> steps run eagerly.
    """

    def __init__(
        self,
        step: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
        inputs: Inputs,
        pool: BufferPool,
        ladder: BucketLadder,
        *,
        strict: bool,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.batches: Counter[int] = Counter()
        self._step = step
        self._inputs = inputs
        self._pool = pool
        self._ladder = ladder
        self._strict = strict
        self._overflow: dict[str, torch.Tensor] | None = None
        self._overflow_rows = 0

    def continues(self, rows: int | None) -> bool:
        """Whether a run without a batch goes on with one that is too large for the slots."""
        return (
            self._overflow is not None
            and self._inputs.rows == 0  # else a batch was loaded into the slots since
            and rows in (None, self._overflow_rows)
        )

    @property
    def overflow_rows(self) -> int:
        """Rows of the batch that `continues` goes on with."""
        return self._overflow_rows

    def forget(self) -> None:
        """Another batch has come: the large one is no longer the current one."""
        self._overflow = None

    def run_on(self) -> Mapping[str, torch.Tensor]:
        """The next step of the batch that is too large for the slots."""
        assert self._overflow is not None
        return self._run(self._overflow, self._overflow_rows, "above_max_batch")

    def run(
        self, batch: Mapping[str, torch.Tensor], rows: int, reason: str
    ) -> Mapping[str, torch.Tensor]:
        """Run a checked batch of `rows` rows.

        Raises:
            FallbackError: fallbacks are errors; nothing was launched.
        """
        self.announce(rows, reason)
        if rows > self._inputs.max_batch:
            self.forget()  # its memory, before as much again is asked for
            self._overflow, self._overflow_rows = self._copied(batch, rows), rows
            self._inputs.rows = 0  # what the slots hold belongs to an earlier batch
            return self.run_on()
        self.forget()
        self._inputs.load(batch, rows)
        return self._run(self._inputs.views(rows), rows, reason)

    def announce(self, rows: int, reason: str, remedy: str | None = None) -> None:
        """Say that a step of `rows` rows is about to run eagerly: a WARNING at the first one.

        Raises:
            FallbackError: fallbacks are errors.
        """
        text = (
            f"a step of {rows} rows has no recording ({reason}, maximum {self._ladder.max_batch})"
        )
        cure = remedy or _REMEDIES.get(reason, "see stats().failures for why")
        if self._strict:
            raise FallbackError(f"{text} and GRAPHCAP_STRICT=1 forbids eager steps; {cure}")
        if self.counts[reason] == 0:
            warn(
                logger,
                anchor_in(cure, "fallback"),
                "%s and runs eagerly, from now on without a message; %s",
                text,
                cure,
            )

    def count(self, rows: int, reason: str) -> None:
        """A step of `rows` rows has run eagerly."""
        self.counts[reason] += 1
        self.batches[rows] += 1

    def _run(
        self, slots: Mapping[str, torch.Tensor], rows: int, reason: str
    ) -> Mapping[str, torch.Tensor]:
        # New views at every step: see StaticInputs.views.
        views = MappingProxyType({name: tensor[:] for name, tensor in slots.items()})
        with (
            torch.no_grad(),
            autocast_casts_not_kept(),
            self._pool.outside(),
            self._pool.step(),
        ):
            outputs = self._step(views)
        self.count(rows, reason)
        return outputs

    def _copied(self, batch: Mapping[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
        device = self._inputs.device
        with torch.inference_mode(False), torch.no_grad():
            # Contiguous, as slots are: a kernel may take that for granted.
            copies = {
                name: torch.empty(batch[name].shape, dtype=slot.dtype, device=device).copy_(
                    batch[name]
                )
                for name, slot in self._inputs.slots.items()
            }
            copies[NUM_ROWS] = torch.tensor([rows], dtype=torch.int32, device=device)
        return copies
