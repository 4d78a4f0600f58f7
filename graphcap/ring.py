"""RingBuffer: chosen outputs of the last steps kept on the device, and which rows have ended.

A replay overwrites the outputs of the one before. So that several steps can run without the host in
between, each step, recorded or eager, ends with one operation that copies the outputs it was asked
for into the next place of a ring and notes the rows that have just produced their last token.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from graphcap.errors import InputError
from graphcap.explain import warn
from graphcap.many_views import Many, ManyViews, RingPlace
from graphcap.operations import BufferSpec, Operation, operation
from graphcap.ring_checks import check_output, check_values, is_spec
from graphcap.staging import MOST_KEPT

logger = logging.getLogger(__name__)

_WORD = 2**63


@dataclass(frozen=True)
class Stop:
    """When a row ends.

    Attributes:
        output: an output of one element a row.
        values: a row ends with the step that gives it one of these (token ids of end-of-sequence).
            Empty: `output` is boolean and says so itself.
    """

    output: str
    values: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        values = self.values
        if not isinstance(values, (tuple, list)) or not all(
            type(value) is int and -_WORD <= value < _WORD for value in values
        ):
            raise InputError(
                f"Stop.values: expected a tuple of integers of 64 bits, such as (2,), found {values!r}"
            )


@dataclass(frozen=True)
class Ring:
    """What `CaptureManager.run_many` keeps.

    Attributes:
        length: the most steps of one call.
        outputs: output name -> (row shape, dtype), such as ``{"token_ids": ((), torch.int32)}``.
        stop: None: no row ends by itself.
    """

    length: int
    outputs: Mapping[str, BufferSpec]
    stop: Stop | None = None

    def __post_init__(self) -> None:
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 1:
            raise InputError(
                f"Ring.length: expected an integer of at least 1, found {self.length!r}; it is the "
                f"most steps of one run_many()"
            )
        for name, spec in self.outputs.items() if isinstance(self.outputs, Mapping) else ():
            if not is_spec(spec):
                raise InputError(
                    f"Ring.outputs[{name!r}]: expected the shape and dtype of a row, such as "
                    f"((), torch.int32), found {spec!r}"
                )
        if not isinstance(self.outputs, Mapping) or not self.outputs:
            raise InputError(
                "Ring.outputs: expected at least one output to keep, found "
                f"{self.outputs or 'none'}; name one with the "
                "shape and dtype of a row, such as {'token_ids': ((), torch.int32)}"
            )


@operation("ring")
def write(
    places: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, ...],
    cursor: torch.Tensor,
    length: int,
    counts: torch.Tensor,
    live: torch.Tensor,
    ends: torch.Tensor | None,
    values: torch.Tensor,
    hit: torch.Tensor,
) -> None:
    """Outputs go to the place of `cursor`, which moves on; rows that end are live no more.

    Args:
        places, outputs: (length, M, *row_shape) and (M, *row_shape) of one dtype, pair by pair.
        cursor: int64 (1,): the place to write, in front of `length`.
        counts: int64 (M,): grows by 1 for each live row, where `ends` is given.
        live: bool (M,): unset where `ends` holds one of `values`.
        ends: (M,), integer or boolean; None: no row ends.
        values: int64 (number of them,).
        hit: bool (M,): overwritten.
    """
    for place, output in zip(places, outputs, strict=True):
        place.index_copy_(0, cursor, output.unsqueeze(0))
    # Also where steps run one by one, for which nobody sets the cursor back.
    cursor.add_(1).remainder_(length)
    if ends is not None:
        counts.add_(live)
        for value in values:
            torch.eq(ends, value, out=hit)
            live.masked_fill_(hit, False)


def write_operation(device: torch.device) -> Operation:
    """`write` as one kernel where Triton makes it right, otherwise as torch's own."""
    if device.type != "cuda" or find_spec("triton") is None:
        return write
    try:
        from graphcap.ring_triton import write as fused

        _hold_against_torch(fused, device)
    except Exception as error:  # a compiler can fail in any way
        warn(
            logger, "run-many", "the ring is written by torch's kernels, Triton's fails: %s", error
        )
        return write
    return fused


def _hold_against_torch(fused: Operation, device: torch.device) -> None:
    results = []
    for one in (fused, write):
        tokens = torch.tensor([7, 8, 9], dtype=torch.int32, device=device)
        places = torch.zeros(2, 4, dtype=torch.int32, device=device)
        cursor, counts = (torch.ones(n, dtype=torch.int64, device=device) for n in (1, 3))
        live, hit = (torch.tensor([True, True, False], device=device) for _ in range(2))
        values = torch.tensor([5, 8], device=device)
        one.function((places[:, :3],), (tokens,), cursor, 2, counts, live, tokens, values, hit)
        results.append([t.tolist() for t in (places, cursor, counts, live)])
    if results[0] != results[1]:
        raise ValueError(f"expected {results[1]}, found {results[0]}")


