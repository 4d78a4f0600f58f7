"""What was read of a captured graph that may be addresses, and the report on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphcap.live_memory import Range

SMALL = 64
"""Bytes of a structure up to which all fields count as set: elementwise kernels get arrays of pointers."""

SHOWN = 8
"""Unsure addresses that a report spells out."""


class Node(NamedTuple):
    """A graph node that uses addresses.

    Attributes:
        path: its index, in the order in which nodes were made; ``5.3`` is the fourth of a child graph.
        what: kind and name, for messages.
    """

    path: str
    what: str


class Word(NamedTuple):
    """Eight bytes of a node's parameters that may be an address.

    Attributes:
        node: index into `GraphAddresses.nodes`.
        argument: which of the kernel's; or the role in a copy or memset.
        offset: bytes from the argument's beginning; of a copy or memset, of the last byte it touches.
        size: of the argument, in bytes; 8: it is this word.
        may_be_end: it was found where a block begins and the one before it ends, of which the node has an
            address too: it may be the end of that one.
    """

    node: int
    argument: int | str
    offset: int
    size: int
    address: int
    may_be_end: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it is an argument by itself, and so was set by whoever launched the kernel."""
        return self.size == 8

    @property
    def is_end(self) -> bool:
        """Whether it is no address of a node, but where a copy or memset ends."""
        return isinstance(self.argument, str) and self.offset > 0

    @property
    def is_set(self) -> bool:
        """Whether it belongs to no structure that is so large that fields may have been left unset."""
        return self.size <= SMALL


@dataclass
class GraphAddresses:
    """What was read of a graph.

    Attributes:
        own: memory that the graph allocates by nodes of its own.
        total: nodes that use addresses: kernels, copies, memsets and those of kinds that are not read.
        unread: why the parameters of a node were not read -> how many nodes.
        operations: first node, end and name of each operation of the step, as far as they were watched.
    """

    nodes: list[Node] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    own: list[Range] = field(default_factory=list)
    total: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    operations: Sequence[tuple[int, int, str]] = ()


@dataclass(frozen=True)
class PointerReport:
    """What the check of a bucket's graph found.

    Attributes:
        nodes: graph nodes that use addresses.
        nodes_checked: of them, those whose parameters were read.
        pointers: addresses of memory in them.
        pointers_checked: of them, those that are alive for certain.
        owners: whose memory these are -> pointers: ``slots``, ``pool``, ``named`` (reached by name from the
            step), ``graph pool`` (the graph's own), ``workspace`` (cuBLAS's, of the stream), ``kept by the
            recording``, ``unnamed`` (a live block of torch's allocator that nobody known keeps alive, such
            as another library's workspace), ``driver`` (alive by the driver's word, not torch's), ``host``.
        unnamed_blocks, unnamed_bytes: what ``unnamed`` points at.
        unsure: the first few addresses that may be none, or of freed memory; see docs/how-it-works.md.
        not_checked: why nodes were not -> how many.
        ms: time that reading and checking took.
    """

    nodes: int = 0
    nodes_checked: int = 0
    pointers: int = 0
    pointers_checked: int = 0
    owners: Mapping[str, int] = field(default_factory=dict)
    unnamed_blocks: int = 0
    unnamed_bytes: int = 0
    unsure: tuple[str, ...] = ()
    not_checked: Mapping[str, int] = field(default_factory=dict)
    ms: float = 0.0

    def __str__(self) -> str:
        return (
            f"checked pointers: {self.pointers_checked} of {self.pointers}, "
            f"nodes: {self.nodes_checked} of {self.nodes}, {self.ms:.1f} ms"
        )
