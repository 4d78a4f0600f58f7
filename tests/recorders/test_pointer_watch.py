"""PointerWatch from the beginning of a recording to the last check, and what a manager does with a fault."""

from __future__ import annotations

import gc
import json
import logging
import re
import weakref

import pytest
import torch
from pointer_fakes import GraphDriver, segment, words

from graphcap import (
    BucketLadder,
    BufferPool,
    CaptureManager,
    PadPolicy,
    Settings,
    Slot,
    StaticInputs,
)
from graphcap.errors import CaptureError, DanglingPointerError
from graphcap.graph_addresses import PointerReport
from graphcap.live_memory import Range
from graphcap.recorders.pointer_watch import NO_BINDINGS, NO_SNAPSHOT, PointerWatch, named_ranges
from graphcap.recorders.tape import TapeRecorder

COMMON, OWN = (0, 0), (0, 5)
BASE, GRAPH, EARLY = 0x7F0000000000, 0x7F0040000000, 0x7F0080000000
KIB = 1024


class Allocator:
    """Answers with the segments that a test has put in place."""

    def __init__(self):
        self.common = ["live", "live"]
        self.early = True

    def __call__(self):
        segments = [segment(BASE, COMMON, *((KIB, s) for s in self.common))]
        segments.append(segment(GRAPH, OWN, (KIB, "free")))
        return segments + ([segment(EARLY, COMMON, (KIB, "free"))] if self.early else [])


def recorded(*addresses, driver=None, allocator=None, during=lambda allocator: None, named=()):
    """One recording of a kernel with `addresses`, checked once."""
    driver, allocator = driver or GraphDriver(), allocator or Allocator()
    watch = PointerWatch(driver, allocator)
    pointers = watch.began()
    during(allocator)
    pointers.read([driver.kernel("k", *(words(a) for a in addresses))], [(0, 1, "aten.add.Tensor")])
    pointers.made(OWN, ())
    pointers.check(8, named)
    return pointers, allocator


def test_a_graph_that_points_at_live_memory_passes():
    weight = Range(BASE, BASE + 512, "w", "named")
    pointers, _ = recorded(BASE, BASE + 700, GRAPH, named=[weight])
    report = pointers.report
    assert report.owners == {"named": 1, "unnamed": 1, "graph pool": 1}
    assert (report.nodes, report.nodes_checked, report.pointers_checked) == (1, 1, 3)
    assert 0 < report.ms < 1000
    assert not report.not_checked


def test_what_a_recording_keeps_is_counted_as_kept():
    tensor = torch.zeros(100)
    driver, watch = GraphDriver(), None
    watch = PointerWatch(driver, lambda: [])
    pointers = watch.began()
    pointers.read([driver.kernel("k", words(tensor.data_ptr() + 4))])
    pointers.made(OWN, [tensor.untyped_storage()])
    pointers.check(8, ())
    assert pointers.report.owners == {"kept by the recording": 1}


def test_memory_freed_while_recording_is_an_error_with_the_place_and_the_cure():
    def free(allocator):
        allocator.common[1] = "free"

    with pytest.raises(DanglingPointerError) as raised:
        recorded(BASE, BASE + KIB + 8, BASE + KIB, during=free)
    text = str(raised.value)
    assert re.match(
        r"bucket 8: node 0 \(kernel k of aten\.add\.Tensor\), argument 1: expected the address of live "
        r"memory, found 0x7f0000000408, 8 bytes into a free block .*; 1 more like it; keep the tensor alive "
        r".* \(graphcap explain dangling-pointer\)$",
        text,
    ), text


def test_memory_given_back_before_the_recording_began_was_memory_once():
    allocator = Allocator()
    driver = GraphDriver()
    watch = PointerWatch(driver, allocator)
    watch.look()
    allocator.early = False
    pointers = watch.began()
    pointers.read([driver.kernel("k", words(EARLY))])
    pointers.made(OWN, ())
    with pytest.raises(DanglingPointerError, match="has given back to the driver"):
        pointers.check(4, ())


def test_a_later_check_finds_what_was_freed_since_and_looks_at_nothing_that_is_kept():
    weight = Range(BASE, BASE + KIB, "w", "named")
    pointers, allocator = recorded(BASE, BASE + KIB + 8, named=[weight])
    pointers.check(8, [weight])
    allocator.common = ["free", "live"]  # cannot be, with the manager holding it
    pointers.check(8, [weight])
    allocator.common = ["free", "free"]
    with pytest.raises(DanglingPointerError, match="in use when the recording was made"):
        pointers.check(8, [weight])
    assert pointers.report.pointers_checked == 2, "of the first check"


