"""What the check of a graph's addresses calls a fault, what it is unsure of, and what it lets pass."""

from __future__ import annotations

import ctypes
import json
import time
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pointer_fakes import GraphDriver, ints, segment, words

from graphcap.graph_addresses import GraphAddresses, Node, PointerReport, Word
from graphcap.live_memory import AllocatorState, Range, RangeMap
from graphcap.pointer_check import DriverRange, Memory, _host_maps, check, not_checked_note
from graphcap.recorders.base import garbage_collection_held
from graphcap.recorders.graph_pointers import PointerReader

COMMON, OWN, OTHER = (0, 0), (0, 5), (0, 6)
BASE, GRAPH, THEIRS, OUTSIDE, HOST, GONE = (0x7F0000000000 + (i << 30) for i in range(6))
MIB = 2**20
# BASE: weight | scratch | x | rest; each 1 MiB
LIVE = ("live", "live", "live", "live")


def state(*common, theirs="live", own="free", gone=False):
    segments = [
        segment(BASE, COMMON, *((MIB, s) for s in common)),
        segment(GRAPH, OWN, (MIB, own)),
        segment(THEIRS, OTHER, (MIB, theirs)),
    ]
    return AllocatorState(segments + ([segment(GONE, COMMON, (MIB, "free"))] if gone else []))


KNOWN = RangeMap(
    [Range(BASE, BASE + MIB, "step.weight", "named"), Range(HOST + 8, HOST + 9, "it", "named")]
)


def memory(now, earlier=None, own=(), workspaces=None):
    def ask(address):
        if OUTSIDE <= address < OUTSIDE + MIB:
            return DriverRange(OUTSIDE, OUTSIDE + MIB, False)
        return DriverRange(HOST, HOST + 8, True) if HOST <= address < HOST + 8 else None

    seen = RangeMap().joined((earlier or now).segments).joined(now.segments)
    return Memory(now, OWN, KNOWN, own, seen, ask, lambda a: HOST <= a < HOST + MIB, workspaces)


def graph(*parameters):
    """A kernel with these parameters, read as the recorder does."""
    driver = GraphDriver()
    return PointerReader(driver).read([driver.memset(GRAPH, 4), driver.kernel("k", *parameters)])


def found(addresses, now, before=None, **more):
    return check(addresses, memory(now, before, **more), before or now)


ALL = state(*LIVE, own="live")


def test_a_workspace_given_back_is_nobody_elses():
    """The pool of a stream's workspaces is the stream's, free or not, as the graph's own is the graph's."""
    given_back = state(*LIVE, own="live", theirs="free")
    addresses = graph(words(THEIRS + 16))
    assert found(addresses, given_back, before=ALL).faults
    held = found(addresses, given_back, before=ALL, workspaces=OTHER)
    assert held.faults == held.unsure == held.loose == []
    assert held.report.owners["workspace"] == 1


def test_live_memory_is_counted_by_owner():
    addresses = graph(
        words(BASE), words(BASE + 2 * MIB + 3), words(OUTSIDE), words(HOST), words(HOST + 8)
    )
    findings = found(addresses, ALL)
    assert findings.faults == findings.unsure == []
    report = findings.report
    assert report.owners == {"graph pool": 1, "named": 2, "unnamed": 1, "driver": 1, "host": 1}
    assert (report.pointers, report.pointers_checked) == (6, 6)
    assert (report.nodes, report.nodes_checked) == (2, 2)
    assert (report.unnamed_blocks, report.unnamed_bytes) == (1, MIB)
    assert [w.address for w in findings.loose] == [BASE + 2 * MIB + 3, OUTSIDE]


def test_the_graphs_own_pool_is_its_own_also_where_it_is_free():
    assert found(graph(words(GRAPH + 8)), state(*LIVE, own="free")).faults == []


def test_memory_that_the_graph_allocates_is_its_own():
    made = Range(GONE + MIB, GONE + 2 * MIB)
    assert found(graph(words(GONE + MIB + 4)), ALL, own=[made]).report.pointers_checked == 2


