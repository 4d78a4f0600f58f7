"""Triton launches on a tape: through a class with the parts of Triton's `CompiledKernel` that a launch
passes, since Triton compiles for GPUs only. What is launched are functions on the host's memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphcap.errors import CaptureError
from graphcap.operations import operation
from graphcap.recorders import bindings, tape, triton_launches
from graphcap.recorders.tape import TapeRecorder
from graphcap.recorders.triton_launches import TritonLaunch, triton_launches_given_to

CPU = torch.device("cpu")


class HostKernel:
    """Launched as Triton launches a `CompiledKernel`: ``out[i] = x[i] * factor``, float32."""

    name = "scale"
    function = 7
    packed_metadata = ("packed",)

    def __init__(self) -> None:
        self.streams: list[int] = []
        self.launches: list[tuple[Any, ...]] = []

    @property
    def run(self) -> Callable[..., None]:
        return self._run

    def _run(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, launch: Any,
        enter: Any, leave: Any, out: Any, source: Any, factor: float, count: int,
    ) -> None:  # fmt: skip
        assert (function, packed) == (7, ("packed",))
        assert x * y * z == count
        self.streams.append(stream)
        self.launches.append((out, source))
        to, of = (
            (ctypes.c_float * count).from_address(a if isinstance(a, int) else a.data_ptr())
            for a in (out, source)
        )
        for index in range(count):
            to[index] = of[index] * factor

    def __getitem__(self, stream: int) -> Callable[..., None]:
        def launch(out: torch.Tensor, source: torch.Tensor, factor: float) -> None:
            count = source.numel()
            self.run(
                *(count, 1, 1, stream, self.function, self.packed_metadata),
                *("metadata", "hook", "hook", out, source, factor, count),
            )

        return launch


class Cell:
    stream = 3


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> HostKernel:
    monkeypatch.setattr(triton_launches, "_compiled_kernel", lambda: HostKernel)
    monkeypatch.setattr(tape, "launches_can_be_seen", lambda device: True)
    monkeypatch.setattr(tape, "current_stream", lambda: Cell.stream)
    return HostKernel()


def test_a_launch_is_replayed_with_its_arguments(kernel: HostKernel) -> None:
    x, out = torch.randn(5), torch.empty(5)

    def step() -> dict[str, torch.Tensor]:
        kernel[3](out, x, 2.5)
        return {"out": out + 1}

    recording = TapeRecorder(CPU).record(step, 5)
    assert [(row.operation, row.count) for row in recording.census().rows] == [
        ("scale", 1),
        ("aten.add.Tensor", 1),
    ]
    assert len(kernel.launches) == 1
    x.copy_(torch.randn(5))
    out.fill_(float("nan"))
    recording.replay()
    torch.testing.assert_close(recording.outputs["out"], x * 2.5 + 1)
    assert len(kernel.launches) == 2
    assert kernel.launches[1] == (out.data_ptr(), x.data_ptr())


def test_hooks_and_metadata_of_a_profiler_are_left_out(kernel: HostKernel) -> None:
    seen: list[tuple[Any, ...]] = []
    launcher = lambda *given: seen.append(given)  # noqa: E731
    x = torch.randn(2)
    given = (2, 1, 1, 3, 7, ("packed",), "m", "in", "out", x, None, 4)
    TritonLaunch(kernel, launcher, given).on(9)()
    assert seen == [(2, 1, 1, 9, 7, ("packed",), None, None, None, x.data_ptr(), None, 4)]


def test_memory_of_arguments_lives_as_long_as_the_recording(kernel: HostKernel) -> None:
    held = [torch.randn(4)]
    want = held[0] * 3

    def step() -> dict[str, torch.Tensor]:
        out = torch.empty(4)
        kernel[3](out, held[0], 3.0)
        return {"out": out}

    recording = TapeRecorder(CPU).record(step, 4)
    assert held[0].untyped_storage()._cdata in {s._cdata for s in recording.pinned}
    held.clear()
    torch.full((64, 4), float("nan"))
    recording.outputs["out"].fill_(float("nan"))
    recording.replay()
    torch.testing.assert_close(recording.outputs["out"], want)


def test_replay_launches_on_the_stream_of_then(kernel: HostKernel, monkeypatch: Any) -> None:
    x, out = torch.randn(2), torch.empty(2)
    recording = TapeRecorder(CPU).record(lambda: kernel[3](out, x, 1.0) or {"out": out}, 2)
    recording.replay()
    monkeypatch.setattr(Cell, "stream", 11)
    recording.replay()
    recording.timed_replay()
    assert kernel.streams == [3, 3, 11, 11]


def test_kernel_layer_is_recorded_down_to_its_launches(kernel: HostKernel) -> None:
    x, out = torch.randn(3), torch.empty(3)
    python = 0

    @operation("twice", "triton: scale")
    def twice(source: torch.Tensor, into: torch.Tensor) -> None:
        nonlocal python
        python += 1
        kernel[3](into, source, 2.0)
        into.add_(1)
        kernel[3](into, into, 2.0)

    recording = TapeRecorder(CPU).record(lambda: twice(x, out) or {"out": out}, 3)
    rows = {row.operation: (row.implementation, row.count) for row in recording.census().rows}
    assert rows["twice"] == ("triton: scale", 2)
    assert rows["aten.add_.Tensor"][1] == 1
    x.copy_(torch.randn(3))
    recording.replay()
    torch.testing.assert_close(out, (x * 2 + 1) * 2)
    assert python == 1


def test_an_operation_of_other_kernels_is_called_whole(kernel: HostKernel) -> None:
    x, out = torch.randn(3), torch.empty(3)
    python = 0

    @operation("twice", "torch")
    def twice(source: torch.Tensor, into: torch.Tensor) -> None:
        nonlocal python
        python += 1
        kernel[3](into, source, 2.0)

    recording = TapeRecorder(CPU).record(lambda: twice(x, out) or {"out": out}, 3)
    assert len(recording.census().rows) == 1
    recording.replay()
    assert python == 2


def test_an_operation_in_which_nothing_is_seen_is_called_whole(kernel: HostKernel) -> None:
    """Its launches take a way that is not known here."""
    x, out = torch.randn(3), torch.empty(3)

    @operation("copy", "triton: copy")
    def unseen(source: torch.Tensor, into: torch.Tensor) -> None:
        ctypes.memmove(into.data_ptr(), source.data_ptr(), 12)

    recording = TapeRecorder(CPU).record(lambda: unseen(x, out) or {"out": out}, 3)
    x.copy_(torch.randn(3))
    recording.replay()
    assert torch.equal(out, x)


@pytest.fixture
def python_operator(kernel: HostKernel):  # type: ignore[no-untyped-def]
    """``graphcap_test::scaled(x, factor) -> Tensor``, implemented in Python, which launches `kernel`."""
    library = torch.library.Library("graphcap_test", "FRAGMENT")
    calls: list[float] = []

    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        calls.append(factor)
        out = torch.empty_like(x)
        kernel[3](out, x, factor)
        return out.add_(1)

    library.define("scaled(Tensor x, float factor) -> Tensor")
    library.impl("scaled", scaled, "CPU")
    operator = torch.ops.graphcap_test.scaled.default
    yield operator, scaled, calls
    bindings._OPENED.pop(operator, None)
    library._destroy()


def test_an_operator_in_python_is_looked_into_where_that_was_told(python_operator: Any) -> None:
    operator, scaled, calls = python_operator
    bindings.opened_as(operator, scaled, when=lambda x, factor: factor > 2)
    x = torch.randn(4)

    def step() -> dict[str, torch.Tensor]:
        return {"a": operator(x, 3.0), "b": operator(x, 2.0)}

    recording = TapeRecorder(CPU).record(step, 4)
    rows = {row.operation: row.count for row in recording.census().rows}
    assert rows == {"scale": 1, "aten.add_.Tensor": 1, "graphcap_test.scaled.default": 1}
    x.copy_(torch.randn(4))
    for output in recording.outputs.values():
        output.fill_(float("nan"))
    del calls[:]
    recording.replay()
    assert calls == [2.0]
    torch.testing.assert_close(recording.outputs["a"], x * 3 + 1)
    torch.testing.assert_close(recording.outputs["b"], x * 2 + 1)


def test_what_cannot_be_recorded_is_refused_inside_too(python_operator: Any) -> None:
    operator, _, _ = python_operator
    bindings.opened_as(operator, lambda x, factor: x * x.sum().item())
    with pytest.raises(CaptureError, match="item"):
        TapeRecorder(CPU).record(lambda: {"out": operator(torch.randn(2), 1.0)}, 2)


@pytest.mark.parametrize("inference", [False, True])
def test_in_inference_mode_as_well(python_operator: Any, inference: bool) -> None:
    operator, scaled, _ = python_operator
    bindings.opened_as(operator, scaled)
    with torch.inference_mode(inference):
        x = torch.randn(4)
        recording = TapeRecorder(CPU).record(lambda: {"out": operator(x, 3.0)}, 4)
        x.copy_(torch.randn(4))
        recording.replay()
        torch.testing.assert_close(recording.outputs["out"], x * 3 + 1)


def test_launches_of_other_threads_pass(kernel: HostKernel) -> None:
    x, out, other = torch.randn(2), torch.empty(2), torch.empty(2)

    def step() -> dict[str, torch.Tensor]:
        thread = threading.Thread(target=lambda: kernel[3](other, x, 5.0))
        thread.start()
        thread.join()
        kernel[3](out, x, 2.0)
        return {"out": out}

    recording = TapeRecorder(CPU).record(step, 2)
    assert [(row.operation, row.count) for row in recording.census().rows] == [("scale", 1)]
    assert torch.equal(other, x * 5)


def test_triton_is_as_it_was_afterwards(kernel: HostKernel) -> None:
    """Also when two threads record at once and the one that began first ends first."""
    before = vars(HostKernel)["run"]
    began, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with triton_launches_given_to(lambda *given: None):
            began.set()
            may_end.wait(10)

    thread = threading.Thread(target=other)
    with contextlib.suppress(ZeroDivisionError), triton_launches_given_to(lambda *given: None):
        thread.start()
        began.wait(10)
        raise ZeroDivisionError
    assert vars(HostKernel)["run"] is not before
    may_end.set()
    thread.join()
    assert vars(HostKernel)["run"] is before


class OldKernel:
    """Finds its launcher as Triton before 3.5 does."""

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


def test_without_that_way_of_triton_nothing_is_said_to_be_seen(monkeypatch: Any) -> None:
    """The refusal that the tape falls back to is tested in test_tape.py."""
    compiler = pytest.importorskip("triton.compiler.compiler")
    knobs = pytest.importorskip("triton.knobs")
    cuda = torch.device("cuda")
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(compiler, "CompiledKernel", HostKernel)
    assert triton_launches.triton_is_recorded()
    assert triton_launches.launches_can_be_seen(cuda)
    assert not triton_launches.launches_can_be_seen(CPU)
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert not triton_launches.launches_can_be_seen(cuda)
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(compiler, "CompiledKernel", OldKernel)
    assert not triton_launches.triton_is_recorded()
    assert not triton_launches.launches_can_be_seen(cuda)
    with pytest.raises(RuntimeError, match="CompiledKernel"), triton_launches_given_to(print):
        raise AssertionError("entered")
