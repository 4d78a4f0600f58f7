"""The capture probe on a real device: it passes, and a capture that breaks leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

from graphcap.errors import StateError
from graphcap.recorders.cuda_runtime import CudaRuntime
from graphcap.recorders.probe import STAGES, probe_capture, run_probe
from graphcap.recorders.torch_capture import TorchCapture

MIB = 2**20


def free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def check_usable(device: torch.device) -> None:
    """No capture in progress, random numbers, memory, and captures as ever."""
    assert not torch.cuda.is_current_stream_capturing()
    torch.manual_seed(3)
    first = torch.randn(1000, device=device)
    torch.manual_seed(3)
    assert torch.equal(first, torch.randn(1000, device=device))
    assert float(torch.ones(1000, device=device).sum()) == 1000
    assert run_probe(TorchCapture(device)).works


class Breaking(TorchCapture):
    """A capture with a fault at one stage."""

    def __init__(self, device: torch.device, stage: str) -> None:
        super().__init__(device)
        self.stage = stage
        self.broken = False

    def _fault(self, stage: str) -> bool:
        fault = stage == self.stage and not self.broken
        self.broken |= fault
        return fault

    def begin(self) -> None:
        super().begin()
        if self._fault("begin"):
            raise RuntimeError("refused")

    def launch(self) -> None:
        super().launch()
        if self._fault("launch"):
            torch.cuda.synchronize(self.device)  # illegal here: the driver gives the capture up

    def end(self) -> None:
        super().end()
        if self._fault("end"):
            raise RuntimeError("refused")

    def replay(self) -> None:
        if self._fault("replay"):
            raise RuntimeError("refused")
        super().replay()

    def result(self) -> float:
        return super().result() + self._fault("result")


def test_the_probe_passes_and_is_not_made_again(device: torch.device):
    found = probe_capture(device)
    assert found.works, found.detail
    assert probe_capture(torch.device("cuda")) is found


def test_the_probe_works_without_the_runtime_too(device: torch.device):
    api = TorchCapture(device)
    api._runtime = None
    found = run_probe(api)
    assert found.works, found.detail


def test_the_runtime_captures_on_its_own(device: torch.device):
    runtime = CudaRuntime.loaded()
    if runtime is None:
        pytest.skip("torch's CUDA runtime is no shared library of its own here")
    stream = torch.cuda.Stream(device)
    runtime.try_capture(stream.cuda_stream)
    with torch.cuda.stream(stream):
        assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match=r"BeginCapture: cudaError\w+ \(\d+\)"):
        runtime.try_capture(0)  # the default stream cannot capture
    check_usable(device)


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "prepare"])
def test_a_capture_that_breaks_leaves_device_and_memory_as_they_were(
    device: torch.device, stage: str
):
    run_probe(Breaking(device, stage))  # what is loaded or reserved once is so now
    check_usable(device)
    torch.manual_seed(11)
    drawn = torch.rand(8, device=device)
    torch.manual_seed(11)
    before = free_bytes(device)
    found = run_probe(Breaking(device, stage))
    assert (found.works, found.stage) == (False, stage)
    assert "left a trace" not in found.detail
    assert abs(before - free_bytes(device)) <= MIB
    assert torch.equal(torch.rand(8, device=device), drawn), "the probe took random numbers"
    check_usable(device)


def test_twenty_broken_captures_take_no_memory(device: torch.device):
    run_probe(Breaking(device, "launch"))
    before = free_bytes(device)
    for _ in range(20):
        assert not run_probe(Breaking(device, "launch")).works
    assert abs(before - free_bytes(device)) <= MIB
    check_usable(device)


def test_a_probe_inside_a_capture_is_refused_and_the_capture_goes_on(device: torch.device):
    x = torch.zeros(4, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        x.add_(1)
        with pytest.raises(StateError, match="inside another capture"):
            run_probe(TorchCapture(device))
        x.add_(1)
    graph.replay()
    assert x.tolist() == [2.0] * 4
    graph.reset()
