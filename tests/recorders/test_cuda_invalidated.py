"""A capture that the driver gave up is asked for by its status, whatever the library says that met it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from test_cuda_pointers import Graph, device, recorder_on, step

from graphcap.errors import BackendError, CaptureError
from graphcap.recorders import cuda
from graphcap.recorders.graph_nodes import GraphReader
from graphcap.recorders.probe import CaptureProbe

__all__ = ["device"]  # a fixture

CUBLAS = "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"
ENDED = "CUDA error: operation failed due to a previous error during capture"
UNJOINED = "CUDA error: capturing stream has unjoined work"
ELSEWHERE = "keep other threads from waiting for the device"


def failing():
    raise RuntimeError(CUBLAS)


@pytest.fixture
def recorder(device, monkeypatch):
    monkeypatch.setattr(cuda, "TorchCapture", lambda *_, **__: None)
    monkeypatch.setattr(cuda, "run_probe", lambda _: CaptureProbe(True, ""))
    monkeypatch.setattr(cuda, "give_up", lambda *_: None)
    return recorder_on(device)


def message(recorder, what=failing):
    with pytest.raises(CaptureError) as raised:
        recorder.record(what, 4)
    assert recorder.record(step, 2).is_open
    return str(raised.value)


@pytest.mark.parametrize(("status", "said"), [(True, True), (False, False)])
def test_the_status_is_asked_before_the_capture_is_ended(recorder, device, status, said):
    asked = []

    def is_invalidated(stream):
        asked.append((stream, device.said.count("end")))
        return status

    recorder._reader.is_invalidated = is_invalidated
    text = message(recorder)
    assert asked == [(9, 0)]
    assert CUBLAS in text
    assert (ELSEWHERE in text) is said


@pytest.mark.parametrize(("answer", "said"), [(ENDED, True), (UNJOINED, False)])
@pytest.mark.parametrize("how", ["no bindings", "older driver", "older bindings"])
def test_where_it_cannot_be_asked_the_end_of_the_capture_tells(
    recorder, monkeypatch, how, answer, said
):
    def refuse(*_):
        raise BackendError("cuStreamIsCapturing failed")

    if how == "no bindings":
        recorder._reader = None
    elif how == "older driver":
        recorder._reader.is_invalidated = refuse
    ends = iter([answer])

    def capture_end(self):
        for text in ends:
            raise RuntimeError(text)

    monkeypatch.setattr(Graph, "capture_end", capture_end)
    text = message(recorder)
    assert CUBLAS in text
    assert (ELSEWHERE in text) is said


def test_a_step_that_fails_by_itself_is_not_blamed_on_other_threads(recorder, caplog):
    recorder._reader.is_invalidated = lambda stream: False
    with caplog.at_level(logging.DEBUG):
        assert ELSEWHERE not in message(recorder, lambda: [][0])


@pytest.mark.parametrize(("status", "expected"), [(0, None), (1, False), (2, True)])
def test_what_the_driver_answers(status, expected):
    names = ("NONE", "ACTIVE", "INVALIDATED")
    reader = GraphReader.__new__(GraphReader)
    reader.driver = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        CUstream=lambda stream: stream,
        CUstreamCaptureStatus=SimpleNamespace(
            **{f"CU_STREAM_CAPTURE_STATUS_{name}": i for i, name in enumerate(names)}
        ),
        cuStreamIsCapturing=lambda stream: (0, status),
    )
    assert reader.is_invalidated(9) is expected
