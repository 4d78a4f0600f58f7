"""A capture that fails on a device leaves it usable, and the memory as it was, while earlier graphs serve."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_containment import Fault, follow

from graphcap import (
    BucketLadder,
    BufferPool,
    CaptureManager,
    PadPolicy,
    Settings,
    Slot,
    StaticInputs,
)
from graphcap.capturing import BucketCapture
from graphcap.errors import CaptureError

WIDTH = 64
MIB = 2**20
SIZES = (8, 4, 2, 1)
SLOTS = {
    "x": Slot((WIDTH,), torch.float32),
    "count": Slot((), torch.int64, PadPolicy.fill(-1)),
}


class Step:
    """A matrix product in the pool, a draw of its own generator, a counter and a slot that advance."""

    def __init__(self, pool: BufferPool, device: torch.device) -> None:
        self.pool = pool
        self.weight = torch.randn(WIDTH, WIDTH, device=device)
        self.counter = torch.zeros(1, device=device)
        self.generator = torch.Generator(device).manual_seed(11)
        self.stage = ""
        self.faults: dict[str, Fault] = {}

    def __call__(self, inputs: Any) -> dict[str, torch.Tensor]:
        fault = self.faults.get(self.stage)
        if fault is None:
            return self.compute(inputs)
        with fault:
            return self.compute(inputs)

    def compute(self, inputs: Any) -> dict[str, torch.Tensor]:
        x = inputs["x"]
        hidden = self.pool.take("hidden", (x.shape[0], WIDTH), torch.float32)
        torch.mm(x, self.weight, out=hidden)
        drawn = torch.empty_like(self.weight[0]).uniform_(generator=self.generator)
        y = hidden.clamp(min=0) + drawn
        self.pool.release("hidden")
        self.counter.add_(1)
        inputs["count"].add_(1)
        return {"y": y, "drawn": drawn.expand_as(x) * 1, "count": inputs["count"] * 2}


def make(
    device: torch.device,
    sizes: tuple[int, ...] = SIZES,
    kind: type[Step] = Step,
    **settings: Any,
) -> tuple[CaptureManager, Step]:
    pool = BufferPool(device)
    step = kind(pool, device)
    manager = CaptureManager(
        step,
        StaticInputs(max(sizes), SLOTS, device),
        pool=pool,
        ladder=BucketLadder(sizes),
        settings=Settings(recorder="cuda", **settings),
        state=[step.counter, step.generator],
    )
    return manager, step


def held(device: torch.device) -> tuple[int, int]:
    """Bytes that torch has given out, and bytes that it has from the driver."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


def assert_no_more(now: tuple[int, int], before: tuple[int, int]) -> None:
    more = [(a - b) / MIB for a, b in zip(now, before, strict=True)]
    assert max(more) <= 1, f"{more[0]:.2f} MiB allocated and {more[1]:.2f} MiB reserved more"


def assert_serves(manager: CaptureManager, step: Step, recorded: set[int]) -> None:
    device = step.weight.device
    before, served = manager.stats().replays, 0
    for rows in range(1, 9):
        for recording in manager._captured.recordings.values():
            for output in recording.outputs.values():
                output.fill_(float("nan") if output.is_floating_point() else -77)
        x, ran = torch.randn(rows, WIDTH, device=device), step.counter.item()
        out = manager.run({"x": x, "count": torch.arange(rows, device=device)})
        want = (x.double() @ step.weight.double()).clamp(min=0) + out["drawn"].double()
        torch.testing.assert_close(out["y"].double(), want, rtol=1e-4, atol=1e-4)
        drawn = out["drawn"]
        assert bool(((drawn >= 0) & (drawn < 1)).all())
        assert out["count"].tolist() == [2 * (i + 1) for i in range(rows)]
        assert step.counter.item() == ran + 1
        served += manager.ladder.bucket_for(rows) in recorded
    assert manager.stats().replays - before == served > 0


@pytest.fixture
def clean(device: torch.device) -> tuple[int, int]:
    """What is held before anything is captured, what is loaded and reserved once being so already.

    The first capture in a process that the driver gives up is of that: torch's random generator keeps two
    numbers on the device for it, in 2 MiB that torch reserves.
    """
    for at in (3, None):
        manager, step = make(device)
        step.faults = {"recording bucket 4": Fault(waits, at)}
        failed = {4} if at else set()
        assert set(manager.capture(follow(step)).failures) == failed
        step.stage = ""
        assert_serves(manager, step, set(SIZES) - failed)
        manager.close()
        del manager, step
    return held(device)


