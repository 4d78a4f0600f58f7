"""The life of a manager, its fallbacks and what it tells of them."""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import CPU, WIDTH, Inputs, double, floats, manager_of

from graphcap.buckets import BucketLadder
from graphcap.errors import (
    CaptureError,
    FallbackError,
    InputError,
    LadderError,
    PoolLimitError,
    StaleRecordingError,
    StateError,
    VerificationError,
)
from graphcap.inputs import NUM_ROWS, PadPolicy, Slot, StaticInputs
from graphcap.manager import CaptureManager
from graphcap.pool import BufferPool
from graphcap.recorders.tape import TapeRecorder
from graphcap.settings import Settings

F32 = torch.float32
OFF = Settings(verify="off")


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "graphcap")
    return lambda: [record.getMessage() for record in caplog.records]


def captured(step: Callable[..., Any] = double, **options: Any) -> CaptureManager:
    manager = manager_of(step, **options)
    manager.capture()
    return manager


def run(manager: CaptureManager, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return manager.run({"x": x}, **options)["y"]


# -- life ----------------------------------------------------------------------------------------


def test_life_from_new_to_closed():
    manager = manager_of()
    assert manager.state == "new"
    for question in (lambda: manager.report, lambda: manager.recording(4)):
        with pytest.raises(StateError):
            question()
    with pytest.raises(StateError, match="new; call capture"):
        run(manager, floats(1))
    report = manager.capture()
    assert manager.state == "recorded"
    assert manager.report is report
    assert [bucket.size for bucket in report.buckets] == [2, 4]
    with pytest.raises(StateError, match="captures once"):
        manager.capture()
    out = run(manager, floats(3))
    manager.close()
    manager.close()
    assert manager.state == "closed"
    assert torch.equal(out, floats(3) * 2)  # outputs of earlier runs stay readable
    with pytest.raises(StateError, match="closed; make a new one"):
        run(manager, floats(1))
    with pytest.raises(StateError, match="closed"):
        manager.capture()


def test_close_before_capture_and_as_a_context():
    manager = manager_of()
    manager.close()
    with pytest.raises(StateError, match="closed"):
        manager.capture()
    with captured() as inner:
        recording = inner.recording(4)
    assert inner.state == "closed"
    with pytest.raises(StateError, match="closed"):
        recording.replay()


def test_every_batch_equals_eager():
    manager = captured(max_batch=9, buckets=(1, 2, 4))
    for rows in (1, 2, 3, 4, 5, 9, 8, 1):
        x = floats(rows, seed=rows)
        assert torch.equal(run(manager, x), x * 2)
    stats = manager.stats()
    assert stats.steps == stats.replays == 8
    assert stats.fallbacks == {}
    assert stats.rows == 33
    assert {b.size: (b.replays, b.padding_rows) for b in stats.buckets} == {
        1: (2, 0),
        2: (1, 0),
        4: (2, 1),
        9: (3, 5),
    }
    assert stats.padding_rows == 6
    assert stats.state == "recorded"


def test_step_is_not_called_at_replay():
    runs = []
    manager = captured(lambda inputs: (runs.append(1), double(inputs))[1])
    before = len(runs)
    for _ in range(5):
        run(manager, floats(3))
    assert len(runs) == before


def test_run_without_a_batch_is_one_replay_and_no_input_launch():
    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        inputs["x"].add_(1)
        return {"y": inputs["x"] * 1}

    manager = captured(step)
    run(manager, torch.zeros(3, WIDTH))
    before = manager.stats()
    assert (manager.run()["y"] == 2).all()
    assert (manager.run()["y"] == 3).all()
    after = manager.stats()
    assert after.input_launches == before.input_launches
    assert after.replays == before.replays + 2
    assert after.rows == before.rows + 6


def test_run_before_any_batch_says_so():
    with pytest.raises(InputError, match="at least one row"):
        captured().run()


def test_smaller_batch_by_rows_alone():
    manager = captured()
    run(manager, floats(4))
    assert torch.equal(manager.run(rows=2)["y"], floats(4)[:2] * 2)
    with pytest.raises(InputError, match="leaves out"):
        manager.run(rows=3)


def test_partial_batches_keep_the_other_slots_and_growth_needs_all():
    slots = {"a": Slot((), F32), "b": Slot((), F32)}
    manager = captured(lambda inputs: {"y": inputs["a"] + inputs["b"]}, slots=slots)
    manager.run({"a": torch.ones(2), "b": torch.full((2,), 10.0)})
    assert manager.run({"a": torch.zeros(2)})["y"].tolist() == [10, 10]
    with pytest.raises(InputError, match=r"follows one of 2 and leaves out slot\(s\) b"):
        manager.run({"a": torch.zeros(3)})
    assert manager.run()["y"].tolist() == [10, 10]
    assert manager.run({"a": torch.ones(3), "b": torch.zeros(3)})["y"].tolist() == [1, 1, 1]


def test_bad_batch_launches_nothing():
    manager = captured()
    run(manager, floats(2))
    before = (manager.inputs.arena.clone(), manager.stats())
    for bad in (
        {"z": floats(2)},
        {"x": floats(2, width=9)},
        {"x": floats(2).double()},
        {"x": floats(0)},
    ):
        with pytest.raises(InputError):
            manager.run(bad)
    assert torch.equal(manager.inputs.arena, before[0])
    assert manager.stats() == before[1]


def test_num_rows_is_what_a_step_can_read():
    manager = captured(lambda inputs: {"y": inputs["x"] * 0 + inputs[NUM_ROWS]}, settings=OFF)
    assert (run(manager, floats(3)) == 3).all()
    assert (run(manager, floats(1)) == 1).all()


def test_rows_can_be_moved_up_when_a_sequence_ends():
    manager = captured()
    run(manager, floats(4))
    assert torch.equal(run(manager, manager.inputs["x"][1:4]), floats(4)[1:] * 2)


def test_an_output_can_be_the_next_input():
    manager = captured()
    out = run(manager, floats(3))
    for _ in range(3):
        out = run(manager, out)
    assert torch.equal(out, floats(3) * 16)


# -- buckets -------------------------------------------------------------------------------------


def test_ladder_comes_from_the_settings_and_ends_at_the_slots():
    inputs = StaticInputs(6, {"x": Slot((), F32)}, CPU)
    manager = CaptureManager(double, inputs, settings=Settings(buckets="1,3,64"))
    assert list(manager.ladder) == [1, 3, 6]
    with pytest.raises(LadderError, match="ends at 8 and the slots have 6"):
        CaptureManager(double, inputs, ladder=BucketLadder([8]), settings=Settings())


def test_agreed_batch_chooses_the_bucket():
    manager = captured()
    assert torch.equal(run(manager, floats(1), agreed_batch=3), floats(1) * 2)
    assert [b.replays for b in manager.stats().buckets] == [0, 1]
    with pytest.raises(InputError, match="agreed_batch is 1 but this rank has 2 rows"):
        run(manager, floats(2), agreed_batch=1)
    # All ranks fall back together.
    assert torch.equal(run(manager, floats(1), agreed_batch=5), floats(1) * 2)
    assert manager.stats().fallbacks == {"above_max_batch": 1}


def test_every_bucket_is_warmed_before_any_is_recorded_and_recorded_from_the_largest():
    class Journal(TapeRecorder):
        def __init__(self) -> None:
            super().__init__(CPU)
            self.entries: list[str] = []

        def warm_up(self, step: Any) -> Any:
            self.entries.append("warm")
            return super().warm_up(step)

        def record(self, step: Any, bucket: int) -> Any:
            self.entries.append(f"record {bucket}")
            return super().record(step, bucket)

    recorder = Journal()
    captured(buckets=(1, 2), recorder=recorder)
    assert recorder.entries == ["warm"] * 3 + ["record 4", "record 2", "record 1"]


def test_smaller_bucket_may_need_the_larger_workspace():
    pool = BufferPool(CPU)

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        rows = inputs["x"].shape[0]
        pool.take("workspace", (1000 if rows == 2 else 10,), F32).fill_(1)
        out = pool.take("out", (rows, WIDTH), F32)
        torch.mul(inputs["x"], inputs["x"], out=out)
        return {"y": out}

    manager = captured(step, pool=pool)
    assert manager.stats().failures == {}
    for rows in (4, 2, 3, 1):
        assert torch.equal(run(manager, floats(rows)), floats(rows) ** 2)


def test_progress_says_up_front_how_much_there_is():
    seen: list[tuple[int, int, str]] = []
    manager_of(buckets=(1, 2)).capture(lambda *entry: seen.append(entry))
    assert [done for done, _, _ in seen] == list(range(10))
    assert {total for _, total, _ in seen} == {9}
    assert seen[0][2] == "warming up bucket 4"


# -- fallbacks -----------------------------------------------------------------------------------


def test_above_the_maximum_runs_eagerly_is_counted_and_logged_once(
    warnings_logged: Callable[[], list[str]],
):
    manager = captured()
    for rows in (5, 9):
        assert torch.equal(run(manager, floats(rows)), floats(rows) * 2)
    assert torch.equal(run(manager, floats(4)), floats(4) * 2)
    stats = manager.stats()
    assert stats.fallbacks == {"above_max_batch": 2}
    assert (stats.steps, stats.replays, stats.rows) == (3, 1, 18)
    (line,) = warnings_logged()
    assert "above_max_batch" in line
    assert "maximum 4" in line
    assert "raise max_batch" in line


def test_step_above_the_maximum_can_advance_itself():
    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        inputs["x"].add_(1)
        return {"y": inputs["x"] * 1}

    manager = captured(step)
    run(manager, torch.ones(4, WIDTH))
    given = torch.zeros(6, WIDTH)
    assert (run(manager, given) == 1).all()
    assert (manager.run()["y"] == 2).all()
    assert manager.run(rows=6)["y"].shape[0] == 6
    assert (given == 0).all()  # the caller's tensor is not the slot
    with pytest.raises(InputError):
        manager.run(rows=3)
    assert (run(manager, given[:2]) == 1).all()
    assert (manager.run()["y"] == 2).all()


def fails_at(bad: int, action: Callable[[torch.Tensor], object]) -> Callable[..., Any]:
    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        if inputs["x"].shape[0] == bad:
            action(inputs["x"])
        return double(inputs)

    return step


def test_bucket_that_cannot_be_recorded_costs_that_bucket_only(
    warnings_logged: Callable[[], list[str]],
):
    manager = manager_of(fails_at(4, lambda x: x.sum().item()), buckets=(1, 2))
    report = manager.capture()
    assert [bucket.size for bucket in report.buckets] == [1, 2]
    assert list(report.failures) == [4]
    for words in (".item()", Path(__file__).name, "keep the value on the device"):
        assert words in report.failures[4]
    for _ in range(3):
        assert torch.equal(run(manager, floats(3)), floats(3) * 2)
    assert torch.equal(run(manager, floats(2)), floats(2) * 2)
    stats = manager.stats()
    assert stats.fallbacks == {"not_recorded": 3}
    assert stats.replays == 1
    assert stats.failures == report.failures
    lines = warnings_logged()
    assert len(lines) == 2  # one from capture(), one from the first step
    assert "1 of 3 buckets (4) are not recorded" in lines[0]
    assert ".item()" in lines[0]


def test_fallback_below_the_maximum_can_advance_itself():
    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        inputs["x"].add_(1)
        if inputs["x"].shape[0] == 2:
            raise_if_recorded(inputs["x"])
        return {"y": inputs["x"] * 1}

    def raise_if_recorded(x: torch.Tensor) -> None:
        x.tolist()

    manager = captured(step)
    # Two rows run eagerly in the slots, then as part of bucket 4.
    assert (run(manager, torch.zeros(2, WIDTH)) == 1).all()
    assert (manager.run()["y"] == 2).all()
    assert (manager.run(agreed_batch=4)["y"] == 3).all()
    assert manager.stats().fallbacks == {"not_recorded": 2}


def test_exception_of_the_step_in_one_bucket(warnings_logged: Callable[[], list[str]]):
    def explode(x: torch.Tensor) -> None:
        raise ValueError("two is a bad number")

    manager = captured(fails_at(2, explode))
    (line,) = warnings_logged()
    assert "ValueError" in line
    assert "two is a bad number" in line
    assert Path(__file__).name in line
    assert torch.equal(run(manager, floats(4)), floats(4) * 2)
    with pytest.raises(ValueError, match="two is a bad number"):
        run(manager, floats(2))
    assert torch.equal(run(manager, floats(4)), floats(4) * 2)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda inputs: {"y": inputs["x"].sum()}, r"'y'.*4 rows.*found \(\)"),
        (lambda inputs: {"y": inputs["x"].t()}, r"'y'.*found \(3, 4\)"),
        (lambda inputs: {"y": None}, "'y'.*NoneType"),
        (lambda inputs: {}, "found an empty one"),
        (lambda inputs: [inputs["x"]], "list"),
        (lambda inputs: inputs["x"], "Tensor"),
        (lambda inputs: None, "NoneType"),
    ],
)
def test_outputs_of_another_kind_are_refused(step: Any, words: str):
    with pytest.raises(CaptureError, match=words):
        captured(step, buckets=(), settings=Settings(strict=True))


