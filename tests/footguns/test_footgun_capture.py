"""Footguns of capture: cases 14 to 19 and their kin, as far as a CPU shows them."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from toy import CPU, WIDTH, double, floats, manager_of

from graphcap.errors import CaptureError, StateError
from graphcap.manager import CaptureManager
from graphcap.pool import BufferPool
from graphcap.settings import Settings

STRICT = Settings(strict=True)


def captured(step: Any = double, **options: Any) -> CaptureManager:
    manager = manager_of(step, **options)
    assert not manager.capture().failures
    return manager


def run(manager: CaptureManager, rows: int = 3, seed: int = 0) -> torch.Tensor:
    return manager.run({"x": floats(rows, seed)})["y"]


def doing(what: Callable[[torch.Tensor], Any], rows: int = 2) -> Callable[..., Any]:
    """Twice the input; buckets of `rows` do something forbidden first."""

    def step(inputs: Any) -> Any:
        if inputs["x"].shape[0] == rows:
            what(inputs["x"])
        return double(inputs)

    return step


def costs_its_bucket(what: Callable[[torch.Tensor], Any], words: str, cure: str) -> None:
    """`what` in bucket 2 of 1, 2, 4 is named with line and cure; the other buckets replay."""
    manager = manager_of(doing(what), buckets=(1, 2))
    failures = manager.capture().failures
    assert set(failures) == {2}
    line = what.__code__.co_firstlineno
    for piece in (words, f"{os.path.basename(__file__)}:{line} ", cure):
        assert piece in failures[2], failures[2]
    for rows in (1, 2, 3, 4):
        assert torch.equal(run(manager, rows), floats(rows) * 2)
    assert manager.stats().fallbacks == {"not_recorded": 1}
    assert manager.stats().replays == 3


# -- 14 ------------------------------------------------------------------------------------------

KEEP = "keep the value on the device"
MASK = "compute a fixed number of rows and mask"

ROUTER: dict[str, tuple[Callable[[torch.Tensor], Any], str, str]] = {
    ".item()": (lambda x: x.sum().item(), ".item()", KEEP),
    "nonzero": (lambda x: (x > 0).nonzero(), "aten.nonzero", MASK),
    "boolean mask": (lambda x: x[x[:, 0] > 0], "aten.index", MASK),
    ".cpu()": (lambda x: x.cpu(), ".cpu()", KEEP),
}

KIN = {
    "if": (lambda x: 1 if x.sum() > 0 else 2, "bool()", KEEP),
    "while": (lambda x: next(iter([1] if (x > 9).any() else [2])), "bool()", KEEP),
    "and": (lambda x: (x[0, 0] > 0) and 1, "bool()", KEEP),
    "int": (lambda x: int(x[0, 0]), "int()", KEEP),
    "range": (lambda x: range((x[0, 0] > 9).long()), ".item()", KEEP),
    "slice": (lambda x: x[: (x[0, 0] > 9).long()], ".item()", KEEP),
    "max": (lambda x: max(x[0]), "bool()", KEEP),
    "sorted": (lambda x: sorted(x[0]), "bool()", KEEP),
    "in": (lambda x: 1.0 in x, ".item()", KEEP),
    "f-string": (lambda x: f"{x[0, 0]:.2f}", "formatting", KEEP),
    "print": (lambda x: str(x), "printing", KEEP),
    "tolist": (lambda x: x.tolist(), ".tolist()", KEEP),
    "numpy": (lambda x: np.asarray(x), "numpy conversion", KEEP),
    "dlpack": (lambda x: np.from_dlpack(x), "DLPack", KEEP),
    "unique": (lambda x: torch.unique(x), "_unique2", MASK),
    "masked_select": (lambda x: x.masked_select(x > 0), "masked_select", MASK),
    "where": (lambda x: torch.where(x > 0), "nonzero", MASK),
    "repeat_interleave": (
        lambda x: x.repeat_interleave((x[:, 0] > -9).long(), 0),
        "repeat_interleave",
        "output_size=",
    ),
    "bincount": (lambda x: torch.bincount((x[:, 0] > 0).long()), "bincount", "scatter_add_"),
    "one_hot": (lambda x: F.one_hot((x[:, 0] > 0).long()), ".item()", KEEP),
    "equal": (lambda x: torch.equal(x, x), "aten.equal", "torch.eq"),
    "allclose": (lambda x: torch.allclose(x, x), "aten.allclose", ""),
    "list of tensors": (lambda x: torch.tensor([x[0, 0], x[0, 1]]), "list of tensors", "stack"),
    "storage": (lambda x: x.untyped_storage().tolist(), "aten.set_", ""),
}


@pytest.mark.parametrize("what", ROUTER)
def test_14_a_host_read_in_the_router(what: str):
    """Elsewhere: `.item()`, `.cpu()`, `nonzero` or a boolean mask broke the capture, and with it CUDA.
    Here: refused before it runs, with operation, line and cure; it costs that bucket only."""
    costs_its_bucket(*ROUTER[what])


@pytest.mark.parametrize("what", KIN)
def test_14_kin_other_reads(what: str):
    """Kin: `if t`, `int(t)`, slices, `max`, printing, numpy, DLPack, `unique`, `masked_select`,
    `repeat_interleave`, `one_hot`, `equal`, storages."""
    costs_its_bucket(*KIN[what])


def test_14_kin_the_step_swallows_the_refusal():
    """Kin: a step that catches the refusal and takes another branch."""

    def step(inputs: Any) -> Any:
        try:
            scale = inputs["x"].max().item()
        except Exception:
            scale = 1.0
        return {"y": inputs["x"] * scale}

    failures = manager_of(step).capture().failures
    assert set(failures) == {2, 4}
    assert ".item()" in failures[4]


def test_14_kin_behind_torchs_back():
    """Kin: memory read behind torch's back: found by verification."""
    import ctypes

    def step(inputs: Any) -> Any:
        first = ctypes.c_float.from_address(inputs["x"].data_ptr()).value
        return {"y": inputs["x"] + first}

    failures = manager_of(step).capture().failures
    assert "differs from the eager step" in failures[4]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda x: x.to_sparse(), "found one of layout|Cannot access storage of Sparse"),
        (lambda x: torch.nested.nested_tensor([x]), "found a nested one"),
        (lambda x: x.sum(), r"4 rows\), found \(\)"),
        (lambda x: 3.0, "found float"),
    ],
    ids=["sparse", "nested", "scalar", "number"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_14_kin_outputs_without_fixed_rows(result: Any, words: str):
    """Kin: outputs whose rows are not known: sparse, nested, scalar."""
    with pytest.raises(CaptureError, match=words):
        manager_of(lambda inputs: {"y": result(inputs["x"])}, settings=STRICT).capture()


# -- 15 ------------------------------------------------------------------------------------------


def test_15_an_allocation_of_a_step_is_counted_and_with_strict_an_error():
    """Elsewhere: a model that allocates in every step went unnoticed.
    Here: the census counts and names it; with `GRAPHCAP_STRICT=1` it is an error."""

    def step(inputs: Any) -> Any:
        return {"y": inputs["x"].flip(1)}

    manager = captured(step)
    assert [bucket.allocations for bucket in manager.report.buckets] == [1, 1]
    rows = {row.operation: row.allocations for row in manager.report.census.rows}
    assert rows["aten.flip.default"] == 1
    with pytest.raises(CaptureError, match=r"1 allocations.*aten\.flip\.default \(1\).*out= form"):
        manager_of(step, settings=STRICT).capture()


@pytest.mark.parametrize(
    ("value", "allocations"),
    [
        (lambda x: torch.empty(3).fill_(1), 0),
        (lambda x: torch.zeros(3) + torch.ones_like(x), 0),
        (lambda x: torch.tensor([1.0, 2.0, 3.0]), 0),
        (lambda x: x.roll(1, 1), 1),
        (lambda x: torch.nn.functional.pad(x, (1, 1))[:, 1:-1], None),
    ],
    ids=["empty", "factories", "python list", "roll", "pad"],
)
def test_15_kin_factories_and_lists(value: Any, allocations: int | None):
    """Kin: `torch.zeros`, `torch.tensor([…])` in the step; each counted as what it costs a replay."""
    manager = captured(lambda inputs: {"y": inputs["x"] * value(inputs["x"])})
    if allocations is not None:
        assert manager.report.census.allocations == allocations
    assert torch.equal(run(manager), floats(3) * value(floats(3)))
    assert torch.equal(run(manager, seed=1), floats(3, 1) * value(floats(3, 1)))


def test_15_kin_a_constant_that_the_step_writes_into():
    """Kin: a constant that the step writes into: each replay starts from its first contents."""

    def step(inputs: Any) -> Any:
        total = torch.tensor([1.0, 2.0, 3.0])
        total.add_(inputs["x"][0])
        return {"y": inputs["x"] * 0 + total}

    manager = captured(step, rows_mix=True)
    for seed in (0, 1, 2):
        want = torch.tensor([1.0, 2.0, 3.0]) + floats(3, seed)[0]
        assert torch.equal(run(manager, seed=seed), want.expand(3, WIDTH))


# -- 16 ------------------------------------------------------------------------------------------


def test_16_no_collection_runs_while_recording():
    """Elsewhere: a garbage collection in the middle of a capture broke it, and many made it slow.
    Here: held during capture, restored after, also after a failure."""
    during: list[bool] = []
    collections: list[str] = []
    watch = lambda phase, info: collections.append(phase)  # noqa: E731

    def step(inputs: Any) -> Any:
        during.append(gc.isenabled())
        gc.callbacks.append(watch)
        try:
            junk = [[None, index] for index in range(3000)]  # enough to set off a collection
            for cell in junk:
                cell[0] = cell
        finally:
            gc.callbacks.remove(watch)
        return double(inputs)

    captured(step)
    assert set(during) == {False}
    assert collections == []
    assert gc.isenabled()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, MemoryError, SystemExit])
