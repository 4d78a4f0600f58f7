"""PointerCheck: every address that a captured graph uses, held against live memory before it is replayed.

What is a fault and what is none:

- A free block of torch's allocator, outside the graph's own pool, is memory that the next tensor gets: a
  fault. The graph's own pool is the graph's, free or not.
- What the driver knows and torch's allocator does not own (workspaces, buffers of collectives) is alive.
- A word of a larger structure may be a field that nobody set and holds what was on the stack. It is
  believed where its block was in use when the recording began and is free now; else it is *unsure*.
- An address right behind a live block, of which the node has an address too, is where that block ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from graphcap.graph_addresses import SHOWN, GraphAddresses, PointerReport, Word
from graphcap.live_memory import AllocatorState, Block, PoolId, Range, RangeMap

GRAPH_POOL = "graph pool"
KEPT = "kept by the recording"
UNNAMED = "unnamed"
WORKSPACE = "workspace"
DRIVER = "driver"
HOST = "host"


class DriverRange(NamedTuple):
    """Memory that the driver knows."""

    start: int
    end: int
    on_host: bool


class Memory:
    """All that is known to be alive at one moment.

    Args:
        state: of torch's allocator.
        pool: the graph's own.
        known: ranges by name: slots, pool, weights, what the recording keeps.
        own: memory that the graph allocates by its own nodes.
        earlier: what torch's allocator has ever been seen to hold.
        ask_driver: the range that the driver knows around an address; None: it knows none.
        workspaces: the memory pool of the workspaces of the stream that was captured; None: it has none.
        on_host: whether this process has mapped an address for itself; by default its own maps.
    """

    def __init__(
        self,
        state: AllocatorState,
        pool: PoolId,
        known: RangeMap,
        own: Iterable[Range],
        earlier: RangeMap,
        ask_driver: Callable[[int], DriverRange | None],
        on_host: Callable[[int], bool] | None = None,
        workspaces: PoolId | None = None,
    ) -> None:
        self._workspaces = workspaces
        self.state, self.pool, self.known, self.earlier = state, pool, known, earlier
        self._own = RangeMap(own)
        self._ask = ask_driver
        self._on_host = on_host
        self._asked: dict[int, DriverRange | None] = {}

    def owner(self, address: int) -> str | None:
        """Under whom a live address is counted; None: it is not known to be alive."""
        block = self.state.block_of(address)
        if block is not None and block.pool == self.pool:
            return GRAPH_POOL
        if block is not None and block.pool == self._workspaces:
            return WORKSPACE  # free or not: nobody else is given memory of that pool
        if block is not None and not block.live:
            return None
        named = self.known.find(address)
        if named is not None:
            return named.owner
        if block is not None:
            return UNNAMED
        if self._own.find(address) is not None:
            return GRAPH_POOL
        found = self._driver_range(address)
        return None if found is None else HOST if found.on_host else DRIVER

    def is_free(self, address: int) -> bool:
        """Whether torch's allocator may give `address` to anybody."""
        block = self.state.block_of(address)
        own = (self.pool, self._workspaces)
        return block is not None and not block.live and block.pool not in own

    def is_gone(self, address: int) -> bool:
        """Whether torch's allocator had `address` and nobody has it now."""
        return self.earlier.find(address) is not None and not self.is_on_host(address)

    def is_on_host(self, address: int) -> bool:
        if self._on_host is None:
            self._on_host = _host_maps()
        return self._on_host(address)

    def _driver_range(self, address: int) -> DriverRange | None:
        if address not in self._asked:
            self._asked[address] = self._ask(address)
        return self._asked[address]


class Findings(NamedTuple):
    """What a check found.

    Attributes:
        faults, unsure: a text for each.
        report: of a first check, without its time.
        loose: the words whose memory nobody known keeps alive: what a later check has to look at again.
    """

    faults: list[str]
    unsure: list[str]
    report: PointerReport
    loose: list[Word]


