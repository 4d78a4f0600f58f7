"""When the cuda recorder looks at memory and graph, on a device that only answers."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from pointer_fakes import GraphDriver, segment, words

from graphcap.errors import DanglingPointerError
from graphcap.live_memory import Range
from graphcap.recorders import cuda, streams
from graphcap.recorders.pointer_watch import NO_BINDINGS, PointerWatch

BASE, GRAPH = 0x7F0000000000, 0x7F0040000000
COMMON, OWN = (0, 0), (0, 3)


class Device:
    """Answers as torch.cuda does, and writes down what it is asked."""

    def __init__(self):
        self.said = []
        self.table = "live"
        self.reserved = 0
        self.driver = GraphDriver()
        self.graph = [self.driver.kernel("k", words(BASE), words(BASE + 1032), words(GRAPH))]

    def snapshot(self):
        self.said.append("snapshot")
        return [
            segment(BASE, COMMON, (1024, "live"), (1024, self.table)),
            segment(GRAPH, OWN, (1024, "free")),
        ]

    def log(self, name, answer=None):
        def call(*_, **__):
            self.said.append(name)
            return answer

        return call


class Graph:
    device: Device

    def capture_begin(self, **given):
        assert given["pool"] == OWN
        self.device.said.append("begin")

    def capture_end(self):
        self.device.said.append("end")

    def reset(self):
        self.device.said.append("reset")

    def replay(self):
        self.device.said.append("replay")


class Reader:
    """Of `GraphReader`, what the recorder needs of it."""

    def __init__(self, device):
        self.driver, self._device = device.driver, device

    def graph_under_capture(self, stream):
        self._device.said.append("read")
        return self._device.graph

    def count(self, graph):
        return len(graph)


@pytest.fixture
def device(monkeypatch):
    made = Device()
    stream = SimpleNamespace(wait_stream=lambda other: None, cuda_stream=9)
    for name, answer in {
        "Stream": stream,
        "graph_pool_handle": OWN,
        "current_stream": stream,
        "stream": nullcontext(),
        "is_current_stream_capturing": False,
        "mem_get_info": (100, 1000),
        "current_device": 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: made.reserved)
    monkeypatch.setattr(streams, "_idle", {})
    monkeypatch.setattr(streams, "_new_pool", lambda: None)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, made.log(name))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", made.snapshot)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("CUDAGraph", (Graph,), {"device": made}))
    monkeypatch.setattr(cuda, "GraphReader", lambda: Reader(made))
    monkeypatch.setattr(cuda, "keeps_graphs", lambda: False)
    return made


def recorder_on(device):
    made = cuda.CudaRecorder(torch.device("cuda"))
    made._watch = PointerWatch(made._reader and device.driver, device.snapshot)
    made.watched = False
    made.named = [Range(BASE, BASE + 1024, "weight", "named")]
    return made


def step():
    return {"y": torch.zeros(2)}


def test_memory_is_looked_at_around_the_capture_and_the_graph_read_before_it_ends(device):
    recorder = recorder_on(device)
    recording = recorder.record(step, 2)
    asked = [s for s in device.said if s not in ("synchronize", "read")]
    assert asked == ["snapshot", "empty_cache", "snapshot", "begin", "end", "snapshot"]
    assert device.said.index("read") < device.said.index("end")
    report = recording.pointers
    assert report.owners == {"named": 1, "unnamed": 1, "graph pool": 1}
    assert report.pointers_checked == 3
    recorder.record(step, 2)
    assert device.said.count("empty_cache") == 1
    assert device.said.count("snapshot") == 5


def test_a_fault_closes_the_recording_and_the_next_one_is_made(device):
    recorder = recorder_on(device)

    def drop():
        device.table = "free"
        return step()

    with pytest.raises(
        DanglingPointerError, match=r"bucket 2: node 0 \(kernel k\), argument 1: .* in use"
    ):
        recorder.record(drop, 2)
    assert device.said[-2:] == ["reset", "empty_cache"]
    assert "replay" not in device.said
    assert recorder.stranded == 0
    device.table = "live"
    assert recorder.record(step, 2).pointers.pointers_checked == 3


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_what_a_faulty_recording_took_beside_others_is_counted_as_stranded(
    device, error, monkeypatch
):
    recorder = recorder_on(device)
    kept = recorder.record(step, 4)
    before = device.said.count("reset")

    def drop():
        device.table = "free"
        device.reserved += 2**22
        return step()

    def interrupted(*_):
        raise error

    if error is not None:
        monkeypatch.setattr(cuda.RecordedPointers, "check", interrupted)
    with pytest.raises(DanglingPointerError if error is None else KeyboardInterrupt):
        recorder.record(drop, 2)
    assert kept.is_open
    assert device.said.count("reset") == before + 1, "the faulty one is closed"
    assert recorder.stranded == 2**22
    kept.close()
    device.table = "live"
    recorder.named = [Range(BASE, BASE + 2048, "weights", "named")]
    if error is None:
        recorder.record(step, 2)
        assert recorder.stranded == 0, "nothing lives that could have kept it"


def test_a_recorder_that_one_manager_closed_records_for_another(device, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda _: SimpleNamespace(wait_stream=lambda other: 0, cuda_stream=9)
    )
    recorder = recorder_on(device)
    recorder.checks_pointers = False
    first, stream = recorder.record(step, 4), recorder._stream
    recorder.close()
    assert recorder._stream is not stream, "a recording made on it lives"
    assert recorder.record(step, 2).is_open
    first.close()
    recorder.close()
    lent = [cuda.StreamLease(recorder.device) for _ in range(2)]
    assert stream in [lease.stream for lease in lent]


def test_what_is_recorded_apart_has_a_pool_of_its_own_and_is_given_back(device, monkeypatch):
    numbers = itertools.count(1)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers)))
    used = []
    monkeypatch.setattr(Graph, "capture_begin", lambda self, **given: used.append(given["pool"]))
    recorder = recorder_on(device)
    recorder.checks_pointers = False
    kept = recorder.record(step, 4)
    recorder.stranded = 7
    with recorder.apart():
        recorder.record(step, 2).close()
        device.said.clear()
    assert device.said == ["empty_cache"]
    assert kept.is_open
    assert recorder.stranded == 7
    recorder.record(step, 1)
    assert used[0] == used[2] != used[1]


def test_all_recordings_are_looked_at_again_with_one_snapshot(device):
    recorder = recorder_on(device)
    recordings = {size: recorder.record(step, size) for size in (4, 2)}
    before = device.said.count("snapshot")
    device.table = "free"
    found = recorder.dangling(recordings)
    assert device.said.count("snapshot") == before + 1
    assert sorted(found) == [2, 4]
    assert str(found[4]).startswith("bucket 4: node 0")
    assert recorder.dangling(recordings) == {}


def test_a_closed_recording_is_not_looked_at(device):
    recorder = recorder_on(device)
    recording = recorder.record(step, 2)
    recording.close()
    device.table = "free"
    assert recorder.dangling({2: recording}) == {}


def test_nothing_is_asked_where_no_check_is_wanted(device):
    recorder = recorder_on(device)
    recorder.checks_pointers = False
    recording = recorder.record(step, 2)
    assert recording.pointers is None
    assert "snapshot" not in device.said
    assert recorder.dangling({2: recording}) == {}


def test_without_bindings_the_recording_is_made_and_the_report_says_what_is_missing(
    device, monkeypatch
):
    def missing():
        raise cuda.BackendError("no cuda-bindings")

    monkeypatch.setattr(cuda, "GraphReader", missing)
    recording = recorder_on(device).record(step, 2)
    assert list(recording.pointers.not_checked) == [NO_BINDINGS]
    assert "snapshot" not in device.said


def test_a_graph_that_the_driver_does_not_show_is_not_checked(device):
    recorder = recorder_on(device)

    def refuse(stream):
        raise cuda.BackendError("cuStreamGetCaptureInfo failed")

    recorder._reader.graph_under_capture = refuse
    recording = recorder.record(step, 2)
    (why,) = recording.pointers.not_checked
    assert why == "the driver does not show the graph that is captured"
