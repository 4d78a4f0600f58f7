"""Which recorder is chosen, and what is said where it cannot be had."""

from __future__ import annotations

import logging

import pytest
import torch

from graphcap.errors import BackendError
from graphcap.recorders import select
from graphcap.recorders.select import CaptureProbe, probe_capture, select_recorder

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("wanted", ["auto", "tape"])
def test_cpu_gets_the_tape(wanted: str):
    recorder = select_recorder(wanted, CPU)
    assert recorder.name == "tape"
    recorder.close()
    recorder.close()


def test_cuda_on_a_cpu_is_refused_with_the_cure():
    with pytest.raises(BackendError, match=r"cpu devices have no graph capture.*RECORDER=tape"):
        select_recorder("cuda", CPU)


def test_probe_of_a_cpu_says_why():
    probe = probe_capture(CPU)
    assert not probe.works
    assert "cpu" in probe.detail


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "probe_capture", lambda device: CaptureProbe(False, "no such luck"))


@pytest.mark.usefixtures("broken")
def test_device_that_refuses_capture_gets_the_tape_and_a_warning(
    caplog: pytest.LogCaptureFixture,
):
    with caplog.at_level(logging.WARNING, "graphcap"):
        assert select_recorder("auto", CUDA).name == "tape"
    assert ["no such luck" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.usefixtures("broken")
def test_asked_for_cuda_gives_the_error_of_the_probe(caplog: pytest.LogCaptureFixture):
    with pytest.raises(BackendError, match="cuda:0 cannot capture: no such luck"):
        select_recorder("cuda", CUDA)
    assert not caplog.records


@pytest.mark.usefixtures("broken")
def test_asked_for_tape_needs_no_probe(caplog: pytest.LogCaptureFixture):
    assert select_recorder("tape", CUDA).name == "tape"
    assert not caplog.records