def raises() -> None:
    raise ValueError("by design")


def out_of_memory() -> None:
    torch.empty(2**46, device="cuda")


def waits() -> None:
    torch.cuda.synchronize()  # illegal under capture: the driver gives the capture up


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


FAILURES: dict[str, Callable[[], object]] = {
    "raises": raises,
    "memory": out_of_memory,
    "waits": waits,
}


@pytest.mark.parametrize("at", [0, 2, 5])
@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        ("warming up", "raises"),
        ("warming up", "memory"),
        ("recording", "raises"),
        ("recording", "memory"),
        ("recording", "waits"),
        ("verifying", "raises"),
        ("verifying", "memory"),
    ],
)
def test_a_failure_costs_its_bucket_and_no_memory(
    device: torch.device, clean: tuple[int, int], stage: str, kind: str, at: int
) -> None:
    without, _ = make(device, (8, 2, 1))
    without.capture()
    usual = held(device)
    without.close()
    del without
    assert_no_more(held(device), clean)

    manager, step = make(device)
    fault = Fault(FAILURES[kind], at)
    step.faults = {f"{stage} bucket 4": fault}
    drawing, own = torch.cuda.get_rng_state(device), step.generator.get_state()
    report = manager.capture(follow(step))
    step.stage = ""
    assert fault.fired
    assert set(report.failures) == {4}
    text = report.failures[4]
    assert "bucket 4" in text
    assert __file__ in text
    assert "(graphcap explain capture)" in text
    assert gc.isenabled()
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    assert torch.equal(torch.cuda.get_rng_state(device), drawing)
    assert torch.equal(step.generator.get_state(), own)
    assert step.counter.item() == 0
    # A bucket that was recorded and then failed shared its memory with the others.
    assert_no_more(held(device), usual)
    assert_serves(manager, step, {8, 2, 1})
    assert torch.rand(3, generator=step.generator, device=device).isfinite().all()
    manager.close()
    del manager, step, fault
    assert_no_more(held(device), clean)


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("stage", ["warming up", "recording", "verifying"])
def test_an_interrupt_gives_everything_back(
    device: torch.device, clean: tuple[int, int], stage: str, at: int
) -> None:
    manager, step = make(device)
    before = held(device)
    step.faults = {f"{stage} bucket 4": Fault(interrupt, at)}
    with pytest.raises(KeyboardInterrupt):
        manager.capture(follow(step))
    assert step.faults[f"{stage} bucket 4"].fired
    assert manager.state == "new"
    assert gc.isenabled()
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    assert_no_more(held(device), before)
    assert manager.capture(follow(step)).failures == {}
    step.stage = ""
    assert_serves(manager, step, set(SIZES))
    manager.close()
    del manager, step
    assert_no_more(held(device), clean)


class Hog(Step):
    """At the third bucket: 256 MiB in the graph's memory, and then all of the device."""

    def compute(self, inputs: Any) -> dict[str, torch.Tensor]:
        if inputs["x"].shape[0] == 2 and torch.cuda.is_current_stream_capturing():
            held = [torch.zeros(2**24, device=self.weight.device) for _ in range(4)]
            out_of_memory()
            del held
        return super().compute(inputs)


def test_memory_of_a_bucket_that_runs_out_of_it_is_returned_while_earlier_graphs_live(
    device: torch.device, clean: tuple[int, int]
) -> None:
    without, _ = make(device, (8, 4, 1))
    without.capture()
    usual = held(device)
    without.close()
    del without

    manager, step = make(device, kind=Hog)
    said: list[str] = []
    report = manager.capture(lambda done, total, what: said.append(what))
    assert set(report.failures) == {2}
    assert "out of device memory" in report.failures[2]
    assert "GRAPHCAP_BUCKETS" in report.failures[2]
    assert [text for text in said if text.endswith("again")] == [
        f"recording bucket {size} again" for size in (8, 4, 1)
    ]
    assert_no_more(held(device), usual)
    assert_serves(manager, step, {8, 4, 1})
    manager.close()
    del manager, step
    assert_no_more(held(device), clean)


