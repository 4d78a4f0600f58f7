"""The first operation whose result differs is named, or it is said why none can be."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from toy import CPU, WIDTH, Inputs, double, floats, manager_of, moe_manager

from graphcap import narrowing
from graphcap.operations import operation
from graphcap.recorders.base import Recorder
from graphcap.recorders.tape import TapeRecorder
from graphcap.recorders.witness import StepWitness

HERE = re.escape(__file__)


def failure_of(step: Callable[..., Any], size: int = 4, **options: Any) -> str:
    failures = manager_of(step, **options).capture().failures
    assert set(failures) == {2, 4}
    assert f"bucket {size} with" in failures[size]
    assert "differs from the eager step" in failures[size]  # what was found stands first
    return failures[size]


class Drifting:
    """`stages` like operations; the one at `at` uses a number that the host changes at each run."""

    def __init__(self, stages: int, at: int) -> None:
        self.stages, self.at, self.runs = stages, at, 0

    def __call__(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        self.runs += 1
        x = inputs["x"]
        for stage in range(self.stages):
            x = x + (self.runs if stage == self.at else 1)
        return {"y": x * 1}


@pytest.mark.parametrize("at", [0, 1, 7, 19])
def test_the_operation_is_named_with_its_line_and_turn(at: int):
    text = failure_of(Drifting(20, at))
    # Before it there is the padding that every recording begins with.
    where = rf"aten\.add\.Tensor at {HERE}:\d+ \(__call__\) \(operation {at + 2} of 23"
    turn = rf", at run {at + 1} of this line" if at else ""
    assert re.search(f"the first operation whose result differs is {where}{turn}, after ", text)
    assert "it differs as well between two eager runs of the step from the same inputs" in text


@pytest.mark.parametrize("budget", [1, 100, 2**20])
def test_what_does_not_fit_the_budget_takes_more_recordings(
    budget: int, monkeypatch: pytest.MonkeyPatch
):
    """4 rows of 3 floats are 48 bytes, 2 rows 24: two and four results in 100 bytes. The first operation is
    padding, with the whole slot arena."""
    recordings = 0
    record = TapeRecorder.record

    def counted(self: Any, *args: Any) -> Any:
        nonlocal recordings
        recordings += 1
        return record(self, *args)

    def sentence(recorder: Recorder, put: Any, known: Any) -> narrowing.Narrowing:
        return narrowing.Narrowing(recorder, put, known, budget, 20)

    monkeypatch.setattr("graphcap.verify.Narrowing", sentence)
    monkeypatch.setattr(TapeRecorder, "record", counted)
    text = failure_of(Drifting(12, 9), buckets=(2,))
    assert "(operation 11 of 15" in text
    assert recordings == 2 + {1: 11 + 11, 100: 6 + 4, 2**20: 1 + 1}[budget]


def test_the_search_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "graphcap.verify.Narrowing",
        lambda recorder, put, known: narrowing.Narrowing(recorder, put, known, 1, 3),
    )
    text = failure_of(Drifting(12, 9))
    assert (
        "none of the first 3 of 15 differs, and the search ended there, after 3 recordings" in text
    )
    monkeypatch.setattr(narrowing, "MOST_SECONDS", -1.0)
    assert "of 15 differs, and the search ended there, after 1 recordings" in failure_of(
        Drifting(12, 9)
    )


def test_an_operation_of_the_kernel_layer_is_named():
    runs = [0]

    @operation("scaled_copy", "by hand")
    def scaled_copy(source: torch.Tensor, out: torch.Tensor, by: int) -> None:
        torch.mul(source, by, out=out)

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        runs[0] += 1
        out = torch.empty(inputs["x"].shape)
        scaled_copy(inputs["x"] + 1, out, runs[0])
        return {"y": out + 1}

    text = failure_of(step)
    assert re.search(rf"result differs is scaled_copy \(by hand\) at {HERE}:\d+ \(step\)", text)
    assert re.search(r"\(operation 3 of 5, after aten\.add\.Tensor at ", text)


def test_an_operation_between_layers_on_the_pool_is_named():
    """What padding and unwritten parts of the pool hold differs from run to run and is not blamed."""
    step, manager = moe_manager()
    runs = [0]
    inner = step.layers[1]

    def scaled(state: torch.Tensor, row_ids: torch.Tensor, out: torch.Tensor) -> None:
        inner(state, row_ids, out=out)
        runs[0] += 1
        out.mul_(runs[0])

    step.layers[1] = scaled  # type: ignore[call-overload]
    failures = manager.capture().failures
    assert set(failures) == {1, 2, 4, 8}
    for text in failures.values():
        assert re.search(
            rf"result differs is aten\.mul_\.Tensor at {HERE}:\d+ \(scaled\) \(operation \d+ of \d+, "
            rf"after merge \(torch\) at ",
            text,
        )


def test_another_way_through_the_step_is_told():
    runs = [0]

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        runs[0] += 1
        x = inputs["x"] + 1
        return {"y": x.sin() if runs[0] % 2 else x.cos()}

    # Rows mix: each check runs the step once, without a run that has no padding.
    text = failure_of(step, rows_mix=True)
    assert re.search(
        r"the step took another way: its operation 3 was aten\.(sin|cos)\.default at .* when it was "
        r"recorded, and is aten\.(cos|sin)\.default at .* when it runs again",
        text,
    )


def test_a_step_that_ends_early_is_told():
    runs = [0]

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        runs[0] += 1
        x = inputs["x"] + 1
        for _ in range(runs[0]):
            x = x * 3
        return {"y": x}

    assert "the step took another way: its operation" in failure_of(step)


def test_a_tensor_that_the_step_changes_and_reads_is_named_instead():
    memory = torch.zeros(4, WIDTH)

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        rows = inputs["x"].shape[0]
        out = memory[:rows] + inputs["x"]
        memory[:rows].add_(1)
        return {"y": out}

    text = failure_of(step)
    assert re.search(
        r"it equals the eager step once \S*step\.memory is put back, which the step", text
    )
    assert not manager_of(step, state=[memory]).capture().failures


class BreaksFirst(TapeRecorder):
    """The recording that is held against eager lacks an operation; those made to look for it do not."""

    def __init__(self, lacks: int) -> None:
        super().__init__(CPU)
        self.lacks = lacks
        self.sizes: set[int] = set()

    def record(self, step: Any, bucket: int) -> Any:
        recording = super().record(step, bucket)
        if bucket not in self.sizes:
            calls = list(recording._entries or ())
            del calls[self.lacks]
            recording._entries = tuple(calls)
            self.sizes.add(bucket)
        return recording


def test_where_recording_again_cures_it_that_is_said():
    text = failure_of(lambda i: {"y": i["x"] * 2 + 1}, recorder=BreaksFirst(1))
    assert (
        "recorded once more, with memory that the step leaves unwritten filled, it differs in no"
        in text
    )


class Breaks(TapeRecorder):
    """In every recording the first addition is one too many."""

    def record(self, step: Any, bucket: int) -> Any:
        recording = super().record(step, bucket)
        calls = list(recording._entries or ())
        index = recording._names.index("aten.add.Tensor")
        right: Any = calls[index]

        def wrong() -> None:
            right()
            right.keywords["out"].add_(1)

        calls[index] = wrong
        recording._entries = tuple(calls)
        return recording


def test_a_recording_that_computes_otherwise_is_told_from_a_step_that_does():
    text = failure_of(lambda i: {"y": (i["x"] * 2 + 1).tanh() + i["x"]}, recorder=Breaks(CPU))
    assert "the first operation whose result differs is aten.add.Tensor at" in text
    assert "(operation 3 of 6, after aten.mul.Tensor at" in text
    assert "two eager runs" not in text


class Refuses(TapeRecorder):
    """Records each bucket once."""

    def __init__(self, error: Exception) -> None:
        super().__init__(CPU)
        self.error = error
        self.sizes: set[int] = set()

    def record(self, step: Any, bucket: int) -> Any:
        if bucket in self.sizes:
            raise self.error
        self.sizes.add(bucket)
        return super().record(step, bucket)


@pytest.mark.parametrize("error", [RuntimeError("no memory left"), ValueError()])
def test_what_goes_wrong_while_looking_hides_nothing(error: Exception):
    text = failure_of(Drifting(3, 1), recorder=Refuses(error))
    assert f"looking for it ended with {type(error).__name__}: {error}" in text


def test_an_interrupt_while_looking_is_one():
    with pytest.raises(KeyboardInterrupt):
        manager_of(Drifting(3, 1), recorder=Refuses(KeyboardInterrupt())).capture()  # type: ignore[arg-type]


def test_nothing_is_left_behind_by_the_search():
    """Slots, state and generators are as before, and the next capture is a capture like any other."""
    counter, generator = torch.zeros(1), torch.Generator().manual_seed(2)
    drifts = [True]
    runs = [0]

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        runs[0] += 1
        counter.add_(1)
        inputs["x"].add_(1)
        noise = torch.rand(WIDTH, generator=generator)
        return {"y": inputs["x"] * (runs[0] if drifts[0] else 2) + noise * counter}

    manager = manager_of(step, state=[counter, generator])
    manager.inputs["x"].fill_(5)
    states = torch.get_rng_state(), generator.get_state()
    assert set(manager.capture().failures) == {2, 4}
    assert counter.item() == 0
    assert (manager.inputs["x"] == 5).all()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])
    drifts[0] = False
    again = manager_of(step, state=[counter, generator])
    assert not again.capture().failures


# -- the witness alone ---------------------------------------------------------------------------


def test_witness_keeps_what_operations_write_and_changes_nothing():
    def step() -> dict[str, torch.Tensor]:
        x = torch.arange(6.0).view(2, 3)
        y = torch.empty(2, 3)
        y[:, :2] = x[:, :2] * 2
        x.add_(1)
        return {"x": x, "y": y[:, :2], "z": y.neg()[:, :2]}

    witness = StepWitness(0, 2**20, ())
    found = witness.around(step)()
    plain = step()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    named = {seen.name: seen for seen in witness.seen}
    assert torch.equal(named["aten.add_.Tensor"].results[0], plain["x"])
    assert torch.equal(named["output 'y'"].results[0], plain["y"])
    assert all(seen.line.startswith(__file__) for seen in witness.seen if seen.line)
    assert witness.end == len(witness.seen)
    (flipped,) = (seen.results[0] for seen in witness.seen if seen.name == "aten.neg.default")
    assert flipped[:, 2].isnan().all()  # where nothing was written: else whatever lay there
    assert not any("empty" in seen.name or "view" in seen.name for seen in witness.seen)


@pytest.mark.parametrize("inference", [False, True])
def test_witness_records_on_the_tape_what_the_step_alone_does(inference: bool):
    x = floats(4)
    weight = torch.eye(WIDTH)

    def linear() -> dict[str, torch.Tensor]:
        return {"y": torch.nn.functional.linear(x, weight).softmax(-1)}

    with torch.inference_mode(inference):
        witness = StepWitness(0, 2**20, ())
        recording = TapeRecorder(CPU).record(witness.around(linear), 4)
        x.copy_(floats(4, seed=9))
        recording.replay()
        expected = linear()["y"]
    assert torch.equal(recording.outputs["y"], expected)
    assert torch.equal(witness.seen[-1].results[0], expected)
    assert torch.equal(witness.seen[-2].results[0], expected)


def test_a_right_step_is_not_narrowed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("graphcap.verify.Narrowing", None)
    assert not manager_of(double).capture().failures
