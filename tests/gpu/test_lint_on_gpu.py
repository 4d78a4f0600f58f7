"""What lint, which runs on the CPU, says of the cuda recorder is what that recorder does on a GPU."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lint_steps import NEEDS_CUDA_TO_TELL, waiting

from graphcap.errors import CaptureError
from graphcap.lint.run import lint_step
from graphcap.recorders.cuda import CudaRecorder

# The steps that the tape's own tests show to be refused.
sys.path.insert(0, str(Path(__file__).parent.parent / "recorders"))
REFUSED = importlib.import_module("test_tape").REFUSED
sys.path.pop(0)


def step_of(function: Any) -> Any:
    def step(inputs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(inputs["x"])
        return {"y": inputs["x"] + 1}

    return step


def lint_breaks_cuda(step: Any, shape: tuple[int, ...]) -> bool:
    report = lint_step(step, {"x": torch.ones(shape)}, batches=[shape[0]])
    assert report.stopped is None
    return any("cuda" in finding.recorders for finding in report.findings)


def recorder_refuses(step: Any, shape: tuple[int, ...], device: torch.device) -> bool:
    recorder, x = CudaRecorder(device), torch.ones(shape, device=device)
    recorder.warm_up(lambda: step({"x": x}))
    torch.cuda.synchronize(device)
    try:
        recording = recorder.record(lambda: step({"x": x}), shape[0])
    except CaptureError:
        return True
    else:
        recording.replay()
        torch.cuda.synchronize(device)
        assert torch.equal(recording.outputs["y"].cpu(), torch.full(shape, 2.0))
        recording.close()
        return False
    finally:
        assert torch.rand(3, device=device).isfinite().all()


@pytest.mark.parametrize("name", NEEDS_CUDA_TO_TELL)
def test_what_only_a_gpu_could_tell(device: torch.device, name: str):
    function, kind = NEEDS_CUDA_TO_TELL[name]
    step = step_of(function)
    assert lint_breaks_cuda(step, (4, 4)) == (kind is not None)
    assert recorder_refuses(step, (4, 4), device) == (kind is not None)


@pytest.mark.parametrize(
    "name",
    ["item", "if", "cpu", "tolist", "nonzero", "mask", "unique", "equal", "resize_", "print"],
)
def test_what_the_guard_refuses(device: torch.device, name: str):
    step = step_of(REFUSED[name][0])
    assert lint_breaks_cuda(step, (4, 6))
    assert recorder_refuses(step, (4, 6), device)


def test_lint_leaves_cuda_as_it_was(device: torch.device):
    before = torch.cuda.current_stream(device)
    lint_step(waiting, {"x": torch.ones(4, 4)})
    assert torch.cuda.current_stream(device) == before
    torch.cuda.synchronize(device)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    assert event.query()
    assert torch.ones(3, device=device).sum().item() == 3
