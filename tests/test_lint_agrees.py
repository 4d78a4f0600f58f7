"""Lint and the recorders never disagree: what lint says breaks one is what that one refuses."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lint_steps import BAKED, NEEDS_CUDA_TO_TELL, TELLS_BY_TABLE

from graphcap.buckets import BucketLadder
from graphcap.errors import CaptureError
from graphcap.inputs import Slot, StaticInputs
from graphcap.lint.finding import LintReport
from graphcap.lint.run import lint_step
from graphcap.manager import CaptureManager
from graphcap.recorders.guard import StepGuard
from graphcap.recorders.tape import TapeRecorder, count_step
from graphcap.settings import Settings

# The steps that the tape's own tests record, and those that it refuses.
sys.path.insert(0, str(Path(__file__).parent / "recorders"))
test_tape = importlib.import_module("test_tape")
sys.path.pop(0)

CPU = torch.device("cpu")
STEPS = {**test_tape.FUNCTIONS, **{f"refused: {n}": f for n, (f, _) in test_tape.REFUSED.items()}}


def step_of(function: Any, inference: bool = False) -> Any:
    def step(inputs: Any) -> Any:
        with torch.inference_mode(inference), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(inputs["x"])
        return {"y": inputs["x"] + 1}

    return step


def breaks(report: LintReport, recorder: str) -> list[str]:
    return [finding.kind for finding in report.findings if recorder in finding.recorders]


def refused(run: Any) -> bool:
    try:
        run()
    except CaptureError:
        return True
    return False


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", STEPS)
def test_lint_says_breaks_iff_the_recorders_refuse(name: str, inference: bool):
    step, x = step_of(STEPS[name], inference), test_tape.batch(0)
    report = lint_step(step, {"x": x}, batches=[4])
    assert report.stopped is None
    by_tape = refused(lambda: TapeRecorder(CPU).record(lambda: step({"x": x}), 4))
    assert bool(breaks(report, "tape")) == by_tape
    assert by_tape == name.startswith("refused: ")

    def under_capture() -> None:
        with torch.no_grad(), StepGuard(CPU, replays_live=False).watching():
            step({"x": x})

    by_guard = refused(under_capture)
    if by_guard:
        assert breaks(report, "cuda")
    else:  # only what the guard of a CPU cannot tell
        assert set(breaks(report, "cuda")) <= TELLS_BY_TABLE


@pytest.mark.parametrize("name", test_tape.FUNCTIONS)
def test_lint_counts_the_operations_of_the_tape(name: str):
    step, x = step_of(test_tape.FUNCTIONS[name]), test_tape.batch(0)
    counted = count_step(lambda: step({"x": x}), CPU)
    padding = 1
    assert lint_step(step, {"x": x}, batches=[4]).operations == counted.total + padding


@pytest.mark.parametrize("name", NEEDS_CUDA_TO_TELL)
def test_the_tape_of_a_cpu_records_what_breaks_cuda_only(name: str):
    """Lint stands in for CUDA's streams; without it these steps run on a GPU only."""
    function, _ = NEEDS_CUDA_TO_TELL[name]
    report = lint_step(step_of(function), {"x": torch.ones(4, 4)}, batches=[4])
    assert breaks(report, "tape") == []  # lint asks the tape itself last


@pytest.mark.parametrize("name", BAKED)
def test_baked_values_cost_the_bucket_in_verification(name: str):
    inputs = StaticInputs(4, {"x": Slot((4,), torch.float32)}, CPU)
    step = BAKED[name]()
    manager = CaptureManager(step, inputs, ladder=BucketLadder([4]), settings=Settings())
    with manager:
        failures = manager.capture().failures
    assert set(failures) == {4}
    assert "differs from the eager step" in failures[4]
    report = lint_step(BAKED[name](), {"x": torch.ones(4, 4)}, batches=[4])
    assert breaks(report, "tape")
    assert set(breaks(report, "tape")) <= set(breaks(report, "cuda"))


def test_a_refusal_that_lint_did_not_foresee_is_still_told(monkeypatch: pytest.MonkeyPatch):
    """The tape is asked at the end, so that lint cannot call clean what it refuses."""

    def refuse(self: Any, step: Any, bucket: int) -> Any:
        raise CaptureError("bucket 4: something new at step.py:7 (layer) is refused; do otherwise")

    monkeypatch.setattr(TapeRecorder, "record", refuse)
    report = lint_step(step_of(lambda x: x), {"x": torch.ones(4, 4)}, batches=[4])
    (found,) = [f for f in report.findings if f.kind == "refused"]
    assert (found.recorders, found.cure) == (("tape",), "do otherwise")
    assert found.what == "something new at step.py:7 (layer) is refused"
    assert (found.place.file, found.place.line) == ("step.py", 7)
