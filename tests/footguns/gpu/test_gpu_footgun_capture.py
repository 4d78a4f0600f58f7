"""Footguns of capture on a CUDA device: cases 14 to 19 and their kin."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_toy import WIDTH, batch, churn, free_bytes, make, manager_of, right

from graphcap.errors import CaptureError, StateError
from graphcap.recorders.cuda import CudaRecorder

Device = torch.device


def costs_its_bucket(device: Device, fault: Callable[[torch.Tensor], object], words: str) -> None:
    """`fault` in bucket 4, under capture, is named with its file; every other bucket replays."""
    manager, step = make(device)
    step.while_capturing[4] = fault
    failures = manager.capture().failures
    assert set(failures) == {4}
    assert os.path.basename(__file__) in failures[4]
    assert re.search(words, failures[4]), failures[4]
    assert not torch.cuda.is_current_stream_capturing()
    for rows in (1, 2, 3, 4, 5, 8):
        right(manager, step, rows, rows)
    assert manager.stats().fallbacks == {"not_recorded": 2}


# -- 14 ------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "item": (lambda h: h.sum().item(), r"\.item\(\)"),
    "cpu": (lambda h: h.cpu(), r"\.cpu\(\)"),
    "nonzero": (lambda h: h.nonzero(), "aten.nonzero"),
    "mask": (lambda h: h[h > 0], "aten.index"),
    "if": (lambda h: 1 if h.sum() > 0 else 2, r"bool\(\)"),
    "tolist": (lambda h: h.tolist(), r"\.tolist\(\)"),
    "unique": (lambda h: torch.unique(h), "_unique2"),
    "repeat_interleave": (
        lambda h: h.repeat_interleave((h[:, 0] > -9).long(), 0),
        "repeat_interleave",
    ),
    "masked assignment": (
        lambda h: h.__setitem__(h[:, 0] > 0, torch.ones(2, WIDTH, device=h.device)),
        "index_put_",
    ),
    "python list": (
        lambda h: h + torch.tensor([1.0] * WIDTH, device=h.device),
        "copies between|captur",
    ),
    "host tensor": (lambda h: h.copy_(torch.zeros(h.shape)), "copies between"),
    "to the host": (lambda h: h.to("cpu"), "copies between"),
    "print": (lambda h: str(h), "printing"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_14_gpu_a_host_read(what: str, device: Device):
    """Kin: on a device also `torch.tensor([…])` and copies from the host inside the step."""
    costs_its_bucket(device, *FAULTS[what])


@pytest.mark.parametrize(
    "wait",
    [
        lambda h: torch.cuda.synchronize(),
        lambda h: torch.cuda.current_stream().synchronize(),
        lambda h: (lambda event: (event.record(), event.synchronize()))(torch.cuda.Event()),
    ],
    ids=["device", "stream", "event"],
)
def test_14_gpu_synchronisation(wait: Callable[[torch.Tensor], object], device: Device):
    """Kin: `torch.cuda.synchronize()`, of the device or of the stream."""
    costs_its_bucket(device, wait, "(?i)synchron|capture")


# -- 15 ------------------------------------------------------------------------------------------


def test_15_gpu_what_a_step_allocates_lies_in_the_graphs_pool(device: Device):
    """Kin: allocations of a step under capture: in the graph's own memory, none at a replay."""
    manager, step = make(device)
    manager.capture()
    manager.run(batch(3, device))
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    for _ in range(20):
        manager.run()
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before
    right(manager, step, 3, 1)


# -- 16 ------------------------------------------------------------------------------------------


def test_16_gpu_collections_are_held_and_restored(device: Device):
    """Kin: on a device, where a collection under capture frees CUDA memory; also after a failure."""
    for error in (None, ValueError, KeyboardInterrupt):
        manager, step = make(device)
        during: list[bool] = []

        def look(hidden: torch.Tensor, error: Any = error, during: list[bool] = during) -> None:
            during.append(gc.isenabled())
            cycle: list[Any] = [torch.ones(1 << 10, device=hidden.device)]
            cycle.append(cycle)
            if error is not None:
                raise error

        step.while_capturing[4] = look
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                manager.capture()
            step.while_capturing.clear()
        assert set(manager.capture().failures) == ({4} if error is ValueError else set())
        assert during == [False]
        assert gc.isenabled()
        gc.collect()
        right(manager, step, 5)