def check(addresses: GraphAddresses, memory: Memory, before: AllocatorState | None) -> Findings:
    """Resolve every word.

    Args:
        before: torch's allocator when the recording began; None: this is a later check, of words that
            were alive when the recording was made.
    """
    owner_of: dict[int, str | None] = {}
    owners: Counter[str] = Counter()
    unnamed: set[Block] = set()
    loose: list[Word] = []
    suspects: list[Word] = []
    beside: dict[int, list[int]] = {}  # node -> its live addresses
    for word in addresses.words:
        address = word.address
        if address not in owner_of:
            owner_of[address] = memory.owner(address)
        owner = owner_of[address]
        if owner is None:
            suspects.append(word)
            continue
        if not word.is_end:
            owners[owner] += 1
        beside.setdefault(word.node, []).append(address)
        if owner in (UNNAMED, DRIVER):
            loose.append(word)
        if owner == UNNAMED:
            block = memory.state.block_of(address)
            assert block is not None
            unnamed.add(block)
    faults: list[str] = []
    unsure: list[str] = []
    for word in suspects:
        judged = _judged(word, memory, before, beside.get(word.node, ()))
        if judged is not None:
            certain, state = judged
            text = f"{_place(addresses, word)}: expected the address of live memory, found {state}"
            (faults if certain else unsure).append(text + _nearest(memory.known, word.address))
    alive = sum(owners.values())
    report = PointerReport(
        nodes=addresses.total,
        nodes_checked=addresses.total - sum(addresses.unread.values()),
        pointers=alive + len(faults) + len(unsure),
        pointers_checked=alive,
        owners=dict(owners.most_common()),
        unnamed_blocks=len(unnamed),
        unnamed_bytes=sum(block.end - block.start for block in unnamed),
        unsure=tuple(unsure[:SHOWN]),
        not_checked=dict(addresses.unread),
    )
    loose = [w._replace(may_be_end=_ends_there(w, memory, beside[w.node])) for w in loose]
    return Findings(faults, unsure, report, loose)


def _judged(
    word: Word, memory: Memory, before: AllocatorState | None, beside: Sequence[int]
) -> tuple[bool, str] | None:
    """Whether a word that is not known to be alive is a fault for certain, and what it is instead of
    live; None: it is no address, or one of nothing that is read."""
    address, whole = word.address, word.is_whole
    if memory.is_free(address):
        block = memory.state.block_of(address)
        assert block is not None
        state = (
            f"{address:#x}, {address - block.start} bytes into a free block of {block.end - block.start} "
            f"bytes of torch's allocator, which the next tensor gets"
        )
        if before is None:
            certain = word.is_set and not word.may_be_end
            return certain, f"{state}: it was in use when the recording was made"
        was = before.block_of(address)
        had = was is not None and was.live and was.pool != memory.pool
        began_there = had and was is not None and was.start == address
        if not began_there and _ends_there(word, memory, beside):
            return None
        if had:
            return True, f"{state}: it was in use when the recording began"
        return whole, f"{state}: it was free already when the recording began"
    if before is None:
        state = "which neither torch's allocator nor the driver knows now"
        return word.is_set, f"{address:#x}, {state}: it was in use when the recording was made"
    if memory.is_gone(address):
        return whole, f"{address:#x}, which torch's allocator has given back to the driver"
    if whole and memory.earlier.spans(address) and not memory.is_on_host(address):
        return False, f"{address:#x}, which neither torch's allocator nor the driver knows"
    return None


def _ends_there(word: Word, memory: Memory, beside: Iterable[int]) -> bool:
    """Whether a kernel's argument may be where the block before it ends, rather than an address in use:
    the node has an address in that block too."""
    block = memory.state.block_of(word.address)
    if isinstance(word.argument, str) or block is None or block.start != word.address:
        return False
    last = memory.state.block_of(word.address - 1)
    return (
        last is not None and last.filled and any(last.start <= other < last.end for other in beside)
    )


def _place(addresses: GraphAddresses, word: Word) -> str:
    node = addresses.nodes[word.node]
    if isinstance(word.argument, str):
        where = word.argument
    elif word.is_whole:
        where = f"argument {word.argument}"
    else:
        where = f"argument {word.argument} at byte {word.offset} of {word.size}"
    index = int(node.path.split(".")[0])
    names = [name for first, end, name in addresses.operations if first <= index < end]
    operation = f" of {names[0]}" if names else ""
    return f"node {node.path} ({node.what}{operation}), {where}"


def _nearest(known: RangeMap, address: int) -> str:
    near = known.nearest(address)
    if near is None:
        return ""
    side = "before" if near.end <= address else "behind"
    return f" (nearest is {near.name}, {near.distance(address)} bytes {side})"


def not_checked_note(reports: Iterable[PointerReport | None]) -> str | None:
    """For a capture report: what keeps graphs from being checked."""
    why: dict[str, None] = {}
    for report in reports:
        why.update(dict.fromkeys(() if report is None else report.not_checked))
    return f"not every pointer of the graphs was checked: {'; '.join(why)}" if why else None


def _host_maps() -> Callable[[int], bool]:
    """What tells whether this process can use an address itself: code, stack, heap, not a device's."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return lambda address: True
    ranges = []
    for line in lines:
        span, access, *_ = line.split(maxsplit=2)
        # Addresses of a device are only reserved, or belong to its driver.
        if access[:3] != "---" and "/dev/nvidia" not in line:
            start, end = span.split("-")
            ranges.append(Range(int(start, 16), int(end, 16)))
    mapped = RangeMap(ranges)
    return lambda address: mapped.find(address) is not None