# -- strict --------------------------------------------------------------------------------------

STRICT = Settings(strict=True)


def test_strict_makes_fallbacks_errors():
    manager = captured(settings=STRICT)
    with pytest.raises(FallbackError, match=r"above_max_batch.*GRAPHCAP_STRICT=1.*raise max_batch"):
        run(manager, floats(5))
    assert manager.stats().fallbacks == {}
    assert torch.equal(run(manager, floats(4)), floats(4) * 2)


def test_strict_makes_a_failed_bucket_an_error_of_capture():
    manager = manager_of(fails_at(2, lambda x: x.tolist()), settings=STRICT)
    with pytest.raises(CaptureError, match="tolist"):
        manager.capture()
    assert manager.state == "new"


def test_strict_makes_a_difference_an_error_of_capture():
    manager = manager_of(depends_on_a_counter(), settings=STRICT)
    with pytest.raises(VerificationError, match="bucket 4"):
        manager.capture()


# -- what capture() leaves behind ----------------------------------------------------------------


def test_capture_puts_back_slots_state_and_generators():
    counter = torch.zeros(())

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        counter.add_(1)
        noise = torch.rand(inputs["x"].shape)
        inputs["x"].mul_(2)
        return {"y": inputs["x"] + noise + counter}

    manager = manager_of(step, state=[counter])
    manager.inputs.load({"x": floats(3)}, 3)
    slots, generator = manager.inputs.snapshot(), torch.get_rng_state()
    manager.capture()
    assert manager.stats().failures == {}
    assert counter.item() == 0
    assert torch.equal(manager.inputs.arena, slots[0])
    assert manager.inputs.rows == 3
    assert torch.equal(torch.get_rng_state(), generator)
    torch.manual_seed(3)
    first = manager.run()["y"].clone()
    torch.manual_seed(3)
    assert torch.equal(first, floats(3) * 2 + torch.rand(4, WIDTH)[:3] + 1)
    manager.run()
    assert counter.item() == 2


