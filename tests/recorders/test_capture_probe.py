"""The capture probe against a pretended driver that can fail at each of its calls."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch

from graphcap import CaptureManager, Settings, Slot, StaticInputs
from graphcap.errors import BackendError, StateError
from graphcap.recorders import probe as probe_module
from graphcap.recorders.probe import STAGES, probe_capture, run_probe
from graphcap.recorders.select import select_recorder

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
ORDER = ["prepare", "begin", "launch", "end", "replay", "replay", "result"]


class Driver:
    """Captures and replays additions to a number, and refuses whatever a real driver refuses.

    Args:
        fails_at: the call that raises `error`; what a real one leaves behind then stays behind.
        eager: kernels run at once although a capture is in progress.
    """

    def __init__(
        self, fails_at: str | None = None, error: str = "no such luck", eager: bool = False
    ) -> None:
        self.fails_at, self.error, self.eager = fails_at, error, eager
        self.calls: list[str] = []
        self.capturing = False
        self.held = 0
        self.value = float("nan")
        self.graph: list[float] = []
        self.recoveries = self.closings = 0

    def is_capturing(self) -> bool:
        return self.capturing

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_at:
            raise RuntimeError(f"{self.error}\nsecond line")

    def prepare(self) -> None:
        assert not self.capturing
        self.held += 1
        self._call("prepare")
        self.value = 0.0

    def begin(self) -> None:
        assert not self.capturing
        self._call("begin")
        self.capturing = True

    def launch(self) -> None:
        self._call("launch")
        if self.eager:
            self.value += 1
        self.graph.append(1.0)

    def end(self) -> None:
        assert self.capturing
        self._call("end")
        self.capturing = False

    def replay(self) -> None:
        assert not self.capturing
        self._call("replay")
        self.value += sum(self.graph)

    def result(self) -> float:
        self._call("result")
        return self.value

    def recover(self) -> None:
        self.recoveries += 1
        self.capturing, self.held = False, 0

    def close(self) -> None:
        self.closings += 1
        self.held = 0


def test_a_driver_that_captures_passes():
    driver = Driver()
    found = run_probe(driver)
    assert found.works
    assert found.stage is None
    assert "captured and replayed" in found.detail
    assert driver.calls == ORDER
    assert (driver.closings, driver.recoveries, driver.held) == (1, 0, 0)


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_failure_is_named_with_its_stage_and_put_right(stage: str):
    driver = Driver(fails_at=stage)
    found = run_probe(driver)
    assert not found.works
    assert found.stage == stage
    assert found.detail == f"{STAGES[stage]}: no such luck"
    assert driver.calls == ORDER[: ORDER.index(stage) + 1]
    assert not driver.capturing
    assert (driver.closings, driver.recoveries, driver.held) == (0, 1, 0)


def test_kernels_that_run_during_the_capture_are_found_by_the_result():
    found = run_probe(Driver(eager=True))
    assert (found.works, found.stage) == (False, "result")
    assert "gave 3" in found.detail


def test_known_errors_come_with_their_meaning():
    refused = run_probe(Driver("begin", "CUDA error: ixErrorNotSupported")).detail
    assert "no capture can be begun: CUDA error: ixErrorNotSupported (CoreX says so" in refused
    assert "BI-V150" in refused
    assert "says nothing about capture" in run_probe(Driver("prepare", "out of memory")).detail


def test_a_trace_that_cannot_be_removed_is_told():
    class Stuck(Driver):
        def recover(self) -> None:
            super().recover()
            raise RuntimeError("random numbers fail")

    found = run_probe(Stuck("end"))
    assert found.detail.endswith("and the attempt left a trace: random numbers fail")


def test_an_interrupt_ends_the_capture_and_goes_on():
    class Interrupted(Driver):
        def launch(self) -> None:
            raise KeyboardInterrupt

    driver = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run_probe(driver)
    assert (driver.capturing, driver.recoveries) == (False, 1)


def test_inside_a_capture_nothing_is_touched():
    driver = Driver()
    driver.capturing = True
    with pytest.raises(StateError, match="end that one first"):
        run_probe(driver)
    assert driver.capturing
    assert driver.calls == []
    assert (driver.recoveries, driver.closings) == (0, 0)


class Card:
    """Makes the drivers of a card and remembers them."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.made: list[Driver] = []

    def __call__(self, device: torch.device) -> Driver:
        self.made.append(Driver(**self.options))
        return self.made[-1]


@pytest.mark.parametrize("fails_at", [None, "begin", "result"])
def test_a_device_is_probed_once(fails_at: str | None):
    card = Card(fails_at=fails_at)
    first = probe_capture(CUDA, card)
    assert probe_capture(CUDA, card) is first
    assert len(card.made) == 1
    probe_capture(torch.device("cuda", 1), card)
    assert len(card.made) == 2


def test_a_device_without_free_memory_is_probed_again():
    card = Card(fails_at="prepare")
    assert probe_capture(CUDA, card).stage == "prepare"
    card.options["fails_at"] = None
    assert probe_capture(CUDA, card).works
    assert len(card.made) == 2


def test_a_probe_refused_inside_a_capture_is_made_later():
    class Busy(Card):
        def __call__(self, device: torch.device) -> Driver:
            driver = super().__call__(device)
            driver.capturing = len(self.made) == 1
            return driver

    card = Busy()
    with pytest.raises(StateError):
        probe_capture(CUDA, card)
    assert probe_capture(CUDA, card).works


def test_importing_and_choosing_the_tape_probe_nothing():
    code = (
        "import graphcap, graphcap.recorders.select as s, torch\n"
        "from graphcap.recorders import probe\n"
        "def never(*a): raise SystemExit('probed')\n"
        "assert s.select_recorder('tape', torch.device('cuda', 0), probe=never).name == 'tape'\n"
        "assert not probe._found\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# -- what follows from it --------------------------------------------------------------------------


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_card_that_refuses_gets_one_warning_and_a_tape_that_runs(
    stage: str, caplog: pytest.LogCaptureFixture
):
    card = Card(fails_at=stage, error=f"ixErrorNotSupported at {stage}")

    def probe(device: torch.device) -> probe_module.CaptureProbe:
        return probe_capture(device, card)

    with caplog.at_level(logging.WARNING, "graphcap"):
        recorders = [select_recorder("auto", CUDA, probe) for _ in range(3)]
    (record,) = caplog.records
    message = record.getMessage()
    assert "cuda:0 cannot capture graphs" in message
    assert f"{STAGES[stage]}: ixErrorNotSupported at {stage}" in message
    assert "CoreX" in message
    assert "the tape is used" in message

    inputs = StaticInputs(2, {"x": Slot((3,), torch.float32)}, CPU)
    manager = CaptureManager(
        lambda given: {"y": given["x"] * 2 + 1},
        inputs,
        settings=Settings(),
        recorder=recorders[0],
    )
    with manager:
        report = manager.capture()
        assert report.recorder == "tape"
        assert [note for note in report.notes if "ixErrorNotSupported" in note] == [
            recorders[0].why
        ]
        x = torch.randn(2, 3)
        assert torch.equal(manager.run({"x": x})["y"], x * 2 + 1)
        assert manager.stats().replays == 1


def test_cuda_asked_for_on_such_a_card_is_an_error_without_a_warning(
    caplog: pytest.LogCaptureFixture,
):
    with pytest.raises(BackendError, match=r"cuda recorder.*cuda:0 cannot.*7.*RECORDER=tape"):
        select_recorder("cuda", CUDA, lambda device: run_probe(Driver("end", "error 7")))
    assert not caplog.records
