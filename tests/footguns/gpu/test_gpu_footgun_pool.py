"""Footguns of the pool and of addresses on a CUDA device: cases 8 to 12 and their kin."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_toy import WIDTH, Step, batch, churn, free_bytes, make, manager_of, right

from graphcap.errors import PoolFrozenError, StaleRecordingError

Device = torch.device


def test_08_gpu_a_larger_eager_batch(device: Device):
    """Kin: a larger eager batch between replays of CUDA graphs."""
    manager, step = make(device)
    assert not manager.capture().failures
    address = manager.pool.arena.data_ptr()
    with pytest.raises(PoolFrozenError, match="hidden"):
        step({**batch(1000, device)})
    for rows in (3, 1000, 8):
        right(manager, step, rows)
        churn(device)
    assert manager.pool.arena.data_ptr() == address
    assert manager.stats().fallbacks == {"above_max_batch": 1}


CHANGES: dict[str, Callable[[Step], object]] = {
    "parameter": lambda s: setattr(s, "weight", torch.nn.Parameter(torch.zeros_like(s.weight))),
    ".data": lambda s: setattr(s.weight, "data", torch.zeros_like(s.weight)),
    "resize_": lambda s: s.weight.resize_(1024, 1024),
    "set_": lambda s: s.weight.set_(torch.zeros_like(s.weight)),
    "storage": lambda s: s.weight.untyped_storage().resize_(1 << 22),
}


@pytest.mark.parametrize("what", CHANGES)
def test_10_gpu_a_rebound_or_resized_parameter(what: str, device: Device):
    """Kin: on a device: `Parameter(new)`, `resize_`, `set_`, `.data =`, storages."""
    manager, step = make(device)
    manager.capture()
    right(manager, step, 3)
    CHANGES[what](step)
    churn(device)
    slots = manager.inputs.arena.clone()
    for _ in range(2):
        with pytest.raises(StaleRecordingError, match="weight"):
            manager.run(batch(3, device, 1))
    assert torch.equal(manager.inputs.arena, slots)


@pytest.mark.parametrize("how", ["copy_", "from the host", "on another stream"])
def test_10_gpu_copies_in_place_are_followed(how: str, device: Device):
    """Kin: copies in place, from the host and on another stream."""
    manager, step = make(device)
    manager.capture()
    new = torch.randn(WIDTH, WIDTH)
    if how == "copy_":
        step.weight.copy_(new.to(device))
    elif how == "from the host":
        step.weight.copy_(new)
    else:
        other = torch.cuda.Stream(device)
        other.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(other):
            step.weight.copy_(new.to(device))
        torch.cuda.current_stream(device).wait_stream(other)
    right(manager, step, 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: setattr(inputs["x"], "data", torch.zeros_like(inputs["x"])),
        lambda inputs: inputs["x"].set_(torch.zeros_like(inputs["x"])),
        lambda inputs: inputs["x"].resize_(1 << 16, WIDTH),
    ],
    ids=[".data", "set_", "resize_"],
)
def test_10_gpu_a_slot(change: Callable[[Any], object], device: Device):
    """Kin: a slot on the device."""
    manager, _ = make(device)
    manager.capture()
    manager.run(batch(3, device))
    change(manager.inputs)
    for given in (batch(3, device, 1), batch(3, "cpu", 1), None):
        with pytest.raises(StaleRecordingError, match="slot"):
            manager.run(given)


@pytest.mark.parametrize("where", ["default stream", "side stream", "between streams"])
def test_11_gpu_outputs_survive_allocator_churn(where: str, device: Device):
    """Kin: `empty_cache()` and allocations between replays, on whatever stream they run."""
    manager, step = make(device)
    manager.capture()
    side = torch.cuda.Stream(device)
    for turn in range(12):
        churn(device)
        if where == "side stream" or (where == "between streams" and turn % 2):
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                right(manager, step, 1 + turn % 8, turn)
            torch.cuda.current_stream(device).wait_stream(side)
        else:
            right(manager, step, 1 + turn % 8, turn)


def test_11_gpu_weights_that_nobody_keeps(device: Device):
    """Kin: weights and tables that nobody but the recording keeps."""

    class Vanishing:
        def __init__(self) -> None:
            self.parts = {"table": torch.full((WIDTH,), 3.0, device=device)}

        def __call__(self, inputs: Any) -> Any:
            return {"y": inputs["x"] * self.parts["table"]}

    step = Vanishing()
    manager = manager_of(step, device)
    assert not manager.capture().failures
    table = step.parts["table"]
    recording = manager.recording(4)
    address = table.data_ptr()
    step.parts.clear()
    del table
    gc.collect()
    churn(device)
    with pytest.raises(StaleRecordingError, match="table"):
        manager.run(batch(3, device))
    assert any(storage.data_ptr() == address for storage in recording.pinned)
    manager.inputs["x"].fill_(2)
    manager.inputs.views(1)["num_rows"].fill_(4)
    recording.replay()
    assert (recording.outputs["y"] == 6).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.fill_(float("nan")),
        lambda y: y.t_(),
        lambda y: y.set_(torch.zeros_like(y)),
        lambda y: setattr(y, "data", torch.zeros_like(y)),
    ],
    ids=["fill_", "t_", "set_", ".data"],
)
def test_11_gpu_what_a_caller_does_to_outputs(change: Any, device: Device):
    """Kin: outputs on a device that the caller fills, transposes or rebinds."""
    manager, step = make(device)
    manager.capture()
    change(manager.run(batch(3, device))["y"])
    right(manager, step, 3, 1)


def test_11_gpu_an_output_whose_memory_was_freed(device: Device):
    """Kin: an output in the graph's own memory whose storage the caller frees."""
    manager, _ = make(device)
    manager.capture()
    manager.run(batch(3, device))["y"].untyped_storage().resize_(0)
    with pytest.raises(StaleRecordingError, match=r"output 'y' of bucket 4.*clone\(\)"):
        manager.run(batch(3, device))


def test_12_one_pool_and_measured_growth(device: Device):
    """Elsewhere: one graph memory pool for each bucket multiplied the memory.
    Here: one pool, recorded from the largest bucket down; the growth by each further one is measured."""

    def wide(inputs: Any) -> Any:
        x = inputs["x"]  # 32 MiB a row, in the graph's own memory
        big = x[:, :1] + torch.zeros(x.shape[0], 1 << 23, device=device)
        return {"y": x + big[:, :WIDTH]}

    manager = manager_of(wide, device, sizes=(1, 2, 4), max_batch=8)
    report = manager.capture()
    assert not report.failures
    grown = {bucket.size: bucket.nbytes for bucket in report.buckets}
    assert grown[8] >= 8 << 25
    assert sum(grown[size] for size in (1, 2, 4)) < 1 << 25
    assert report.graph_bytes == sum(grown.values())


def test_12_kin_another_manager_gives_its_memory_back(device: Device):
    """Kin: managers made and closed one after another: their memory comes back."""

    def once() -> None:
        # No cuBLAS: its workspaces belong to the stream and stay.
        with manager_of(lambda inputs: {"y": inputs["x"] * 2}, device) as manager:
            assert not manager.capture().failures
            given = batch(3, device)
            assert torch.equal(manager.run(given)["y"], given["x"] * 2)

    once()  # libraries load, workspaces are made
    before = free_bytes(device)
    for _ in range(4):
        once()
    assert before - free_bytes(device) <= 8 << 20
