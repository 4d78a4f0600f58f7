"""Lint finds each kind of fault at its line, goes on after the first, and raises no false alarm."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import lint_steps
import pytest
import torch
from lint_steps import BAKED, NEEDS_CUDA_TO_TELL, line_of
from toy import custom_op

from graphcap.errors import InputError
from graphcap.inputs import Slot, StaticInputs
from graphcap.lint import stand_ins
from graphcap.lint.finding import BREAKS, INFORMATION, WEAKENS, Finding, LintReport
from graphcap.lint.run import batch_sizes, lint_step
from graphcap.operations import operation
from graphcap.pool import BufferPool
from graphcap.recorders.triton_launches import triton_is_recorded

X = {"x": torch.ones(4, 4)}


def lint_of(function: Any, x: torch.Tensor | None = None, **options: Any) -> LintReport:
    """Of a step that calls `function` with its slot and returns something harmless."""

    def step(inputs: Any) -> Any:
        function(inputs["x"])
        return {"y": inputs["x"] * 2}

    return lint_step(step, {"x": torch.ones(4, 4) if x is None else x}, **options)


def of(report: LintReport, severity: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity == severity]


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def test_a_step_of_one_operation_has_one_finding():
    report = lint_step(lambda inputs: {"y": inputs["x"] * 2}, X)
    found = only(report.findings)
    assert (found.severity, found.kind, found.count) == (WEAKENS, "allocation", 1)
    assert found.what == "1 operation returns new storage (64 B)"
    assert found.place is not None
    assert found.place.file == __file__
    assert report.stopped is None
    assert report.exit_code(strict=False) == 0
    assert report.exit_code(strict=True) == 1
    assert report.verdict == "nothing found that would break capture, 1 weakens it"


def test_lint_goes_on_after_the_first_break_and_names_both_lines():
    report = lint_step(*lint_steps.make_two_faults())
    first, second = of(report, BREAKS)
    assert (first.kind, first.place.line) == ("control flow", line_of("here: first"))
    assert first.via is None
    assert (second.kind, second.what) == ("host read", ".item()")
    assert second.place.line == line_of("here: second")
    assert second.place.source == "return x.sum().item()  # here: second"
    assert second.via.line == line_of("here: called from")
    assert first.recorders == second.recorders == ("cuda", "tape")
    assert first.batches == (8, 4, 2, 1)
    assert report.exit_code(strict=False) == 1


@pytest.mark.parametrize("name", NEEDS_CUDA_TO_TELL)
def test_what_only_a_gpu_would_refuse(name: str):
    function, kind = NEEDS_CUDA_TO_TELL[name]
    found = of(lint_of(function, batches=[4]), BREAKS)
    assert {(f.kind, f.recorders) for f in found} == (
        set() if kind is None else {(kind, ("cuda",))}
    )
    for finding in found:
        assert finding.place.file == lint_steps.__file__


def test_pinned_memory_of_before_the_step_may_be_copied():
    before = torch.ones(
        4, 4
    )  # as if it were pinned: what is there before the step is not the host's
    report = lint_of(partial(lint_steps.pinned_copy, pinned=before), batches=[4])
    assert of(report, BREAKS) == []


@pytest.mark.parametrize(
    "pin", [lambda: torch.ones(4, 4, pin_memory=True), lambda: X["x"].pin_memory()]
)
def test_pinned_memory_of_the_step_is_gone_at_a_replay(pin: Any):
    report = lint_of(lambda x: lint_steps.pinned_copy(x, pin()), batches=[4])
    copied = only(of(report, BREAKS))
    assert (copied.kind, copied.recorders) == ("host copy", ("cuda",))
    assert "gone when the step ends" in copied.why
    assert "pin_memory" in [f.what for f in of(report, WEAKENS)]


def test_seeding_alone_is_no_break():
    report = lint_of(lambda x: torch.manual_seed(4), batches=[4])
    assert of(report, BREAKS) == []
    assert "torch.manual_seed()" in [f.what for f in of(report, WEAKENS)]


def test_what_printing_does_inside_is_part_of_it():
    report = lint_of(lambda x: str(x), torch.randn(4, 4), batches=[4])
    assert only(of(report, BREAKS)).what == "printing a tensor"


def test_work_outside_the_capture():
    unforked = only(
        of(lint_of(lambda x: lint_steps.side_stream(x, fork=False, join=False)), BREAKS)
    )
    assert unforked.what == "work on a side stream"
    legacy = only(of(lint_of(lint_steps.on_default_stream), BREAKS))
    assert legacy.what == "work on the legacy default stream"
    waits = only(of(lint_of(lint_steps.outside_event), BREAKS))
    assert waits.what == "waiting for a side stream"


@pytest.mark.parametrize("name", BAKED)
def test_state_in_python(name: str):
    report = lint_step(BAKED[name](), X, batches=[4])
    found = [f for f in of(report, BREAKS) if f.kind in ("state", "random draw")]
    assert found
    assert {f.recorders for f in found} == {("cuda", "tape")}


def test_a_counter_is_shown_with_its_values_and_line():
    found = only(of(lint_step(lint_steps.Counter(), X, batches=[4]), BREAKS))
    assert found.what == "aten.mul.Tensor of a value that changes: 2, then 3"
    assert found.place.line == line_of("here: counter")


def test_a_cache_that_grows_is_named_once():
    report = lint_step(lint_steps.Growing(), X, batches=[4])
    places = [(f.kind, f.place.line) for f in of(report, BREAKS)]
    # What follows the first change of shape differs because of it.
    assert ("state", line_of("here: growing")) in places
    assert len(places) <= 2


def test_a_tensor_that_is_bound_anew_is_named_where_it_is_read_and_bound():
    report = lint_step(lint_steps.Carried(), X, batches=[4])
    state = [f for f in of(report, BREAKS) if f.kind == "state"]
    assert line_of("here: carried is read") in [f.place.line for f in state]
    bound = only([f for f in of(report, WEAKENS) if f.kind == "rebinding"])
    assert bound.what == "Carried.hidden is bound to another tensor".replace("Carried", "step")
    assert bound.place.line == line_of("here: carried is bound")


def test_a_parameter_that_is_bound_anew():
    report = lint_step(lint_steps.Rebinding(), X, batches=[4])
    assert of(report, BREAKS) == []
    bound = only([f for f in report.findings if f.kind == "rebinding"])
    assert bound.what == "step.layer.weight is bound to another tensor"
    assert bound.place.line == line_of("here: rebinding")
    assert sys.gettrace() is None or "coverage" in repr(sys.gettrace())


def test_a_branch_on_the_batch_size_is_an_information():
    def step(inputs: Any) -> Any:
        x = inputs["x"]
        if x.shape[0] == 1:
            x = x.flip(0)
        return {"y": x * 2}

    report = lint_step(step, X)
    found = only([f for f in report.findings if f.kind == "batch size"])
    assert (found.severity, found.batches) == (INFORMATION, (1,))
    assert found.place.source == "x = x.flip(0)"
    assert report.exit_code(strict=False) == 0


def test_a_batch_that_fails_costs_that_batch_only():
    report = lint_step(lambda inputs: {"y": inputs["x"] + torch.ones(4, 4)}, X)
    errors = [f for f in of(report, BREAKS) if f.kind == "error"]
    assert {f.batches for f in errors} == {(2,)}  # one row broadcasts
    assert report.operations == 3  # padding, the constant and the sum
    assert report.stopped is None


def test_a_step_that_raises_is_reported_and_not_linted_further():
    def step(inputs: Any) -> Any:
        inputs["x"].sum().item()
        raise ValueError("no such thing")

    report = lint_step(step, X)
    read, error = sorted(of(report, BREAKS), key=lambda f: f.kind, reverse=True)
    assert (read.kind, error.kind) == ("host read", "error")
    assert error.what == "ValueError: no such thing"
    assert error.place.file == __file__
    assert "ValueError" in (report.stopped or "")
    assert report.verdict.endswith("not linted to the end")


def test_an_output_in_a_slot():
    report = lint_step(lambda inputs: {"x": inputs["x"].mul_(2)}, X)
    found = only(report.findings)
    assert (found.severity, found.kind) == (WEAKENS, "alias")
    assert "'x'" in found.what


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda inputs: inputs["x"] * 2, "mapping of output names"),
        (lambda inputs: {"y": inputs["x"].sum()}, "first dimension is the batch"),
    ],
)
def test_outputs_that_no_recorder_takes(step: Any, words: str):
    found = only(of(lint_step(step, X), BREAKS))
    assert words in found.what
    assert found.recorders == ("cuda", "tape")


def test_num_rows_is_not_the_steps_to_change():
    def step(inputs: Any) -> Any:
        inputs["num_rows"].zero_()
        return {"y": inputs["x"] * 2}

    assert "num_rows" in only(of(lint_step(step, X), BREAKS)).what


def test_an_own_generator_that_is_state_is_no_break():
    generator = torch.Generator()
    for state, count in (((), 1), ((generator,), 0)):
        report = lint_of(lambda x: torch.rand(4, 4, generator=generator), state=state)
        assert len(of(report, BREAKS)) == count


def test_attention_without_dropout_draws_nothing():
    def attend(x: torch.Tensor) -> None:
        torch.nn.functional.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None, None]
        )

    assert "random draw" not in {f.kind for f in lint_of(attend).findings}


# -- what recorders see that torch's dispatcher does not ----------------------------------------


@operation("doubled")
def doubled(x: torch.Tensor, out: torch.Tensor) -> None:
    if float(x.sum()) > -1e9:  # inside an operation everything is allowed
        torch.mul(x, 2, out=out)


def test_a_step_on_the_kernel_layer_and_a_pool_is_clean():
    pool = BufferPool("cpu")

    def step(inputs: Any) -> Any:
        with pool.step():
            out = pool.take("out", tuple(inputs["x"].shape), torch.float32)
            pool.run(doubled, inputs["x"], out)
        return {"y": out}

    report = lint_step(step, X, pool=pool)
    assert report.findings == []
    assert report.operations == 2  # padding is restored before it
    assert pool.frozen


def test_a_step_that_asks_whether_it_is_captured_is_linted_for_each_recorder():
    def step(inputs: Any) -> Any:
        x = inputs["x"]
        if not torch.cuda.is_current_stream_capturing():
            x.sum().item()
        else:
            torch.cuda.synchronize()
        return {"y": x * 2}

    found = {f.kind: f.recorders for f in of(lint_step(step, X), BREAKS)}
    assert found == {"host read": ("tape",), "synchronisation": ("cuda",)}


def test_a_collective_breaks_the_tape_only():
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        report = lint_of(lambda x: distributed.all_reduce(x.clone()), batches=[4])
    finally:
        distributed.destroy_process_group()
    assert {(f.kind, f.recorders) for f in of(report, BREAKS)} == {("collective", ("tape",))}
    (known,) = [f for f in of(report, INFORMATION) if f.kind == "collective"]
    assert "same bucket" in known.why


@custom_op("graphcap_lint_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def test_a_custom_operator_of_one_overload_is_seen_whole():
    report = lint_of(halved)
    assert of(report, BREAKS) == []
    assert any("1 at every replay on the tape" in f.what for f in of(report, WEAKENS))


def without_cpu_kernel(name: str, with_fake: bool) -> Any:
    library = torch.library.Library("graphcap_lint_tests", "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    if with_fake:
        library.impl(name, torch.empty_like, "Meta")
    KEPT.append(library)
    return getattr(torch.ops.graphcap_lint_tests, name)


language: Any = None
KEPT: list[Any] = []


def test_an_operator_without_a_cpu_kernel_is_made_up_from_its_fake():
    operator = without_cpu_kernel("only_fake", True)
    report = lint_of(lambda x: operator(x).sum().item(), batches=[4])
    (known,) = [f for f in of(report, INFORMATION) if f.kind == "custom operator"]
    assert known.what == "graphcap_lint_tests.only_fake.default"
    assert [f.kind for f in of(report, BREAKS) if "cuda" in f.recorders] == ["host read"]


def test_an_operator_without_any_kernel_ends_the_lint():
    operator = without_cpu_kernel("nothing", False)
    report = lint_of(operator)
    assert of(report, BREAKS) == []
    assert "Could not run 'graphcap_lint_tests::nothing'" in (report.stopped or "")
    assert report.exit_code(strict=False) == 2


@pytest.mark.parametrize("recorded", [False, True])
def test_a_triton_launch_breaks_the_tape_where_triton_is_too_old(
    recorded: bool, monkeypatch: pytest.MonkeyPatch
):
    triton = pytest.importorskip("triton")
    jit = pytest.importorskip("triton.runtime.jit")
    if not hasattr(jit.JITFunction, "run"):
        pytest.skip("before Triton 3 each kernel has a launcher of its own")

    def kernel(pointer: Any) -> None:
        pass

    monkeypatch.setattr(stand_ins, "triton_is_recorded", lambda: recorded)
    launched = jit.JITFunction.__new__(jit.JITFunction)
    launched.__name__ = "kernel"
    report = lint_of(lambda x: jit.JITFunction.run(launched, x, grid=(1,), warmup=False))
    found = only(of(report, INFORMATION if recorded else BREAKS))
    assert found.what == "the Triton kernel 'kernel'"
    assert found.recorders == (() if recorded else ("tape",))
    assert ("the tape records it" in found.why) == recorded
    assert triton is not None


def doubled_by_triton(pointer: Any) -> None:
    language.store(pointer, language.load(pointer) * 2)  # the interpreter finds it as a global


def test_a_triton_kernel_in_the_interpreter_runs_and_is_noted(monkeypatch: pytest.MonkeyPatch):
    loaded = pytest.importorskip("triton.language")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if not hasattr(interpreter.InterpretedFunction, "run") or torch.cuda.is_available():
        pytest.skip("no interpreter whose launches can be seen")
    monkeypatch.setitem(globals(), "language", loaded)
    kernel = interpreter.InterpretedFunction(doubled_by_triton)
    seen = []

    def step(inputs: Any) -> Any:
        y = inputs["x"].clone()
        kernel[(1,)](y)
        seen.append(y)
        return {"y": y}

    report = lint_step(step, {"x": torch.ones(4, 4)}, batches=[4])
    found = only([f for f in report.findings if f.kind == "custom operator"])
    assert found.severity == (INFORMATION if triton_is_recorded() else BREAKS)
    assert found.recorders == (() if triton_is_recorded() else ("tape",))
    assert seen[-1].flatten().tolist() == [2.0, *[1.0] * 15]


def test_linalg_that_checks_for_errors():
    report = lint_of(torch.linalg.inv, torch.eye(4), batches=[4])
    assert "synchronisation" in {f.kind for f in of(report, BREAKS)}
    unchecked = lint_of(lambda x: torch.linalg.inv_ex(x)[0], torch.eye(4), batches=[4])
    assert of(unchecked, BREAKS) == []


# -- meta ----------------------------------------------------------------------------------------


def test_meta_sees_host_copies_by_their_devices():
    x = torch.ones(4, 4, device="meta")
    report = lint_of(lambda t: t + torch.arange(4).to(t.device), x)
    assert [(f.kind, f.recorders) for f in of(report, BREAKS)] == [("host copy", ("cuda", "tape"))]


def test_meta_says_that_values_are_missing():
    report = lint_of(lambda t: t.sum().item(), torch.ones(4, 4, device="meta"))
    assert [f.kind for f in of(report, BREAKS)] == ["host read"]
    assert "meta tensors hold no values: give --device cpu" in (report.stopped or "")
    assert report.exit_code(strict=False) == 1


# -- surroundings --------------------------------------------------------------------------------


def test_nothing_stays_replaced():
    before = (torch.cuda.synchronize, torch.cuda.Stream, torch.manual_seed, torch.cuda.stream)
    lint_step(lint_steps.clean, X)
    with pytest.raises(InputError):
        lint_step(lint_steps.clean, X, batches=[9])
    assert (
        torch.cuda.synchronize,
        torch.cuda.Stream,
        torch.manual_seed,
        torch.cuda.stream,
    ) == before


def test_a_name_that_was_imported_from_torch_is_seen_as_well(monkeypatch: pytest.MonkeyPatch):
    original = torch.cuda.synchronize
    monkeypatch.setattr(lint_steps, "synchronize", original, raising=False)
    report = lint_of(lambda x: lint_steps.synchronize())  # type: ignore[attr-defined]
    assert [f.kind for f in of(report, BREAKS)] == ["synchronisation"]
    assert lint_steps.synchronize is original  # type: ignore[attr-defined]


def test_slots_hold_what_they_held():
    inputs = StaticInputs(4, {"x": Slot((2,), torch.float32)}, "cpu")
    given = torch.randn(3, 2)
    inputs.load({"x": given}, 3)
    lint_step(lambda slots: {"y": slots["x"].add_(1) * 2}, inputs)
    assert inputs.rows == 3
    assert torch.equal(inputs["x"][:3], given)


def test_sizes():
    assert batch_sizes(1) == (1,)
    assert batch_sizes(3) == (3, 2, 1)
    assert batch_sizes(64) == (64, 32, 2, 1)