def test_16_kin_after_any_failure(error: type[BaseException]):
    """Kin: after Ctrl-C, an exception, out of memory, an exit."""
    frozen = gc.get_freeze_count()

    def explode(x: torch.Tensor) -> None:
        raise error

    with pytest.raises((error, CaptureError)):
        manager_of(doing(explode), settings=STRICT).capture()
    assert gc.isenabled()
    # conftest.py freezes what the session has loaded. Frozen objects may still die one by one, so
    # the count can fall a little; a call of `unfreeze` empties it and one of `freeze` raises it.
    assert 0 < gc.get_freeze_count() <= frozen


@pytest.mark.parametrize("enabled", [False, True])
def test_16_kin_a_user_who_has_switched_it_off(enabled: bool):
    """Kin: a user, or a step, that switches collections on or off itself."""
    if not enabled:
        gc.disable()
    try:
        captured()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    captured(lambda inputs: (gc.enable(), double(inputs))[1])
    assert gc.isenabled()


# -- 17 ------------------------------------------------------------------------------------------


def out_of_memory(seen: list[Any]) -> Callable[[torch.Tensor], None]:
    def allocate(x: torch.Tensor) -> None:
        held = torch.zeros(1 << 20)
        seen.append(weakref.ref(held))
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    return allocate