class Interrupt:
    """A step that is interrupted once, at its n-th run."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return double(inputs)


# Two warm-ups, two recordings, one eager run for each of two checks of two buckets.
@pytest.mark.parametrize("at", range(1, 9))
def test_interrupt_at_any_point_leaves_a_manager_that_can_capture_again(at: int):
    import gc

    manager = manager_of(Interrupt(at))
    manager.inputs.load({"x": floats(2)}, 2)
    before = manager.inputs.arena.clone()
    with pytest.raises(KeyboardInterrupt):
        manager.capture()
    assert manager.state == "new"
    assert gc.isenabled()
    assert torch.equal(manager.inputs.arena, before)
    manager.capture()
    assert manager.stats().failures == {}
    assert torch.equal(run(manager, floats(3)), floats(3) * 2)


def test_garbage_collection_is_held_while_recording_and_stays_as_it_was():
    import gc

    seen = []
    captured(lambda inputs: (seen.append(gc.isenabled()), double(inputs))[1])
    assert set(seen) == {False}
    assert gc.isenabled()
    gc.disable()
    try:
        captured()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_pool_limit_is_an_error_and_capture_can_be_tried_again():
    pool = BufferPool(CPU)

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        pool.take("large", (1 << 20,), torch.uint8).zero_()
        return double(inputs)

    manager = manager_of(step, pool=pool, settings=Settings(pool_mib=0.5))
    with pytest.raises(PoolLimitError, match=r"1\.00 MiB.*0\.5 MiB"):
        manager.capture()
    assert manager.state == "new"
    manager.settings = Settings()
    manager.capture()
    assert manager.stats().pool_bytes == 1 << 20


# -- report --------------------------------------------------------------------------------------


def test_report_is_written_where_the_settings_say(tmp_path: Path):
    path = tmp_path / "report.json"
    report = manager_of(fails_at(2, lambda x: x.tolist()), settings=Settings(report=path)).capture()
    read = json.loads(path.read_text())
    assert read == json.loads(json.dumps(report.to_json()))
    assert read["recorder"] == "tape"
    assert [bucket["size"] for bucket in read["buckets"]] == [4]
    assert read["buckets"][0]["largest_difference"] == 0
    assert read["buckets"][0]["nodes"] == read["census"]["total"] == 2
    assert list(read["failures"]) == ["2"]
    assert read["graph_bytes"] == read["buckets"][0]["nbytes"] == 4 * WIDTH * 4
    assert read["versions"]["torch"] == torch.__version__


def test_report_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, warnings_logged: Callable[[], list[str]]
):
    path = tmp_path / "gone" / "report.json"
    manager = captured(settings=Settings(report=path))
    assert torch.equal(run(manager, floats(2)), floats(2) * 2)
    (line,) = warnings_logged()
    assert str(path) in line


def test_allocations_of_a_replay_are_an_error_when_strict():
    with pytest.raises(CaptureError, match=r"1 allocations.*aten\.flip\.default \(1\)"):
        manager_of(lambda i: {"y": i["x"].flip(1)}, settings=Settings(strict=True)).capture()
    manager_of(lambda i: {"y": i["x"] + i["x"]}, settings=Settings(strict=True)).capture()


def test_allocations_of_the_step_are_reported():
    report = manager_of(lambda inputs: {"y": inputs["x"].flip(1)}).capture()
    assert [bucket.allocations for bucket in report.buckets] == [1, 1]
    assert report.census is not None
    assert report.census.allocations == 1


def test_report_says_what_verification_could_not_vary():
    slots = {"x": Slot((WIDTH,), F32), "ids": Slot((), torch.int32)}
    (note,) = manager_of(slots=slots).capture().notes
    assert "ids" in note
    assert "example" in note
    assert manager_of().capture().notes == ()


# -- verification --------------------------------------------------------------------------------


def depends_on_a_counter() -> Callable[..., Any]:
    runs = [0]

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        runs[0] += 1
        return {"y": inputs["x"] * runs[0]}

    return step


def reads_pads(inputs: Inputs) -> dict[str, torch.Tensor]:
    """A maximum over the whole buffer, the real rows and the others: 0 where pads are as declared."""
    return {"y": inputs["x"] + inputs["x"].abs().amax() * 0}


class Remembers:
    """Returns what an earlier step left: wrong from the second replay on."""

    def __init__(self) -> None:
        self.memory = torch.zeros(8, WIDTH)

    def __call__(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        rows = inputs["x"].shape[0]
        out = self.memory[:rows] + inputs["x"]
        self.memory[:rows].copy_(torch.rand(rows, WIDTH))
        return {"y": out}


class Rebinds:
    """Keeps its state in a tensor that is another one after each run."""

    def __init__(self) -> None:
        self.total = torch.zeros(WIDTH)

    def __call__(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        self.total = self.total + 1
        return {"y": inputs["x"] + self.total}


@pytest.mark.parametrize("step", [depends_on_a_counter(), Rebinds(), Remembers()])
def test_hidden_dependencies_are_found(step: Any, warnings_logged: Callable[[], list[str]]):
    manager = captured(step)
    assert set(manager.stats().failures) == {2, 4}
    assert all("differs from the eager step" in text for text in manager.stats().failures.values())
    assert len(warnings_logged()) == 2
    run(manager, floats(2))
    assert manager.stats().fallbacks == {"verification": 1}


def test_hidden_dependency_of_the_state_is_found():
    counter, runs = torch.zeros(()), [0]

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        runs[0] += 1
        counter.add_(runs[0])
        return double(inputs)

    failures = captured(step, state=[counter]).stats().failures
    assert set(failures) == {2, 4}
    assert "state 0" in failures[4]


def test_private_generator_is_found():
    generator = torch.Generator().manual_seed(1)
    failures = (
        captured(
            lambda inputs: {"y": inputs["x"] + torch.rand(inputs["x"].shape, generator=generator)}
        )
        .stats()
        .failures
    )
    assert set(failures) == {2, 4}


class Witness(TapeRecorder):
    """Notes what the replays of verification find, and can lose the entry that restores pads."""

    def __init__(self, manager: Callable[[], CaptureManager], *, loses_pads: bool = False) -> None:
        super().__init__(CPU)
        self.manager = manager
        self.loses_pads = loses_pads
        self.arena: list[bool] = []

    def record(self, step: Any, bucket: int) -> Any:
        recording = super().record(step, bucket)
        right = recording.replay

        def replay() -> None:
            self.arena.append(bool((self.manager().pool.arena == 0xFF).all()))
            right()

        recording.replay = replay  # type: ignore[method-assign]
        if self.loses_pads:
            recording._calls = recording._calls[1:]
        return recording


def test_verified_replays_find_a_pool_of_nan():
    pool = BufferPool(CPU)

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        out = pool.take("out", tuple(inputs["x"].shape), F32)
        torch.mul(inputs["x"], inputs["x"], out=out)
        return {"y": out}

    recorder = Witness(lambda: manager)
    manager = manager_of(step, pool=pool, recorder=recorder)
    manager.capture()
    # 3 and 4 of 4 rows, and 3 with other pads, then three that are only timed; 1 and 2 of 2 likewise.
    assert recorder.arena == ([True] * 3 + [False] * 3) * 2
    assert manager.stats().failures == {}


def test_pads_that_are_not_restored_are_found():
    recorder = Witness(lambda: manager, loses_pads=True)
    manager = manager_of(reads_pads, recorder=recorder)
    failures = manager.capture().failures
    assert set(failures) == {2, 4}
    assert "output 'y' differs" in failures[4]


def test_pads_as_declared_pass_although_the_step_reads_them():
    assert captured(reads_pads).stats().failures == {}


def test_without_verification_nothing_is_checked():
    report = manager_of(depends_on_a_counter(), settings=OFF).capture()
    assert report.failures == {}
    assert [bucket.largest_difference for bucket in report.buckets] == [None, None]


def test_example_varies_what_cannot_be_drawn():
    table = torch.arange(10.0)
    asked = []

    def example(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        asked.append(rows)
        return {"ids": torch.randint(0, 10, (rows,), generator=generator)}

    manager = captured(
        lambda inputs: {"y": table[inputs["ids"]]},
        slots={"ids": Slot((), torch.int64)},
        example=example,
    )
    assert asked == [3, 4, 4, 1, 2, 2]  # fewest and all rows of a bucket, then all to be timed
    assert manager.run({"ids": torch.tensor([7, 3])})["y"].tolist() == [7, 3]


@pytest.mark.parametrize("kind", ["weight", "state", "slot", "expanded", "hidden"])
def test_verification_leaves_memory_that_outputs_lie_in_as_it_was(kind: str):
    weight = torch.arange(4.0 * WIDTH).view(4, WIDTH)

    @functools.cache
    def hidden() -> torch.Tensor:
        return torch.arange(4.0 * WIDTH).view(4, WIDTH)

    memory = hidden()

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        rows = inputs["x"].shape[0]
        other = {
            "weight": weight[:rows],
            "state": weight[:rows],
            "slot": inputs["x"],
            "expanded": weight[0, 0].expand(rows),
            "hidden": hidden()[:rows],
        }[kind]
        return {"y": inputs["x"] * 2, "other": other}

    manager = captured(step, state=[weight] if kind == "state" else [])
    assert manager.stats().failures == {}
    expected = torch.arange(4.0 * WIDTH).view(4, WIDTH)
    assert torch.equal(weight, expected)
    assert torch.equal(memory, expected)
    out = manager.run({"x": floats(3)})
    assert torch.equal(out["y"], floats(3) * 2)
    if kind in ("weight", "state", "hidden"):
        assert torch.equal(out["other"], expected[:3])


def test_state_that_is_an_output_is_carried_on():
    total = torch.zeros(4, WIDTH)

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        rows = inputs["x"].shape[0]
        total[:rows].add_(inputs["x"])
        return {"y": total[:rows]}

    manager = captured(step, state=[total])
    assert manager.stats().failures == {}
    for turn in (1, 2, 3):
        assert (run(manager, torch.ones(2, WIDTH)) == turn).all()


class Corrupting(TapeRecorder):
    """Its recordings give wrong results once `broken` is set."""

    broken = False

    def record(self, step: Any, bucket: int) -> Any:
        recording = super().record(step, bucket)
        right = recording.replay

        def replay() -> None:
            right()
            if self.broken:
                recording.outputs["y"].add_(1)

        recording.replay = replay  # type: ignore[method-assign]
        return recording


def test_every_nth_replay_is_checked():
    recorder = Corrupting(CPU)
    manager = captured(recorder=recorder, settings=Settings(verify_every=3))
    recorder.broken = True
    for _ in range(2):
        assert torch.equal(run(manager, floats(2)), floats(2) * 2 + 1)
    with pytest.raises(VerificationError, match="bucket 2 with 2 rows: output 'y'"):
        run(manager, floats(2))
    recorder.broken = False
    assert torch.equal(run(manager, floats(2)), floats(2) * 2)
    stats = manager.stats()
    assert stats.steps == stats.replays == 3
    assert stats.verified == 1


def test_checked_replays_advance_a_step_once():
    counter = torch.zeros(1)

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        counter.add_(1)
        inputs["x"].add_(1)
        return {"y": inputs["x"] * 1}

    manager = captured(step, state=[counter], settings=Settings(verify_every=2))
    run(manager, torch.zeros(3, WIDTH))
    for turn in (2, 3, 4):
        assert (manager.run()["y"] == turn).all()
    assert counter.item() == 4
    assert manager.stats().verified == 2


def test_kept_result_of_the_step_is_no_stale_weight():
    class Keeps:
        last: Any = None

        def __call__(self, inputs: Inputs) -> dict[str, torch.Tensor]:
            self.last = double(inputs)["y"]
            return {"y": self.last + 1}

    manager = captured(Keeps())
    run(manager, floats(9))  # eager: rebinds it again
    assert torch.equal(run(manager, floats(3)), floats(3) * 2 + 1)


# -- stale recordings ----------------------------------------------------------------------------


def module_step(module: torch.nn.Module) -> Callable[..., Any]:
    return lambda inputs: {"y": module(inputs["x"])}


CHANGES: dict[str, Callable[[torch.nn.Linear], object]] = {
    "rebound": lambda m: setattr(m, "weight", torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))),
    "data swapped": lambda m: setattr(m.weight, "data", torch.zeros(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_stale_weight_is_named_before_anything_is_launched(what: str):
    module = torch.nn.Linear(WIDTH, WIDTH)
    manager = captured(module_step(module))
    expected = run(manager, floats(3)).clone()
    CHANGES[what](module)
    for _ in range(2):
        with pytest.raises(StaleRecordingError, match="weight"):
            run(manager, floats(3, seed=1))
    assert torch.equal(manager.inputs["x"][:3], floats(3))
    assert torch.equal(manager.recording(4).outputs["y"][:3], expected)
    # The cure that the message gives.
    manager.close()
    again = captured(module_step(module))
    assert torch.equal(run(again, floats(3)), module(floats(3)).detach())


def test_rebound_closure_variable_is_named():
    weight = torch.ones(WIDTH)

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        return {"y": inputs["x"] * weight}

    manager = captured(step)
    weight = torch.zeros(WIDTH)
    with pytest.raises(StaleRecordingError, match=r"step\.weight"):
        run(manager, floats(1))


def test_moved_slot_is_named():
    manager = captured()
    manager.inputs.arena.resize_(1 << 16)
    with pytest.raises(StaleRecordingError, match="slot arena"):
        run(manager, floats(1))


def test_bound_method_is_watched():
    class Engine:
        def __init__(self) -> None:
            self.weight = torch.ones(WIDTH)
            self.manager: CaptureManager | None = None

        def step(self, inputs: Inputs) -> dict[str, torch.Tensor]:
            return {"y": inputs["x"] * self.weight}

    engine = Engine()
    engine.manager = captured(engine.step)
    for rows in (2, 5, 3):
        assert torch.equal(run(engine.manager, floats(rows)), floats(rows))
    engine.weight = torch.zeros(WIDTH)
    with pytest.raises(StaleRecordingError, match="weight"):
        run(engine.manager, floats(2))


def test_weights_may_change_in_place():
    module = torch.nn.Linear(WIDTH, WIDTH)
    manager = captured(module_step(module))
    with torch.no_grad():
        module.weight.copy_(torch.eye(WIDTH))
        module.bias.zero_()
    torch.testing.assert_close(run(manager, floats(2)), floats(2))


# -- one caller at a time ------------------------------------------------------------------------


def test_calls_inside_a_recorded_step_are_refused():
    other, new = captured(), manager_of()
    inner: list[Exception] = []

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        for call in (lambda: run(other, floats(1)), new.capture, other.close):
            try:
                call()
            except StateError as error:
                inner.append(error)
        return double(inputs)

    recorder = TapeRecorder(CPU)
    recorder.record(lambda: step({"x": floats(4)}), 4)
    assert len(inner) == 3
    assert all("do not nest" in str(error) for error in inner)
    assert torch.equal(run(other, floats(1)), floats(1) * 2)


def test_step_that_runs_its_own_manager_is_refused():
    holder: list[CaptureManager] = []

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        return {"y": holder[0].run({"x": inputs["x"]})["y"]}

    holder.append(manager_of(step))
    assert all("in use" in text for text in holder[0].capture().failures.values())
    assert set(holder[0].stats().failures) == {2, 4}


@pytest.fixture
def held() -> Iterator[tuple[CaptureManager, threading.Thread, threading.Event]]:
    """A manager inside whose eager step another thread waits."""
    inside, leave = threading.Event(), threading.Event()

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        if inputs["x"].shape[0] == 9:
            inside.set()
            leave.wait(30)
        return double(inputs)

    manager = captured(step)
    thread = threading.Thread(target=lambda: run(manager, floats(9)))
    thread.start()
    assert inside.wait(30)
    yield manager, thread, leave
    leave.set()
    thread.join(30)


def test_second_thread_is_refused_and_harms_nothing(
    held: tuple[CaptureManager, threading.Thread, threading.Event],
):
    manager, thread, leave = held
    for call in (lambda: run(manager, floats(1)), manager.capture, manager.close):
        with pytest.raises(StateError, match="in use, by another thread"):
            call()
    assert manager.stats().state == "recorded"
    leave.set()
    thread.join(30)
    assert torch.equal(run(manager, floats(2)), floats(2) * 2)
    assert manager.stats().fallbacks == {"above_max_batch": 1}


def test_other_thread_may_use_torch_while_a_step_is_recorded():
    """What it does is not recorded."""
    results: list[Any] = []

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        thread = threading.Thread(target=lambda: results.append(torch.ones(3).sum().item()))
        thread.start()
        thread.join()
        return double(inputs)

    manager = captured(step)
    assert manager.stats().failures == {}
    assert set(results) == {3.0}
    assert manager.recording(4).census().total == 2  # pads and the multiplication


# -- modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture_inside", [False, True])
@pytest.mark.parametrize("run_inside", [False, True])
@pytest.mark.parametrize("step_inside", [False, True])
def test_inference_mode_anywhere(capture_inside: bool, run_inside: bool, step_inside: bool):
    pool = BufferPool(CPU)
    weight = torch.eye(WIDTH) * 2
    total = torch.zeros(4, WIDTH)

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        with torch.inference_mode(step_inside or torch.is_inference_mode_enabled()):
            rows = inputs["x"].shape[0]
            out = pool.take("out", (rows, WIDTH), F32)
            torch.mm(inputs["x"], weight, out=out)
            total[:rows].add_(1)
            return {"y": torch.nn.functional.linear(out, weight), "pooled": out}

    with torch.inference_mode(capture_inside):
        manager = captured(step, pool=pool, state=[total], settings=Settings(verify_every=2))
    assert manager.stats().failures == {}
    with torch.inference_mode(run_inside):
        for rows in (3, 2, 4, 5, 1):
            assert torch.equal(run(manager, floats(rows)), floats(rows) * 4)


def test_parameters_that_want_gradients_give_outputs_that_do_not():
    module = torch.nn.Linear(WIDTH, WIDTH)
    manager = captured(module_step(module))
    for rows in (2, 5):
        assert not run(manager, floats(rows)).requires_grad


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float16, torch.float64, torch.bool, torch.uint8, torch.int16],
)
def test_slots_of_any_dtype_are_verified_and_served(dtype: torch.dtype):
    slots = {"x": Slot((5,), dtype, PadPolicy.ONE), "other": Slot((), torch.int64)}
    manager = captured(lambda inputs: {"y": inputs["x"].float() * 2}, slots=slots)
    assert manager.stats().failures == {}
    given = torch.ones(3, 5).to(dtype)
    out = manager.run({"x": given, "other": torch.zeros(3, dtype=torch.int64)})["y"]
    assert (out == 2).all()


# -- what plan reads -----------------------------------------------------------------------------


def test_batches_are_counted_by_their_rows():
    manager = captured(fails_at(2, lambda x: x.tolist()))  # 3 and 4 replay, 1, 2 and 5 run eagerly
    for rows in (3, 1, 3, 5, 4, 2, 3):
        run(manager, floats(rows))
    run(manager, floats(4), agreed_batch=4)
    found = manager.stats()
    assert found.batches == {1: 1, 2: 1, 3: 3, 4: 2, 5: 1}
    assert found.steps == sum(found.batches.values())
    assert found.rows == sum(rows * steps for rows, steps in found.batches.items())
    assert found.padding_rows == 3


def test_report_is_written_again_with_what_was_served(tmp_path: Path):
    path = tmp_path / "report.json"
    manager = captured(settings=Settings(report=path))
    assert "served" not in json.loads(path.read_text())
    for rows in (1, 2, 3, 9):
        run(manager, floats(rows))
    manager.close()
    read = json.loads(path.read_text())
    assert read["served"] == {
        "steps": 4,
        "batches": {"1": 1, "2": 1, "3": 1, "9": 1},
        "buckets": [
            {"size": 2, "replays": 2, "padding_rows": 1},
            {"size": 4, "replays": 1, "padding_rows": 1},
        ],
        "fallbacks": {"above_max_batch": 1},
    }
    assert [bucket["size"] for bucket in read["buckets"]] == [2, 4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    path.write_text("newer")
    manager.close()
    assert path.read_text() == "newer"


def test_a_report_that_cannot_be_written_again_costs_nothing(tmp_path: Path, warnings_logged):
    folder = tmp_path / "folder"
    folder.mkdir()
    manager = captured(settings=Settings(report=folder / "report.json"))
    (folder / "report.json").unlink()
    folder.rmdir()
    manager.close()
    assert manager.state == "closed"
    assert "was not written" in warnings_logged()[0]


def test_replays_are_timed_and_change_nothing():
    counter = torch.zeros(1)
    generator = torch.Generator().manual_seed(5)

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        counter.add_(1)
        inputs["x"].add_(1)
        return {"y": inputs["x"] * counter}

    manager = manager_of(step, state=[counter, generator])
    manager.inputs["x"].fill_(7)
    random, own = torch.get_rng_state(), generator.get_state()
    report = manager.capture()
    assert report.failures == {}
    assert all(bucket.replay_ms > 0 for bucket in report.buckets)
    assert (manager.inputs["x"] == 7).all()
    assert counter.item() == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(generator.get_state(), own)
    assert manager.stats().steps == 0
    assert manager.stats().input_launches == 0


def test_each_timed_replay_starts_from_the_same_inputs():
    """A step that advances its own inputs must not walk out of what they index."""
    table = torch.arange(10.0)

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        out = table[inputs["at"]]
        inputs["at"].add_(1)
        return {"y": out}

    def last(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"at": torch.full((rows,), 9)}

    manager = captured(step, slots={"at": Slot((), torch.int64)}, example=last)
    assert manager.stats().failures == {}


def test_without_verification_nothing_is_timed():
    assert [bucket.replay_ms for bucket in captured(settings=OFF).report.buckets] == [None, None]


def test_a_longer_step_takes_longer():
    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        wide = inputs["x"]
        for _ in range(40 if wide.shape[0] == 4 else 1):
            wide = wide @ torch.eye(WIDTH)
        return {"y": wide}

    few, many = (bucket.replay_ms for bucket in captured(step).report.buckets)
    assert many > few
