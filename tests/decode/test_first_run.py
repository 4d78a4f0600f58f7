"""Plans that cannot run: nobody loses a step by one, it is told of once, and no other failure is hidden."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import SHAPE, batch_at, make_cache
from plan_samples import H200, pretend

pytest.importorskip("triton", minversion="3.0")

from graphcap.decode import expert_plans, first_run, plan_choice, schedule
from graphcap.decode.delta_shape import DeltaShape
from graphcap.decode.expert_plans import ExpertPlans
from graphcap.decode.kernels import DecodeKernels, decode_kernels
from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.model_shape import ModelShape
from graphcap.decode.plan_key import ExpertSizes
from graphcap.decode.random_weights import random_weights
from graphcap.decode.step import DecodeStep
from graphcap.errors import BackendError, PoolError, PoolFrozenError
from graphcap.moe.experts import RoutedExperts
from graphcap.moe.kernels import Backend
from graphcap.operations import Operation
from graphcap.pool import BufferPool

TRITON = decode_kernels(Backend("triton", "tests"))
EXPERTS, TOP_K, HIDDEN, INNER = 6, 2, 16, 8
SIZES = ExpertSizes(HIDDEN, EXPERTS, TOP_K, INNER)


class OutOfResources(Exception):
    """What Triton raises where a tile needs more shared memory than there is."""


@pytest.fixture(autouse=True)
def _a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans by rule are taken on this CPU."""
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(plan_choice, "_told", set())
    pretend(monkeypatch)
    for module in (expert_plans, schedule):
        monkeypatch.setattr(module, "device_obstacle", lambda dtype, device: None)


class Failing:
    """An operation that raises at its `nth` call and after, and counts its calls."""

    def __init__(self, operation: Operation, error: Exception, nth: int = 1) -> None:
        self.calls = 0
        self._nth, self._error, self._original = nth, error, operation
        self.operation = Operation(
            operation.name, operation.implementation, self, operation.scratch
        )

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        if self.calls >= self._nth:
            raise self._error
        self._original.function(*args, **kwargs)


def fused_with(**changes: Any) -> DecodeKernels:
    assert TRITON.fused is not None
    return replace(TRITON, fused=replace(TRITON.fused, **changes))


def plans_with(**changes: Any) -> ExpertPlans:
    kernels = fused_with(**changes)
    device = torch.device("cpu")
    return ExpertPlans(kernels.experts, kernels.fused, SIZES, torch.float32, device)


class Layer:
    """Experts of 4 rows, the second of them padding; `out` is `hidden`."""

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool
        self.source = torch.randn(4, HIDDEN)
        self.source[1] = float("nan")
        self.row_ids = torch.tensor([0, -1, 2, 3])
        self.weights = (
            torch.randn(EXPERTS, HIDDEN),
            torch.randn(EXPERTS, 2 * INNER, HIDDEN),
            torch.randn(EXPERTS, HIDDEN, INNER),
        )

    def launch(self, kernels: Any) -> None:
        experts = RoutedExperts(kernels, self.pool, *self.weights, top_k=TOP_K, renormalize=True)
        experts(self.out, self.row_ids, self.out)

    def run(self, plans: ExpertPlans) -> torch.Tensor:
        self.out = self.source.clone()
        with self.pool.step():
            plans.run(4, self.pool, self.launch)
        return self.out

    @property
    def expected(self) -> torch.Tensor:
        found = torch.zeros(4, HIDDEN, dtype=torch.float64)
        router, gate_up, down = (weight.double() for weight in self.weights)
        for row in (0, 2, 3):
            token = self.source[row].double()
            share = torch.softmax(router @ token, 0)
            best = share.topk(TOP_K).indices
            for expert in best.tolist():
                gate, up = (gate_up[expert] @ token).split(INNER)
                part = down[expert] @ (gate * gate.sigmoid() * up)
                found[row] += share[expert] / share[best].sum() * part
        return found