def test_17_kin_out_of_memory_in_the_middle_bucket():
    """Kin: an allocation that fails in the middle bucket, while warming up or recording: what the attempt
    held is free again."""
    seen: list[Any] = []
    manager = manager_of(doing(out_of_memory(seen)), buckets=(1, 2))
    failures = manager.capture().failures
    assert set(failures) == {2}
    assert "Tried to allocate 2.00 GiB" in failures[2]
    assert seen
    assert all(held() is None for held in seen)
    for rows in (1, 3, 4):
        assert torch.equal(run(manager, rows), floats(rows) * 2)


@pytest.mark.parametrize("at", range(1, 7))
def test_17_kin_at_any_run_of_the_step(at: int):
    """Kin: at any run of the step: it costs one bucket at most, and what is served is right."""
    runs = [0]

    def step(inputs: Any) -> Any:
        runs[0] += 1
        if runs[0] == at:
            raise MemoryError("no memory for the step")
        return double(inputs)

    manager = manager_of(step, buckets=(1, 2))
    failures = manager.capture().failures
    assert len(failures) == 1
    assert "no memory for the step" in next(iter(failures.values()))
    for rows in (1, 2, 3):
        assert torch.equal(run(manager, rows), floats(rows) * 2)


# -- 18 ------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x + 1, 0.5),
    "sampling": lambda x: torch.multinomial(torch.ones(x.shape[0], 500), 1).float(),
    "rand_like": torch.rand_like,
    "randint": lambda x: torch.randint(1 << 30, (x.shape[0], 1)).float(),
    "randperm": lambda x: torch.randperm(500)[:WIDTH].float(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "normal": lambda x: torch.normal(x, 1.0),
    "attention": lambda x: F.scaled_dot_product_attention(
        *[torch.ones(1, 9, 8)] * 3, dropout_p=0.5
    ).sum((0, 1))[:WIDTH],
}


