"""Where lint says "at batch … only": only of what it looked for at other batches and did not find there."""

from __future__ import annotations

from typing import Any

import lint_steps
import pytest
import torch

from graphcap.cli.lint_view import print_lint
from graphcap.errors import InputError
from graphcap.lint.run import lint_step

X = {"x": torch.ones(8, 4)}


def said(capsys: pytest.CaptureFixture[str], step: Any) -> tuple[Any, str]:
    report = lint_step(step, X)
    assert report.batches == (8, 4, 2, 1)
    print_lint(report)
    return report, capsys.readouterr().out


def test_what_is_found_at_some_batches_only_is_said_to_be(capsys):
    def step(inputs: Any) -> Any:
        x = inputs["x"]
        if x.shape[0] <= 2:
            x.sum().item()
        return {"y": x * 2}

    report, text = said(capsys, step)
    (found,) = (f for f in report.findings if f.kind == "host read")
    assert sorted(found.batches) == [1, 2]
    assert "at batch 2, 1 only" in text


@pytest.mark.parametrize(
    "make", [lint_steps.Rebinding, lint_steps.Counter, lint_steps.Growing, lint_steps.Carried]
)
def test_what_two_runs_of_the_largest_tell_is_of_no_batch(capsys, make):
    """The second run is made at the largest batch alone."""
    report, text = said(capsys, make())
    assert any(f.batches == (8,) for f in report.findings), "found at the largest, nowhere else"
    assert "only" not in text


def test_what_is_found_before_the_step_stops_is_of_no_batch(capsys):
    """No other batch was run."""

    def step(inputs: Any) -> Any:
        inputs["x"].sum().item()
        raise ValueError("at every batch")

    report, text = said(capsys, step)
    assert report.stopped
    assert {f.batches for f in report.findings} == {(8,)}
    assert "only" not in text


def test_a_batch_that_could_not_be_run_is_not_one_where_nothing_was_found(capsys):
    def step(inputs: Any) -> Any:
        x = inputs["x"]
        if x.shape[0] == 2:
            raise ValueError("not of two")
        x.sum().item()
        return {"y": x * 2}

    report, text = said(capsys, step)
    (read,) = (f for f in report.findings if f.kind == "host read")
    assert read.batches == (8, 4, 1)
    assert text.count("only") == 1
    assert "(at batch 2 only)" in text  # the error


def test_outputs_that_are_refused_are_told_once_and_of_no_batch(capsys):
    report, text = said(capsys, lambda inputs: {"y": inputs["x"].sum()})
    (found,) = (f for f in report.findings if f.kind == "outputs")
    assert found.batches == (8,)
    assert "only" not in text


def test_outputs_that_are_right_at_the_largest_alone_are(capsys):
    """Found at 4 and not looked for below."""
    report, text = said(capsys, lambda inputs: {"y": torch.ones(8) * inputs["x"].sum()})
    (found,) = (f for f in report.findings if f.kind == "outputs")
    assert found.batches == (4,)
    assert "(at batch 4 and not 8)" in text


@pytest.mark.parametrize("batches", [[], [0], [5], [2.0], ["2"], [True], [2, None]])
def test_batches_that_are_no_sizes_of_the_inputs_are_refused(batches):
    with pytest.raises(InputError, match="batches: expected sizes from 1 to 4"):
        lint_step(lambda inputs: {"y": inputs["x"] * 2}, {"x": torch.ones(4, 2)}, batches=batches)