# -- 17 ------------------------------------------------------------------------------------------


def test_17_out_of_memory_while_recording_a_bucket(device: Device):
    """Elsewhere: running out of memory while recording the fifth bucket lost the four before it.
    Here: they keep working, the fifth's memory is returned, the error says how much was missing."""
    free_bytes(device)
    manager, step = make(device, sizes=(1, 2, 4, 6, 8), max_batch=12)
    _, total = torch.cuda.mem_get_info(device)
    taken = torch.cuda.memory_reserved(device)
    before: list[int] = []

    def too_much(hidden: torch.Tensor) -> None:
        before.append(torch.cuda.mem_get_info(device)[0])
        step.held = [torch.empty(1 << 26, device=device) for _ in range(64)]  # type: ignore[attr-defined]

    step.while_capturing[2] = too_much
    torch.cuda.set_per_process_memory_fraction((taken + (2 << 30)) / total, device)
    try:
        failures = manager.capture().failures
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert set(failures) == {2}
    assert "out of device memory" in failures[2]
    assert re.search(r"Tried to allocate 256\.00 MiB", failures[2]), failures[2]
    assert os.path.basename(__file__) in failures[2]
    assert before[0] - torch.cuda.mem_get_info(device)[0] < 128 << 20
    for rows in (1, 3, 5, 7, 12, 2):
        right(manager, step, rows, rows)


@pytest.mark.parametrize("size", [8, 4, 1])
def test_17_kin_memory_of_any_failed_bucket_comes_back(size: int, device: Device):
    """Kin: the largest bucket, or the last one; an exception after allocating; a huge allocation."""
    free_bytes(device)
    manager, step = make(device)

    def big_then_fail(hidden: torch.Tensor) -> None:
        held = torch.zeros(1 << 27, device=device)
        torch.empty(1 << 46, dtype=torch.uint8, device=device)
        held.zero_()

    step.while_capturing[size] = big_then_fail
    before = free_bytes(device)
    failures = manager.capture().failures
    assert set(failures) == {size}
    assert "out of device memory" in failures[size]
    assert before - free_bytes(device) < 256 << 20  # of 512, with the workspaces of two streams
    for rows in (1, 3, 8):
        right(manager, step, rows, rows)


# -- 18 ------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: torch.nn.functional.dropout(x + 1, 0.5),
    "rand_like": torch.rand_like,
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "randint": lambda x: torch.randint(1 << 30, (WIDTH,), device=x.device).float(),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "gumbel": lambda x: torch.nn.functional.gumbel_softmax(x),
}