def test_nothing_is_held_once_nothing_is_left_to_check():
    weight = Range(BASE, BASE + KIB, "w", "named")
    pointers, allocator = recorded(BASE, named=[weight])
    assert pointers._addresses is None
    pointers, allocator = recorded(BASE)
    assert pointers._addresses is not None
    pointers.forget()
    allocator.common = ["free", "free"]
    pointers.check(8, ())


def test_without_bindings_nothing_is_checked_and_the_report_says_so():
    watch = PointerWatch(None, Allocator())
    pointers = watch.began()
    pointers.read(None)
    pointers.made(OWN, ())
    pointers.check(8, ())
    assert list(pointers.report.not_checked) == [NO_BINDINGS]


@pytest.mark.parametrize("error", [RuntimeError("cudaMallocAsync does not"), KeyError("pool")])
def test_an_allocator_without_snapshots_is_said(error):
    def none():
        raise error

    pointers, _ = recorded(BASE, allocator=none, during=lambda _: None)
    assert list(pointers.report.not_checked) == [NO_SNAPSHOT]


def test_a_driver_that_lists_no_nodes_is_said_and_costs_no_recording():
    driver = GraphDriver()
    driver.fails = {"cuGraphGetNodes"}
    pointers, _ = recorded(BASE, driver=driver)
    (why,) = pointers.report.not_checked
    assert why.startswith("cuGraphGetNodes failed")
    odd = GraphDriver()
    odd.cuGraphGetNodes = lambda graph, number: (odd.CUresult.CUDA_SUCCESS, None, None)
    pointers, _ = recorded(BASE, driver=odd)
    (why,) = pointers.report.not_checked
    assert why.startswith("the graph cannot be read: TypeError")


def test_names_lead_to_whole_storages_and_keep_nothing_alive():
    tensor = torch.zeros(64)
    empty, view = torch.zeros(0), tensor[8:16]
    (found,) = named_ranges(
        [("view", view), ("empty", empty), ("meta", torch.zeros(2, device="meta"))], "x"
    )
    assert found == Range(tensor.data_ptr(), tensor.data_ptr() + 256, "view", "x")
    gone = weakref.ref(tensor)
    del tensor, view
    gc.collect()
    assert gone() is None


# -- a manager ---------------------------------------------------------------------------------------

SLOTS = {"x": Slot((4,), torch.float32, PadPolicy.ZERO)}
FAULT = DanglingPointerError("bucket 2: node 0 (kernel k), argument 1: expected …, found 0x7f…")


class Pointing(TapeRecorder):
    """Gives its tapes out as graphs. Bucket 2 is found to dangle, at once or later."""

    def __init__(self, at_once=False, later=False):
        super().__init__(torch.device("cpu"))
        self.at_once, self.later = at_once, later
        self.seen = []

    def record(self, step, bucket):
        if bucket == 2 and self.at_once:
            raise FAULT
        recording = super().record(step, bucket)
        recording.pointers = PointerReport(3, 3, 10, 10, ms=1.5)
        self.seen.append(("record", bucket, self.checks_pointers, [r.owner for r in self.named]))
        replay = recording.replay
        recording.replay = lambda: (self.seen.append(("replay", bucket)), replay())[0]
        return recording

    def dangling(self, recordings):
        self.seen.append(("dangling", sorted(recordings)))
        for recording in recordings.values():
            recording.pointers = PointerReport(3, 3, 10, 9, unsure=("odd",), ms=2.5)
        return {2: FAULT} if self.later and 2 in recordings else {}


class Step:
    def __init__(self):
        self.weight = torch.randn(4)

    def __call__(self, inputs):
        return {"y": inputs["x"] * self.weight}


def manager(recorder, **settings):
    return CaptureManager(
        Step(),
        StaticInputs(4, SLOTS, "cpu"),
        pool=BufferPool("cpu"),
        ladder=BucketLadder((1, 2), 4),
        settings=Settings(**settings),
        recorder=recorder,
    )


def test_pointers_are_looked_at_again_after_all_are_recorded_and_before_any_is_replayed():
    recorder = Pointing()
    with manager(recorder) as made:
        report = made.capture()
        kinds = [entry[0] for entry in recorder.seen]
        assert kinds[:4] == ["record", "record", "record", "dangling"]
        assert kinds.count("dangling") == 1
        assert "replay" in kinds[4:]
        assert recorder.seen[3] == ("dangling", [1, 2, 4])
        owners = recorder.seen[0][3]
        assert {"slots", "named"} <= set(owners)
        assert all(bucket.pointers.ms == 2.5 for bucket in report.buckets)
        written = json.loads(json.dumps(report.to_json()))["buckets"][0]["pointers"]
        assert (written["pointers"], written["pointers_checked"], written["unsure"]) == (
            10,
            9,
            ["odd"],
        )
        assert not report.notes[1:], "only that integers were not varied, or nothing"


