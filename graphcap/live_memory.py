"""Which addresses of a device are alive, and whose they are: ranges, and what torch's allocator holds.

Works on plain integers and on snapshots as ``torch.cuda.memory_snapshot()`` gives them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

PoolId = tuple[int, int]
"""What torch tells memory pools apart by; (0, 0) is the one that everybody allocates from."""


class Range(NamedTuple):
    """Addresses start, …, end - 1.

    Attributes:
        name: what lies there, for messages.
        owner: under what it is counted in a report, such as ``slots``.
    """

    start: int
    end: int
    name: str = ""
    owner: str = ""

    def distance(self, address: int) -> int:
        """Bytes from `address` to the nearest byte of the range; 0 inside."""
        return max(self.start - address, address - self.end + 1, 0)


class RangeMap:
    """Finds the range that an address lies in, by bisection.

    Where ranges overlap, the one that begins first keeps the bytes, of two that begin together the longer.
    """

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges: list[Range] = []
        covered = 0
        for found in sorted(ranges, key=lambda r: (r.start, -r.end)):
            if found.end > max(covered, found.start):
                self._ranges.append(found._replace(start=max(covered, found.start)))
                covered = found.end
        self._starts = [found.start for found in self._ranges]

    def __len__(self) -> int:
        return len(self._ranges)

    def find(self, address: int) -> Range | None:
        """The range with `address` in it."""
        index = bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._ranges[index].end:
            return self._ranges[index]
        return None

    def nearest(self, address: int) -> Range | None:
        """The range that is the fewest bytes away; None where there is none at all."""
        index = bisect_right(self._starts, address)
        beside = self._ranges[max(index - 1, 0) : index + 1]
        return min(beside, key=lambda r: r.distance(address), default=None)

    def spans(self, address: int) -> bool:
        """Whether `address` lies between the first byte of all ranges and the last."""
        return bool(self._ranges) and self._starts[0] <= address < self._ranges[-1].end

    def joined(self, more: Iterable[Range]) -> RangeMap:
        """These ranges and `more`, those that touch as one, without names."""
        ends: list[list[int]] = []
        for found in sorted((*self._ranges, *more), key=lambda r: r.start):
            if ends and found.start <= ends[-1][1]:
                ends[-1][1] = max(ends[-1][1], found.end)
            else:
                ends.append([found.start, found.end])
        return RangeMap(Range(start, end) for start, end in ends)


class Block(NamedTuple):
    """A piece of a segment of torch's allocator.

    Attributes:
        live: a tensor has it. Otherwise it is free, or will be once the device is done with it.
        pool: the pool that its segment belongs to.
        filled: what was asked for ends where the block ends; else it was rounded up.
    """

    start: int
    end: int
    live: bool
    pool: PoolId
    filled: bool = True


class AllocatorState:
    """The blocks of torch's allocator at one moment, on all devices.

    Args:
        snapshot: the segments of ``torch.cuda.memory_snapshot()``.

    Raises:
        KeyError: the snapshot does not say what is needed (an allocator that is not torch's own).
    """

    def __init__(self, snapshot: Sequence[Mapping[str, Any]]) -> None:
        self._blocks: list[Block] = []
        self.segments: list[Range] = []
        for segment in sorted(snapshot, key=lambda s: int(s["address"])):
            start, pool = int(segment["address"]), segment["segment_pool_id"]
            pool = (int(pool[0]), int(pool[1]))
            self.segments.append(Range(start, start + int(segment["total_size"])))
            for block in segment["blocks"]:
                end = start + int(block["size"])
                live = block["state"] == "active_allocated"
                filled = block.get("requested_size", block["size"]) == block["size"]
                self._blocks.append(Block(start, end, live, pool, filled))
                start = end
        self._starts = [block.start for block in self._blocks]

    def block_of(self, address: int) -> Block | None:
        """The block with `address` in it."""
        index = bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._blocks[index].end:
            return self._blocks[index]
        return None