class RingBuffer:
    """The memory of a `Ring` for batches of up to `rows` rows. Addresses never change.

    Attributes:
        ring: what was asked for.
        rows: rows of every place.
        left: int32 (1,): steps that remain of the present call; counted down by a loop on the device
            (see `recorders/loop.py`), by nobody else.
        live: bool (rows,): real rows that have not ended.
        place: whether all of it is where it was.
    """

    def __init__(self, ring: Ring, rows: int, device: torch.device) -> None:
        self.ring = ring
        self.rows = rows
        with torch.inference_mode(False):  # an inference tensor could be written only in that mode
            self._places = {
                name: torch.zeros(ring.length, rows, *shape, dtype=dtype, device=device)
                for name, (shape, dtype) in ring.outputs.items()
            }
            # The cursor, the counts and what is left: set together by one copy at the start of a call.
            start = torch.zeros(2 + rows, dtype=torch.int64, device=device)
            self._anew, self._steps = torch.zeros_like(start), 0  # what is copied there
            self.left = start[-1:].view(torch.int32)[:1]  # the lower half
            self.live = torch.zeros(rows, dtype=torch.bool, device=device)
            self._numbers = torch.arange(rows, dtype=torch.int32, device=device)
            self._hit = torch.zeros(rows, dtype=torch.bool, device=device)
            # A boolean that ends a row is its own value.
            values = (ring.stop.values or (1,)) if ring.stop is not None else ()
            self._values = torch.tensor(values, dtype=torch.int64, device=device)
        self._start = start
        self._head, self._cursor, self._counts = start[:-1], start[:1], start[1:-1]
        handed_out = {f"ring {name}": place for name, place in self._places.items()}
        self.place = RingPlace(handed_out | {"ring counts": start, "ring live rows": self.live})
        self._write = write_operation(device)
        self._live_rows: int | None = None
        self._views: dict[tuple[int, int], ManyViews] = {}

    # -- at the end of every step ----------------------------------------------------------------

    def write(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Keep what a step of some rows has just given. Part of every recording.

        Raises:
            CaptureError: an output is missing or not of the declared shape and dtype.
        """
        if not isinstance(outputs, Mapping):
            return  # refused by name where it is warmed up
        ring = self.ring
        for name, (shape, dtype) in ring.outputs.items():
            check_output(outputs, name, tuple(shape), dtype)
        ends = None
        if ring.stop is not None:
            wanted = None if ring.stop.values else torch.bool
            ends = check_output(outputs, ring.stop.output, (), wanted)
            check_values(ring.stop.output, ring.stop.values, ends.dtype)
        rows = outputs[next(iter(self._places))].shape[0]
        self._write(
            tuple(place[:, :rows] for place in self._places.values()),
            tuple(outputs[name] for name in self._places),
            self._cursor,
            ring.length,
            self._counts[:rows],
            self.live[:rows],
            ends,
            self._values,
            self._hit[:rows],
        )

    # -- one call of run_many() ------------------------------------------------------------------

    def anew(self) -> None:
        """Another batch has come: no row of it has ended."""
        self._live_rows = None

    def revive(self, rows: int) -> None:
        """All of `rows` real rows are live: one launch."""
        torch.lt(self._numbers, rows, out=self.live)
        self._live_rows = rows

    def begin(self, steps: int, rows: int) -> None:
        """The next `steps` steps, of `rows` real rows, fill the ring from its start: one launch besides
        those of `expect`."""
        self.expect(steps, rows)
        self._start.copy_(self._anew)

    def expect(self, steps: int, rows: int) -> None:
        """All of `begin` but what a loop that was given `start` does itself at its launch: no launch,
        one for another number of steps than before, one for a new batch or fewer rows of it."""
        if self._steps != steps:
            self._steps = 0  # in front: an interrupt must not leave a number that is not there
            self._anew[-1:].fill_(steps)
            self._steps = steps
        known = self._live_rows
        if known is None or known < rows:
            self.revive(rows)
        elif known > rows:  # of the same batch: rows that have ended stay so
            self.live[rows:].fill_(False)
            self._live_rows = rows

    @property
    def start(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(place, source), int64 (2 + rows,): the copy by which the steps of a call fill the ring from its
        start, see `Recording.repeated`."""
        return self._start, self._anew

    def result(self, steps: int, rows: int) -> Many:
        """Views of what the first `steps` steps after `begin` gave; the same ones at every call, as long
        as they are what they were."""
        kept = self._views.get((steps, rows))
        if kept is None or not kept.intact():
            if len(self._views) >= MOST_KEPT:
                self._views.clear()
            ends = (self._counts, self.live) if self.ring.stop is not None else None
            kept = self._views[steps, rows] = ManyViews(self._places, ends, steps, rows)
        return kept.many

    # -- for verification ------------------------------------------------------------------------

    def spoil_start(self) -> None:
        """Leave nothing of `begin`: a loop has to set the cursor, the counts and what is left itself. One
        that does not runs once, and writes inside the ring."""
        self._start.fill_(1)
        self._cursor.fill_(self.ring.length - 1)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that steps change."""
        return (*self._places.values(), self._head, self.left, self.live, self._hit)

    @property
    def owned(self) -> tuple[torch.Tensor, ...]:
        """Every tensor that the recorded write touches."""
        return (*self.tensors, self._values)

    def contents(self, rows: int) -> dict[str, torch.Tensor]:
        """What `rows` real rows and the ring itself hold: the same after a replay and an eager step."""
        held = {f"ring {name}": place[:, :rows] for name, place in self._places.items()}
        return held | {
            "ring cursor": self._cursor,
            "ring counts": self._counts[:rows],
            "ring live rows": self.live[:rows],
        }