@pytest.mark.parametrize("when", ["at_once", "later"])
def test_a_fault_costs_its_bucket_and_is_in_report_warning_and_stats(when, caplog):
    with manager(Pointing(**{when: True})) as made, caplog.at_level(logging.WARNING):
        report = made.capture()
        assert list(report.failures) == [2]
        assert "node 0 (kernel k), argument 1" in report.failures[2]
        assert [bucket.size for bucket in report.buckets] == [1, 4]
        (warning,) = [r.getMessage() for r in caplog.records if "not recorded" in r.getMessage()]
        assert warning.endswith("(graphcap explain dangling-pointer)")
        x = torch.randn(2, 4)
        assert torch.equal(made.run({"x": x})["y"], x * made.step.weight)
        assert made.stats().fallbacks == {"not_recorded": 1}
        made.run({"x": torch.randn(4, 4)})
        assert made.stats().replays == 1


@pytest.mark.parametrize("when", ["at_once", "later"])
def test_strict_raises(when):
    made = manager(Pointing(**{when: True}), strict=True)
    with pytest.raises(DanglingPointerError, match="argument 1"):
        made.capture()
    assert made.state == "new"
    made.close()


def test_verify_off_checks_no_pointers():
    recorder = Pointing()
    with manager(recorder, verify="off") as made:
        made.capture()
        assert [entry[2] for entry in recorder.seen if entry[0] == "record"] == [False] * 3


def test_a_host_asks_once_and_is_told_what_it_costs():
    recorder = Pointing(later=True)
    made = manager(recorder)
    for size in (4, 2, 1):
        made.warm_up(size)
    made.freeze()
    for size in (4, 2, 1):
        assert made.record(size)
    assert made.check_pointers() == (2,)
    assert made.check_pointers() == ()
    assert "argument 1" in made.failure_of(2)
    made.verify(2)
    made.verify(4)
    made.finish()
    assert [entry for entry in recorder.seen if entry[0] == "dangling"] == [("dangling", [1, 2, 4])]
    assert not made.serves(2)
    assert made.serves(4)
    made.close()


def test_a_host_that_does_not_ask_has_it_done_by_the_next_phase():
    for then in ("verify", "time", "finish"):
        made = manager(Pointing(later=True))
        for size in (4, 2, 1):
            made.warm_up(size)
        made.freeze()
        for size in (4, 2, 1):
            made.record(size)
        getattr(made, then)(*(() if then == "finish" else (4,)))
        assert "argument 1" in made.failure_of(2), then
        made.close()


def test_a_manager_that_captures_again_checks_again():
    recorder = Pointing()
    made = manager(recorder)

    def interrupt(done, total, what):
        if what == "verifying bucket 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.capture(progress=interrupt)
    made.capture()
    assert [entry[0] for entry in recorder.seen].count("dangling") == 2
    made.close()


def test_what_was_not_checked_is_a_note():
    class Unread(Pointing):
        def dangling(self, recordings):
            for recording in recordings.values():
                recording.pointers = PointerReport(3, 0, not_checked={"no bindings": 3})
            return {}

    with manager(Unread()) as made:
        assert "not every pointer of the graphs was checked: no bindings" in made.capture().notes


# -- a tape keeps alive what it points at ------------------------------------------------------------


def test_the_entries_of_a_tape_hold_the_tensors_so_that_no_address_can_dangle():
    """No name leads to the tensor once the step has run, and the allocator is asked for as much again."""
    kept: list[torch.Tensor] = [torch.full((1024,), 3.0)]
    inputs = torch.ones(1024)
    address, alive = kept[0].data_ptr(), weakref.ref(kept[0].untyped_storage())

    def step():
        table = kept.pop() if kept else torch.zeros(1024)
        return {"y": inputs + table}

    recording = TapeRecorder(torch.device("cpu")).record(step, 1024)
    del step
    gc.collect()
    assert recording.pointers is None
    pinned = [storage.data_ptr() for storage in recording.pinned]
    assert address in pinned
    for _ in range(50):
        junk = torch.full((1024,), float("nan"))
        assert junk.data_ptr() != address
        recording.outputs["y"].fill_(float("nan"))
        recording.replay()
        assert torch.equal(recording.outputs["y"], torch.full((1024,), 4.0))
    recording.close()
    del alive


def test_a_dangling_pointer_is_a_capture_error():
    assert issubclass(DanglingPointerError, CaptureError)
    assert DanglingPointerError.anchor == "dangling-pointer"
