"""Placement of buffers in one arena: no two that live together overlap, in as few bytes as found.

This is dynamic storage allocation on the conflict graph of the buffers. It is NP-hard in general;
a decode step has a few dozen buffers, for which first fit in a good order nearly always meets the
lower bound, and a fixed number of shuffled orders covers most of the rest.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import permutations

ALIGNMENT = 256
"""Bytes to which every buffer is aligned (the alignment of a CUDA allocation that kernels rely on)."""

_SHUFFLES = 256
_TRY_ALL = 6
"""Up to so many buffers every order is tried, one of which always gives the smallest arena."""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment; an empty buffer still gets an address of its own."""
    return max(ALIGNMENT, (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)


@dataclass(frozen=True)
class Plan:
    """Where each buffer lies.

    Attributes:
        offsets: buffer name -> first byte in the arena.
        sizes: buffer name -> aligned size in bytes.
        total: size of the arena in bytes.
        lower_bound: bytes that no placement can go below: the peak of live bytes that was seen.
    """

    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    total: int
    lower_bound: int

    def overlapping(self, name: str) -> frozenset[str]:
        """The other buffers that share bytes with `name`."""
        start, end = self.offsets[name], self.offsets[name] + self.sizes[name]
        return frozenset(
            other
            for other, offset in self.offsets.items()
            if other != name and offset < end and start < offset + self.sizes[other]
        )


def plan_arena(
    nbytes: Mapping[str, int],
    conflicts: Mapping[str, AbstractSet[str]],
    lower_bound: int,
) -> Plan:
    """Place every buffer so that buffers in conflict do not overlap.

    Args:
        nbytes: buffer name -> bytes it needs.
        conflicts: buffer name -> names that are alive at some time when it is. Need not be symmetric.
        lower_bound: peak of live bytes, each buffer aligned.
    """
    sizes = {name: aligned(size) for name, size in nbytes.items()}
    rivals: dict[str, set[str]] = {name: set() for name in sizes}
    for name, others in conflicts.items():
        for other in others:
            rivals[name].add(other)
            rivals[other].add(name)
    best: dict[str, int] = {}
    best_total = -1
    for order in _orders(sizes, rivals):
        offsets = _first_fit(order, sizes, rivals)
        total = max((offsets[name] + sizes[name] for name in offsets), default=0)
        if best_total < 0 or total < best_total:
            best, best_total = offsets, total
        if best_total <= lower_bound:
            break
    return Plan(best, sizes, max(best_total, 0), lower_bound)


def _orders(
    sizes: Mapping[str, int], rivals: Mapping[str, AbstractSet[str]]
) -> Iterable[Sequence[str]]:
    names = list(sizes)
    weight = {n: sizes[n] + sum(sizes[r] for r in rivals[n]) for n in names}
    yield sorted(names, key=lambda n: (-sizes[n], n))
    yield sorted(names, key=lambda n: (-weight[n], -sizes[n], n))
    yield sorted(names, key=lambda n: (-len(rivals[n]), -sizes[n], n))
    if len(names) <= _TRY_ALL:
        yield from permutations(names)
        return
    generator = random.Random(0)  # fixed: the same step gets the same plan in every process
    for number in range(_SHUFFLES):
        # Sizes jittered rather than a plain shuffle: big buffers first is right most of the time.
        least = 0.3 if number % 4 else 0.0
        yield sorted(names, key=lambda n: -sizes[n] * generator.uniform(least, 1.0))


def _first_fit(
    order: Sequence[str], sizes: Mapping[str, int], rivals: Mapping[str, AbstractSet[str]]
) -> dict[str, int]:
    offsets: dict[str, int] = {}
    for name in order:
        start = 0
        for low, high in sorted(
            (offsets[r], offsets[r] + sizes[r]) for r in rivals[name] if r in offsets
        ):
            if start + sizes[name] <= low:
                break
            start = max(start, high)
        offsets[name] = start
    return offsets