class Dangles(Step):
    """Bucket 2: 256 MiB in the graph's memory, and a memset of a tensor that is freed right after it."""

    def __init__(self, pool: BufferPool, device: torch.device) -> None:
        super().__init__(pool, device)
        before, hidden, behind = (torch.zeros(1000, device=device) for _ in range(3))
        self.beside = before, behind  # so that the memory between them is not given back
        self.hidden = {hidden}  # no name leads into a set, and so nothing else keeps it

    def compute(self, inputs: Any) -> dict[str, torch.Tensor]:
        if inputs["x"].shape[0] == 2 and torch.cuda.is_current_stream_capturing():
            driver = pytest.importorskip("cuda.bindings.driver")
            held = [torch.zeros(2**24, device=self.weight.device) for _ in range(4)]
            address = driver.CUdeviceptr(self.hidden.pop().data_ptr())
            stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
            (error,) = driver.cuMemsetD8Async(address, 0, 4000, stream)
            assert error == driver.CUresult.CUDA_SUCCESS
            del held
        return super().compute(inputs)


def test_memory_of_a_bucket_whose_pointers_dangle_is_returned_while_earlier_graphs_live(
    device: torch.device, clean: tuple[int, int]
) -> None:
    pytest.importorskip("cuda.bindings.driver")
    without, _ = make(device, (8, 4, 1), Dangles)
    without.capture()
    usual = held(device)
    without.close()
    del without

    manager, step = make(device, kind=Dangles)
    report = manager.capture()
    assert set(report.failures) == {2}
    assert "memset" in report.failures[2]
    assert "(graphcap explain dangling-pointer)" in report.failures[2]
    assert_no_more(held(device), usual)
    assert_serves(manager, step, {8, 4, 1})
    manager.close()
    del manager, step
    assert_no_more(held(device), clean)


class Differs(Step):
    """400 MiB of intermediates, two of 4 MiB at a time; bucket 4 is recorded otherwise than it runs."""

    def compute(self, inputs: Any) -> dict[str, torch.Tensor]:
        big = torch.zeros(2**20, device=self.weight.device)
        for _ in range(100):
            big = big + 1
        outputs = super().compute(inputs)
        if inputs["x"].shape[0] == 4 and torch.cuda.is_current_stream_capturing():
            outputs["y"].add_(1)
        return outputs


def test_the_search_for_the_operation_that_differs_keeps_no_memory_of_the_graphs(
    device: torch.device, clean: tuple[int, int]
) -> None:
    """It records the step with a copy of every result, beside the graphs that serve."""
    without, _ = make(device, (8, 2, 1), Differs)
    assert without.capture().failures == {}
    usual = held(device)
    without.close()
    del without

    manager, step = make(device, kind=Differs)
    report = manager.capture()
    assert set(report.failures) == {4}
    assert "differs from the eager step" in report.failures[4]
    assert "took another way" in report.failures[4] or "result differs is" in report.failures[4]
    assert_no_more(held(device), usual)
    assert_serves(manager, step, {8, 2, 1})
    manager.close()
    del manager, step
    assert_no_more(held(device), clean)