@pytest.mark.parametrize("what", DRAWS)
def test_18_gpu_random_numbers_advance(what: str, device: Device):
    """Kin: on a device: Philox offsets of CUDA graphs."""
    draw = DRAWS[what]

    def step(inputs: Any) -> Any:
        return {"y": inputs["x"] * 0 + draw(inputs["x"])}

    manager = manager_of(step, device, rows_mix=True)
    assert not manager.capture().failures
    given = batch(4, device)
    torch.manual_seed(5)
    first, second = (manager.run(given)["y"].clone() for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(manager.run(given)["y"], first)
    torch.manual_seed(5)
    torch.testing.assert_close(step(given)["y"], first)


# -- 19 ------------------------------------------------------------------------------------------


def test_19_gpu_recording_inside_a_capture(device: Device):
    """Kin: inside somebody else's capture on the same stream."""
    recorder = CudaRecorder(device)
    manager, step = make(device)
    manager.capture()
    x = torch.ones(4, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(StateError, match="another capture"):
        recorder.record(lambda: {"y": x + 1}, 4)
    right(manager, step, 3)


@pytest.mark.parametrize("how", ["stream", "inference", "grad", "autocast", "deterministic"])
@pytest.mark.parametrize("where", ["capture", "run"])
def test_19_gpu_other_modes_and_streams(where: str, how: str, device: Device):
    """Kin: another current stream, inference mode, gradients, autocast, deterministic mode."""
    weight = torch.nn.Parameter(torch.eye(WIDTH, device=device) * 2)
    manager = manager_of(lambda inputs: {"y": inputs["x"] @ weight}, device)
    given = {name: t.round() if name == "x" else t for name, t in batch(3, device).items()}

    def inside(call: Callable[[], Any]) -> Any:
        if how == "stream":
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                result = call()
            torch.cuda.current_stream(device).wait_stream(side)
            return result
        if how == "deterministic":
            torch.use_deterministic_algorithms(True, warn_only=True)
            try:
                return call()
            finally:
                torch.use_deterministic_algorithms(False)
        mode: Any = {
            "inference": torch.inference_mode,
            "grad": torch.enable_grad,
            "autocast": lambda: torch.autocast("cuda", dtype=torch.bfloat16),
        }[how]
        with mode():
            return call()

    capture = manager.capture
    report = inside(capture) if where == "capture" else capture()
    assert not report.failures
    churn(device)
    out = inside(lambda: manager.run(given)) if where == "run" else manager.run(given)
    assert not out["y"].requires_grad
    assert torch.equal(out["y"].float(), given["x"] * 2)


@pytest.mark.parametrize("work", ["allocates", "computes", "empties the cache"])
def test_19_gpu_another_thread_while_capturing(work: str, device: Device):
    """Kin: another thread that allocates, computes or empties the cache while a capture runs."""
    manager, step = make(device)
    stop, errors, done = threading.Event(), [], []

    def other() -> None:
        try:
            while not stop.is_set():
                if work == "allocates":
                    held = [torch.empty(1 << 22, device=device) for _ in range(4)]
                    del held
                elif work == "computes":
                    assert float(torch.ones(64, device=device).sum()) == 64
                else:
                    torch.cuda.empty_cache()
                done.append(1)
                time.sleep(1e-3)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        failures = manager.capture().failures
    finally:
        stop.set()
        thread.join(60)
    assert done or errors
    # torch itself refuses to empty the cache while a capture runs, in the thread that asked for it.
    assert errors == [] or work == "empties the cache"
    assert failures == {}
    for rows in (1, 3, 8):
        right(manager, step, rows, rows)


def test_19_gpu_a_second_thread_is_refused(device: Device):
    """Kin: a second thread while an eager step runs on the device."""
    manager, step = make(device)
    manager.capture()
    inside, leave = threading.Event(), threading.Event()
    right_step = manager._fallback._step

    def waits(inputs: Any) -> Any:
        inside.set()
        leave.wait(30)
        return right_step(inputs)

    manager._fallback._step = waits
    thread = threading.Thread(target=lambda: manager.run(batch(9, device)))
    thread.start()
    assert inside.wait(30)
    try:
        with pytest.raises(StateError, match="in use, by another thread"):
            manager.run(batch(3, device))
    finally:
        leave.set()
        thread.join(30)
    right(manager, step, 3)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_19_gpu_a_forked_process_gives_no_wrong_result(device: Device):
    """Kin: a forked process, which cannot use CUDA: an error there, no harm here."""
    manager, step = make(device)
    manager.capture()
    right(manager, step, 3)
    given = batch(3, "cpu", 1)
    child = os.fork()
    if child == 0:
        try:
            manager.run(given)["y"].cpu()
        except BaseException:
            os._exit(0)
        os._exit(1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hung")
    assert os.waitstatus_to_exitcode(status) != 1, "the child computed something"
    right(manager, step, 3, 1)


def test_19_gpu_an_interrupted_capture_can_be_made_again(device: Device):
    """Kin: Ctrl-C under capture, in any bucket."""
    manager, step = make(device)

    def interrupt(hidden: torch.Tensor) -> None:
        raise KeyboardInterrupt

    for size in (8, 4, 1):
        step.while_capturing = {size: interrupt}
        with pytest.raises(KeyboardInterrupt):
            manager.capture()
        assert manager.state == "new"
        assert not torch.cuda.is_current_stream_capturing()
    step.while_capturing = {}
    assert not manager.capture().failures
    right(manager, step, 5)


def test_19_gpu_strict_names_the_bucket(device: Device):
    """Kin: with `GRAPHCAP_STRICT=1` on a device."""
    manager, step = make(device, strict=True)
    step.while_capturing[4] = lambda hidden: hidden.sum().item()
    with pytest.raises(CaptureError, match=r"\.item\(\)"):
        manager.capture()
    step.while_capturing.clear()
    assert not manager.capture().failures
    right(manager, step, 5)