@pytest.mark.parametrize("kernel", ["project", "gated_gemm"])
@pytest.mark.parametrize(
    "error", [OutOfResources("out of resource: shared memory"), BackendError("no such tile")]
)
def test_experts_run_without_a_plan_that_cannot_run_and_it_is_told_once(
    kernel: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(getattr(TRITON.fused, kernel), error)
    plans = plans_with(**{kernel: failing.operation})
    assert plans.choice(4).source == "default"
    pool = BufferPool("cpu")
    layer = Layer(pool)
    with caplog.at_level(logging.WARNING, "graphcap"):
        first = layer.run(plans).clone()
    torch.testing.assert_close(first.double(), layer.expected, rtol=1e-4, atol=1e-5)
    assert "experts of 4 rows run without a plan, theirs cannot run here (default)" in caplog.text
    assert f"{type(error).__name__}: {error.args[0]}" in caplog.text
    assert "graphcap explain plan-failed" in caplog.text
    choice = plans.choice(4)
    assert (choice.source, choice.plan) == ("failed", LayerPlan("plain"))
    assert error.args[0] in choice.why
    assert plans.kernels(4) is TRITON.experts
    pool.freeze()
    pool.poison()
    assert torch.equal(layer.run(plans), first)
    assert failing.calls == 1
    assert caplog.text.count("plan-failed") == 1
    assert plans.choice(3).source == "default"  # other rows try theirs


def test_what_a_plan_ran_once_is_not_tried_again() -> None:
    """A failure that comes later is none of the plan's."""
    failing = Failing(TRITON.fused.gated_gemm, OutOfResources("later"), nth=2)
    plans = plans_with(gated_gemm=failing.operation)
    layer = Layer(BufferPool("cpu"))
    torch.testing.assert_close(layer.run(plans).double(), layer.expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(OutOfResources, match="later"):
        layer.run(plans)
    assert plans.choice(4).source == "default"


@pytest.mark.parametrize(
    "error", [PoolFrozenError("not planned"), MemoryError(), RuntimeError("CUDA out of memory")]
)
def test_failures_that_are_not_the_plans_are_raised(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    plans = plans_with(gated_gemm=Failing(TRITON.fused.gated_gemm, error).operation)
    with pytest.raises(type(error)):
        Layer(BufferPool("cpu")).run(plans)
    assert plans.choice(4).source == "default"
    assert caplog.text == ""


def test_where_it_fails_without_the_plan_too_the_first_failure_is_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Failing(TRITON.experts.align, OutOfResources("whatever the plan"))
    kernels = replace(TRITON.experts, align=broken.operation)
    device = torch.device("cpu")
    plans = ExpertPlans(kernels, TRITON.fused, SIZES, torch.float32, device)
    with pytest.raises(OutOfResources, match="whatever the plan"):
        Layer(BufferPool("cpu")).run(plans)
    assert broken.calls == 2
    assert plans.choice(4).source == "default"
    assert caplog.text == ""


def _take_twice(pool: BufferPool, name: str) -> None:
    for _ in range(2):
        pool.take(name, (4,), torch.float32)


def test_an_attempt_that_fails_leaves_the_pool_as_it_was() -> None:
    pool = BufferPool("cpu")
    with pool.step():
        pool.take("kept", (4,), torch.float32)
        with pytest.raises(PoolError, match="still held"), pool.attempt():
            _take_twice(pool, "lost")
        pool.take("lost", (4,), torch.float32)
        with pytest.raises(PoolError, match="still held"):
            pool.take("kept", (4,), torch.float32)
        with pool.attempt():
            pool.take("more", (4,), torch.float32)
        pool.release("lost", "more", "kept")


def logits_of(
    kernels: DecodeKernels, name: str, shape: ModelShape = SHAPE
) -> tuple[list[torch.Tensor], DecodeStep]:
    """Two tokens of 4 rows."""
    weights = random_weights(shape, device="cpu", dtype=torch.float32, seed=5)
    cache = make_cache(weights, kernels=TRITON)
    cache.fill_random(1)
    step = DecodeStep(weights, cache, kernels, BufferPool("cpu"), schedule=name)
    tables = torch.stack([cache.allocate(24) for _ in range(4)])
    batch = batch_at(tables, [3] * 4, list(range(5, 9)))
    if shape.is_hybrid:
        batch["state_slots"] = torch.arange(1, 5)
    return [step(batch)["logits"].clone() for _ in range(2)], step


def test_a_step_runs_plain_layers_where_its_plan_cannot_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "default_obstacle", lambda *given: None)
    # In the second layer: the first has changed the residual stream and the cache by then.
    failing = Failing(TRITON.fused.attend, OutOfResources("registers"), nth=2)
    found, step = logits_of(fused_with(attend=failing.operation), "auto")
    expected, _ = logits_of(TRITON, "plain")
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert failing.calls == 2
    assert step.bucket_choice(4).source == "failed"
    assert "OutOfResources: registers" in step.bucket_choice(4).why
    assert caplog.text.count("layers of 4 rows run without a plan") == 1


def test_a_plan_that_was_asked_for_is_not_left_in_silence() -> None:
    failing = Failing(TRITON.fused.attend, OutOfResources("registers"))
    with pytest.raises(OutOfResources, match="registers"):
        logits_of(fused_with(attend=failing.operation), "fused")


HYBRID = replace(
    SHAPE,
    model_type="qwen3_next",
    num_layers=3,
    mlp_only_layers=(),
    attention_bias=False,
    linear_layers=(0, 1),
    delta=DeltaShape(num_key_heads=2, num_value_heads=2, key_dim=6, value_dim=6, conv_width=4),
    rotary_dim=4,
    shared_intermediate_size=20,
)


def test_the_states_of_a_hybrid_advance_once_where_the_plan_of_its_experts_cannot_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The state of the first layer has advanced by then."""
    failing = Failing(TRITON.fused.gated_gemm, OutOfResources("shared memory"))
    found, step = logits_of(fused_with(gated_gemm=failing.operation), "auto", shape=HYBRID)
    expected, _ = logits_of(TRITON, "plain", shape=HYBRID)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert failing.calls == 1
    experts = step.bucket_choice(4).experts
    assert experts is not None
    assert (experts.source, experts.plan) == ("failed", LayerPlan("plain"))
    assert caplog.text.count("experts of 4 rows run without a plan") == 1


def test_a_failure_is_told_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise OutOfResources("one\n\n" + "two " * 1000)

    why = first_run.first_run(BufferPool("cpu"), fails, lambda: None, "experts", 1, H200)
    assert why is not None
    assert "\n" not in why
    assert len(why) < 600