def test_torch_itself_does_not_return_it_while_a_graph_of_the_pool_lives(
    device: torch.device, clean: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why the others are recorded again. Should this fail, torch has learnt it, and that can go."""
    monkeypatch.setattr(BucketCapture, "taken_back", lambda self: [])
    manager, step = make(device, kind=Hog)
    report = manager.capture()
    _, reserved = held(device)
    assert reserved - clean[1] >= 256 * MIB
    assert manager.recorder.stranded >= 256 * MIB
    assert [note for note in report.notes if "until these are closed" in note]
    assert_serves(manager, step, {8, 4, 1})
    manager.close()
    del manager, step
    assert_no_more(held(device), clean)


def test_managers_that_come_and_go_take_no_memory(
    device: torch.device, clean: tuple[int, int]
) -> None:
    """Each stream that multiplies costs torch a workspace for good: they are lent, not made anew."""
    for turn in range(6):
        manager, step = make(device)
        kind = ("raises", "memory", "waits")[turn % 3]
        step.faults = {"recording bucket 8": Fault(FAILURES[kind], turn)}
        assert set(manager.capture(follow(step)).failures) == {8}
        manager.close()
        del manager, step
        assert_no_more(held(device), clean)


def test_recorders_that_live_at_once_have_streams_of_their_own(device: torch.device) -> None:
    (first, _), (second, _) = make(device), make(device)
    one, other = first.recorder._stream, second.recorder._stream
    assert one.cuda_stream != other.cuda_stream
    first.capture()
    recording = first.recording(8)
    first.recorder.close()
    third, _ = make(device)
    assert third.recorder._stream.cuda_stream != one.cuda_stream, "a recording made on it lives"
    del recording
    first.close()
    fourth, _ = make(device)
    assert fourth.recorder._stream.cuda_stream == one.cuda_stream
    for manager in (second, third, fourth):
        manager.close()


def test_strictness_gives_everything_back(device: torch.device, clean: tuple[int, int]) -> None:
    manager, step = make(device, strict=True)
    before = held(device)
    step.faults = {"recording bucket 2": Fault(FAILURES["memory"], 3)}
    with pytest.raises(CaptureError, match="out of device memory"):
        manager.capture(follow(step))
    assert_no_more(held(device), before)
    manager.close()
    del manager, step
    assert_no_more(held(device), clean)


# -- collections, and other threads ------------------------------------------------------------------


def test_a_collection_inside_a_capture_that_finds_a_graph_and_tensors(
    device: torch.device, clean: tuple[int, int]
) -> None:
    class Garbage:
        def __init__(self) -> None:
            self.me, self.tensor = self, torch.ones(2**20, device=device)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self.tensor * 2

    manager, step = make(device)
    garbage = [Garbage() for _ in range(2)]

    def collect() -> None:
        garbage.clear()
        gc.collect()

    step.faults = {"recording bucket 4": Fault(collect, 3)}
    report = manager.capture(follow(step))
    step.stage = ""
    assert step.faults["recording bucket 4"].fired
    assert set(report.failures) <= {4}
    assert_serves(manager, step, set(SIZES) - set(report.failures))
    manager.close()
    del manager, step
    assert_no_more(held(device), clean)
    assert report.failures == {}, "contained, but it need not have failed"


def new_memory() -> None:
    tensor = torch.empty(2**26, device="cuda")  # more than is cached: the driver is asked
    tensor.fill_(1)
    del tensor


def kernels() -> None:
    assert float(torch.ones(1000, device="cuda").sum()) == 1000


def copies() -> None:
    assert torch.ones(1000).to("cuda").cpu().sum() == 1000


def own_stream() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.ones(1000, device="cuda").add_(1)
    stream.synchronize()


@pytest.mark.parametrize("call", [new_memory, kernels, copies, own_stream])
@pytest.mark.parametrize("at", [0, 4])
def test_what_another_thread_does_in_the_middle_of_a_capture_is_not_part_of_it(
    device: torch.device, call: Callable[[], None], at: int
) -> None:
    manager, step, errors = *make(device), []
    step.faults = {"recording bucket 4": Fault(lambda: elsewhere(call, errors), at)}
    report = manager.capture(follow(step))
    step.stage = ""
    assert step.faults["recording bucket 4"].fired
    assert errors == []
    assert report.failures == {}
    assert_serves(manager, step, set(SIZES))
    manager.close()


@pytest.mark.parametrize("call", [torch.cuda.synchronize, torch.cuda.empty_cache])
@pytest.mark.parametrize("at", [0, 4])
def test_what_breaks_a_capture_from_another_thread_costs_the_bucket_at_most(
    device: torch.device, clean: tuple[int, int], call: Callable[[], None], at: int
) -> None:
    """CUDA forbids waiting for a device of which any stream captures, to every thread."""
    manager, step, errors = *make(device), []
    step.faults = {"recording bucket 4": Fault(lambda: elsewhere(call, errors), at)}
    report = manager.capture(follow(step))
    step.stage = ""
    assert step.faults["recording bucket 4"].fired
    assert set(report.failures) <= {4}
    if report.failures:
        assert "keep other threads from waiting for the device" in report.failures[4]
    assert_serves(manager, step, set(SIZES) - set(report.failures))
    manager.close()
    del manager, step
    errors.clear()
    assert_no_more(held(device), clean)


def elsewhere(call: Callable[[], None], errors: list[BaseException]) -> None:
    """Run `call` on a thread of its own, to its end."""

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