def advances_and_reproduces(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def step(inputs: Any) -> Any:
        return {"y": inputs["x"] * 0 + draw(inputs["x"])}

    manager = captured(step, rows_mix=True)
    x = floats(4)
    torch.manual_seed(5)
    first, second = (manager.run({"x": x})["y"].clone() for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(manager.run()["y"], first)
    torch.manual_seed(5)
    assert torch.equal(step({"x": x})["y"], first)


@pytest.mark.parametrize("what", ["dropout", "sampling"])
def test_18_random_numbers_advance(what: str):
    """Elsewhere: dropout and sampling repeated the recorded draw at every replay.
    Here: each replay draws anew, and a seed gives what the eager step gives."""
    advances_and_reproduces(DRAWS[what])


@pytest.mark.parametrize("what", DRAWS)
def test_18_kin_other_draws(what: str):
    """Kin: `rand_like`, `randperm`, `exponential_`, Gumbel noise, dropout inside attention."""
    advances_and_reproduces(DRAWS[what])


def test_18_kin_a_generator_of_the_steps_own():
    """Kin: a generator of the step's own: listed in `state=` it advances, otherwise verification refuses
    it."""
    generator = torch.Generator().manual_seed(3)

    def step(inputs: Any) -> Any:
        return {"y": inputs["x"] * 0 + torch.rand(WIDTH, generator=generator)}

    failures = manager_of(step).capture().failures
    assert set(failures) == {2, 4}
    assert "state=" in failures[4]
    generator.manual_seed(3)
    manager = captured(step, state=[generator])
    drawn = [run(manager)[0].clone() for _ in range(2)]
    same = torch.Generator().manual_seed(3)
    assert all(torch.equal(one, torch.rand(WIDTH, generator=same)) for one in drawn)


def fork_and_draw(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.rand(WIDTH)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: (torch.manual_seed(0), torch.rand(WIDTH))[1],
        fork_and_draw,
        lambda x: torch.rand(WIDTH, generator=torch.Generator().manual_seed(3)),
        lambda x: random.random(),
        lambda x: float(np.random.rand()),
        lambda x: time.perf_counter_ns() % 1_000_003 * 1e-6,
        lambda x: torch.from_numpy(np.random.rand(WIDTH).astype("f")),
    ],
    ids=["seeds", "fork_rng", "new generator", "random", "numpy", "clock", "numpy tensor"],
)
def test_18_kin_random_numbers_of_the_host(draw: Callable[[torch.Tensor], Any]):
    """Kin: seeding inside the step, Python's and numpy's numbers, the clock: refused by verification."""
    failures = manager_of(lambda inputs: {"y": inputs["x"] + draw(inputs["x"])}).capture().failures
    assert set(failures) == {2, 4}
    assert "differs from the eager step" in failures[4]


# -- 19 ------------------------------------------------------------------------------------------


def test_19_calls_out_of_order_have_a_defined_answer():
    """Elsewhere: recording inside recording, two threads, `capture()` twice, `run()` before it or
    `close()` twice crashed or gave another's results.
    Here: an error that says what to do; closing twice is fine."""
    manager = manager_of()
    with pytest.raises(StateError, match="is new; call capture"):
        run(manager)
    manager.capture()
    with pytest.raises(StateError, match="captures once"):
        manager.capture()
    assert torch.equal(run(manager), floats(3) * 2)
    manager.close()
    manager.close()
    for call in (lambda: run(manager), manager.capture):
        with pytest.raises(StateError, match="closed"):
            call()


@pytest.mark.parametrize("call", ["run", "capture", "close"])
def test_19_kin_a_step_that_calls_a_manager(call: str):
    """Kin: a step that calls `run`, `capture` or `close` of its own or of another manager."""
    managers = {"other": captured()}
    refused: list[str] = []

    def step(inputs: Any) -> Any:
        for manager in managers.values():
            try:
                run(manager) if call == "run" else getattr(manager, call)()
            except StateError as error:
                refused.append(str(error))
        return double(inputs)

    managers["own"] = manager_of(step)
    assert not managers["own"].capture().failures
    assert any("in use, by another thread or by its own step" in text for text in refused)
    assert sum("do not nest" in text for text in refused) == 4  # two recordings, two managers
    refused.clear()
    run(managers["own"], 9)
    assert "in use" in refused[-1]
    if call != "close":  # it was closed while the other was warmed up, which is no recording
        assert torch.equal(run(managers["other"]), floats(3) * 2)


def test_19_kin_a_second_thread_while_a_step_runs():
    """Kin: a second thread while a step runs, or many threads at once."""
    inside, leave = threading.Event(), threading.Event()

    def step(inputs: Any) -> Any:
        if inputs["x"].shape[0] == 9:
            inside.set()
            leave.wait(30)
        return double(inputs)

    manager = captured(step)
    thread = threading.Thread(target=lambda: run(manager, 9))
    thread.start()
    assert inside.wait(30)
    try:
        for call in (lambda: run(manager), lambda: manager.run(), manager.capture, manager.close):
            with pytest.raises(StateError, match="in use, by another thread"):
                call()
    finally:
        leave.set()
        thread.join(30)
    assert torch.equal(run(manager), floats(3) * 2)


def test_19_kin_many_threads_at_once():
    """Kin: many threads at once: each call is served alone or refused."""
    manager = captured()
    served, others = [0] * 4, []

    def work(number: int) -> None:
        for _ in range(100):
            try:
                run(manager, 4, number)
                served[number] += 1
            except StateError:
                pass
            except Exception as error:
                others.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert others == []
    assert manager.stats().replays == sum(served) > 0
    assert torch.equal(run(manager), floats(3) * 2)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("what", ["manager", "recording"])
def test_19_kin_copies_and_pickles(how: Callable[[Any], Any], what: str):
    """Kin: a copy, a deep copy or a pickle of a manager, or of a recording."""
    manager = captured()
    with pytest.raises(StateError, match=f"a {what} cannot be copied or pickled.*capture again"):
        how(manager if what == "manager" else manager.recording(4))
    assert torch.equal(run(manager), floats(3) * 2)


@pytest.mark.parametrize("at", range(1, 6))
def test_19_kin_an_interrupted_capture(at: int):
    """Kin: Ctrl-C anywhere in a capture, which can then be made again."""
    runs = [0]

    def step(inputs: Any) -> Any:
        runs[0] += 1
        if runs[0] == at:
            raise KeyboardInterrupt
        return double(inputs)

    manager = manager_of(step)
    manager.inputs["x"].fill_(7)
    with pytest.raises(KeyboardInterrupt):
        manager.capture()
    assert manager.state == "new"
    assert (manager.inputs["x"] == 7).all()
    assert not manager.capture().failures
    assert torch.equal(run(manager), floats(3) * 2)


def test_19_kin_an_eager_step_that_fails_half_way():
    """Kin: an eager step that fails after it wrote into its slots."""
    armed = [False]
    pool = BufferPool(CPU)

    def step(inputs: Any) -> Any:
        out = pool.take("out", tuple(inputs["x"].shape), torch.float32)
        inputs["x"].add_(1)
        if armed[0]:
            raise ValueError("half way")
        torch.mul(inputs["x"], 2, out=out)
        return {"y": out}

    manager = captured(step, pool=pool)
    armed[0] = True
    with pytest.raises(ValueError, match="half way"):
        run(manager, 9)
    before = manager.stats()
    assert before.fallbacks == {}
    armed[0] = False
    assert torch.equal(run(manager), (floats(3) + 1) * 2)
    assert torch.equal(run(manager, 9), (floats(9) + 1) * 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_19_kin_a_forked_process():
    """Kin: a forked process, which on a CPU has recordings of its own."""
    manager = captured()
    run(manager)
    child = os.fork()
    if child == 0:
        right = torch.equal(run(manager, seed=1), floats(3, 1) * 2)
        os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(run(manager), floats(3) * 2)


@pytest.mark.parametrize("where", ["capture", "run"])
@pytest.mark.parametrize("mode", ["grad", "inference", "autocast", "deterministic", "float64"])
def test_19_kin_other_modes_of_torch(mode: str, where: str):
    """Kin: gradients, inference mode, autocast, deterministic mode, another default dtype around
    `capture()` or around `run()`."""
    weight = torch.nn.Parameter(torch.eye(WIDTH) * 2)
    manager = manager_of(lambda inputs: {"y": inputs["x"] @ weight})
    with _Mode(mode if where == "capture" else ""):
        assert not manager.capture().failures
    x = floats(3).round()
    with _Mode(mode if where == "run" else ""):
        out = manager.run({"x": x})["y"]
    assert not out.requires_grad
    assert torch.equal(out.float(), x * 2)


class _Mode:
    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.inner = {
            "grad": torch.enable_grad,
            "inference": torch.inference_mode,
            "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        }.get(mode, torch.no_grad)()

    def __enter__(self) -> None:
        self.inner.__enter__()
        torch.use_deterministic_algorithms(self.mode == "deterministic")
        torch.set_default_dtype(torch.float64 if self.mode == "float64" else torch.float32)

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        self.inner.__exit__(*error)