SIZES = [8, 16, 64, 72, 400]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("when", ["free", "pending"])
def test_what_was_freed_while_it_was_recorded_is_a_fault_in_an_argument_of_any_size(size, when):
    now = state("live", when, "live", "live")
    addresses = graph(words(BASE), words(*[0] * (size // 8 - 1), BASE + MIB + 16))
    (fault,) = found(addresses, now, ALL).faults
    where = "argument 1" if size == 8 else f"argument 1 at byte {size - 8} of {size}"
    assert fault == (
        f"node 1 (kernel k), {where}: expected the address of live memory, found {BASE + MIB + 16:#x}, 16 "
        f"bytes into a free block of 1048576 bytes of torch's allocator, which the next tensor gets: it was "
        f"in use when the recording began (nearest is step.weight, 17 bytes before)"
    )


@pytest.mark.parametrize("size", SIZES)
def test_what_was_free_already_is_a_fault_only_in_an_argument_by_itself(size):
    """A field of a structure may never have been set, and hold what lay on the stack."""
    now = state("live", "free", "live", "live")
    addresses = graph(words(*[0] * (size // 8 - 1), BASE + MIB + 16))
    findings = found(addresses, now, now)
    texts = findings.faults if size == 8 else findings.unsure
    assert len(findings.faults) + len(findings.unsure) == len(texts) == 1
    assert "it was free already when the recording began" in texts[0]
    report = findings.report
    assert (report.pointers_checked, report.pointers) == (1, 2)
    assert report.unsure == tuple(findings.unsure)


def test_a_free_block_of_another_graphs_pool_is_a_fault():
    (fault,) = found(graph(words(THEIRS)), state(*LIVE, theirs="free"), ALL).faults
    assert f"{THEIRS:#x}, 0 bytes into a free block" in fault


def test_an_address_where_a_block_ends_that_the_kernel_also_uses_is_none_of_the_next():
    now = state("live", "free", "live", "live")
    both = graph(words(BASE + 512), words(BASE + MIB))
    assert found(both, now, now).faults == []
    # Without another address in the block before, it is the free block itself.
    assert len(found(graph(words(BASE + MIB)), now, now).faults) == 1
    # One byte into it, it is.
    assert len(found(graph(words(BASE), words(BASE + MIB + 1)), now, now).faults) == 1
    # A tensor began there when the recording began: that one was freed.
    assert len(found(both, now, ALL).faults) == 1


def test_copies_and_memsets_are_held_to_their_last_byte():
    now = state("live", "free", "live", "live")
    driver = GraphDriver()

    def faults(*nodes):
        return found(PointerReader(driver).read(list(nodes)), now, now).faults

    assert faults(driver.copy(BASE, BASE + 2 * MIB, MIB)) == []
    (beyond,) = faults(driver.copy(BASE, BASE + 2 * MIB, MIB + 1))
    assert beyond.startswith("node 0 (memcpy), end of the source: expected")
    start, end = faults(driver.memset(0x1_0000_0000, 1), driver.memset(BASE + MIB, 4))
    assert start.startswith("node 1 (memset), target: expected")
    assert end.startswith("node 1 (memset), end of the target")


def test_what_the_allocator_has_given_back_is_named():
    before = state(*LIVE, gone=True)
    (fault,) = found(graph(words(GONE + 5)), ALL, before).faults
    assert f"found {GONE + 5:#x}, which torch's allocator has given back to the driver" in fault
    findings = found(graph(words(GONE, 1)), ALL, before)
    assert (len(findings.faults), len(findings.unsure)) == (0, 1)


def test_an_address_between_those_of_the_device_is_named_and_no_fault():
    odd = BASE + 8 * MIB
    findings = found(graph(words(odd)), ALL)
    assert findings.faults == []
    assert "which neither torch's allocator nor the driver knows" in findings.unsure[0]
    for harmless in (words(odd, odd), words(HOST + 100), words(2**56), words(2**33)):
        findings = found(graph(harmless), ALL)
        assert findings.faults == findings.unsure == []
        assert findings.report.pointers == 1


def test_the_operation_is_named_where_it_is_known():
    now = state("live", "free", "live", "live")
    addresses = graph(words(BASE + MIB))
    addresses.operations = [(0, 1, "copies"), (1, 3, "rms_norm"), (3, 4, "other")]
    assert "node 1 (kernel k of rms_norm)" in found(addresses, now).faults[0]
    driver = GraphDriver()
    nested = PointerReader(driver).read([driver.child(driver.kernel("k", words(BASE + MIB)))])
    nested.operations = [(0, 1, "cond")]
    assert "node 0.0 (kernel k of cond)" in found(nested, now).faults[0]


# -- a later check -----------------------------------------------------------------------------------


def later(parameter, now):
    """The first check passes, the second one meets `now`."""
    addresses = graph(words(BASE), parameter)
    first = found(addresses, ALL)
    assert first.faults == first.unsure == []
    addresses.words = first.loose
    return check(addresses, memory(now, ALL), None)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_freed_between_recording_and_replay_is_a_fault_unless_it_may_be_a_field_unset(size):
    now = state("live", "free", "live", "live")
    findings = later(words(*[0] * (size // 8 - 1), BASE + MIB + 16), now)
    texts = findings.faults if size <= 64 else findings.unsure
    assert len(findings.faults) + len(findings.unsure) == len(texts) == 1
    assert "it was in use when the recording was made" in texts[0]


def test_what_the_driver_knew_and_knows_no_more_is_a_fault():
    addresses = graph(words(OUTSIDE + 4))
    addresses.words = found(addresses, ALL).loose
    gone = memory(ALL)
    gone._ask = lambda address: None
    (fault,) = check(addresses, gone, None).faults
    assert "which neither torch's allocator nor the driver knows now" in fault


def test_what_may_be_the_end_of_the_block_before_is_no_fault_when_the_next_is_freed():
    findings = later(words(BASE + MIB), state("live", "free", "live", "live"))
    assert (len(findings.faults), len(findings.unsure)) == (0, 1)


def test_a_block_that_was_rounded_up_ends_where_no_tensor_does():
    def rounded(*states):
        made = segment(BASE, COMMON, *((MIB, s) for s in states))
        made["blocks"][0]["requested_size"] = MIB - 4
        return AllocatorState([made])

    now = rounded("live", "free")
    addresses = graph(words(BASE), words(BASE + MIB))
    assert len(found(addresses, now, now).faults) == 1
    addresses.words = found(addresses, rounded(*LIVE), rounded(*LIVE)).loose
    assert len(check(addresses, memory(now), None).faults) == 1


def test_what_nobody_has_freed_passes_again():
    assert later(words(BASE + MIB + 16), ALL).faults == []


# -- all cases at once -------------------------------------------------------------------------------

STATES = st.lists(st.sampled_from(["live", "free", "pending"]), min_size=4, max_size=4)


@given(STATES, STATES, st.lists(st.integers(0, 4 * MIB - 1), min_size=1, max_size=6))
def test_no_live_address_is_ever_named_and_no_freed_one_passes(before, now, offsets):
    addresses = GraphAddresses([Node(str(i), "kernel k") for i in range(len(offsets))], total=1)
    addresses.words = [Word(i, 0, 0, 8, BASE + offset) for i, offset in enumerate(offsets)]
    findings = found(addresses, state(*now), state(*before))
    dead = [o for o in offsets if now[o // MIB] != "live"]
    assert len(findings.faults) == len(dead)
    assert all(any(f"{BASE + o:#x}, " in fault for fault in findings.faults) for o in dead)
    assert findings.report.pointers_checked == len(offsets) - len(dead)


# -- cost, and reports -------------------------------------------------------------------------------


def test_a_graph_of_1100_nodes_is_read_and_checked_within_50_ms():
    """The work of the processor, since others share the machine; collection is held, as in a capture."""
    driver = GraphDriver()
    kernels = [
        driver.kernel(
            f"k{i}", *(words(BASE + i * 64 + j) for j in range(8)), ints(i), ints(i, i, i)
        )
        for i in range(30)
    ]
    nodes = [kernels[i % 30] for i in range(1100)]
    blocks = [segment(BASE + (i << 21), COMMON, *[(MIB, "live")] * 2) for i in range(2000)]
    now = AllocatorState(blocks)
    names = [Range(BASE + (i << 20), BASE + (i << 20) + MIB, f"w{i}", "named") for i in range(1000)]
    took = []
    with garbage_collection_held():
        for _ in range(5):
            started = time.process_time()
            addresses = PointerReader(driver).read(nodes)
            used = Memory(now, OWN, RangeMap(names), (), RangeMap(), lambda a: None)
            findings = check(addresses, used, now)
            took.append((time.process_time() - started) * 1e3)
    assert findings.report.pointers_checked == 8800
    assert min(took) < 50, took


def test_a_report_reads_as_one_line_and_goes_into_json():
    report = found(graph(words(BASE), words(7, 8)), ALL).report
    assert str(report) == "checked pointers: 2 of 2, nodes: 2 of 2, 0.0 ms"
    assert json.loads(json.dumps(asdict(report)))["owners"] == {"graph pool": 1, "named": 1}


def test_the_note_says_why_and_is_none_where_all_was_checked():
    assert not_checked_note([None, PointerReport(3, 3)]) is None
    one = PointerReport(3, 1, not_checked={"no driver": 2})
    two = PointerReport(3, 1, not_checked={"no driver": 1, "too old": 1})
    note = not_checked_note([one, None, two])
    assert note == "not every pointer of the graphs was checked: no driver; too old"


def test_the_maps_of_this_process_tell_what_is_its_own():
    held = ctypes.create_string_buffer(64)
    on_host = _host_maps()
    assert on_host(ctypes.addressof(held))
    assert not on_host(8)
    assert not on_host(1 << 60)
