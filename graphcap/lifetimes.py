"""When each buffer of a pool is alive within a step, and where it then lies: the pool as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphcap.plan import Plan

Span = tuple[int, int]
"""First and last event of one life, both included: the take and the release."""

ENDS = 128
"""Events at each end of a step of which a layout keeps every life; layers in between repeat."""


@dataclass(frozen=True)
class BufferLayout:
    """One buffer of the pool.

    Attributes:
        offset, nbytes: its bytes in the arena; `nbytes` is aligned.
        lives: how often the step takes it.
        spans: its lives that touch the first or last `ENDS` events of the step; all, where the step
            is shorter. Empty: the step that was observed does not take it.
    """

    name: str
    offset: int
    nbytes: int
    lives: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class PoolLayout:
    """The pool during the step that held the most bytes at once.

    Attributes:
        events: takes and releases of the step; an event's number is its time.
        buffers: by offset, then name.
    """

    events: int
    buffers: tuple[BufferLayout, ...]


class Lifetimes:
    """Watches the takes and releases of steps, and keeps those of the step with the highest peak."""

    def __init__(self) -> None:
        self._events = 0
        self._alive: dict[str, int] = {}
        self._spans: dict[str, list[Span]] = {}
        self._peak = -1
        self._kept: tuple[int, Mapping[str, list[Span]]] = (0, {})

    def taken(self, name: str) -> None:
        self._alive[name] = self._events
        self._events += 1

    def released(self, name: str) -> None:
        first = self._alive.pop(name, None)
        if first is not None:  # None: it was taken where nobody watched
            self._spans.setdefault(name, []).append((first, self._events))
            self._events += 1

    def ended(self, peak_bytes: int) -> None:
        """The step is over: what is still alive lives to its last event.

        Args:
            peak_bytes: the most bytes that the step held at once.
        """
        last = max(self._events - 1, 0)
        for name, first in self._alive.items():
            self._spans.setdefault(name, []).append((first, last))
        if self._spans and peak_bytes > self._peak:
            self._peak, self._kept = peak_bytes, (self._events, self._spans)
        self._events, self._alive, self._spans = 0, {}, {}

    def layout(self, plan: Plan) -> PoolLayout:
        events, spans = self._kept
        buffers = []
        for name in sorted(plan.offsets, key=lambda n: (plan.offsets[n], n)):
            lives = spans.get(name, [])
            kept = tuple(s for s in sorted(lives) if s[0] < ENDS or s[1] >= events - ENDS)
            buffers.append(
                BufferLayout(name, plan.offsets[name], plan.sizes[name], len(lives), kept)
            )
        return PoolLayout(events, tuple(buffers))
