"""The ranges *router*, *top-k* and *fused MoE*: where they lie, and that without them nothing is called."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphcap import BucketLadder, CaptureManager, PadPolicy, Settings, Slot, StaticInputs
from graphcap.errors import PoolError
from graphcap.moe import ranges as ranges_module
from graphcap.moe.experts import RoutedExperts
from graphcap.moe.kernels import ExpertKernels, PairKernels, choose_backend, expert_kernels
from graphcap.moe.ranges import Ranges, nvtx_ranges
from graphcap.operations import Operation, observed_by
from graphcap.pool import BufferPool

CPU = torch.device("cpu")
EXPERTS, TOP_K, HIDDEN, INNER = 6, 2, 8, 5


class Timeline:
    """What a profiler sees: ranges that open and close, and operations between them.

    Args:
        fails: the operation that raises instead of running.
    """

    def __init__(self, fails: str | None = None) -> None:
        self.fails = fails
        self.events: list[str] = []
        self.open: list[str] = []

    def push(self, name: str) -> int:
        self.open.append(name)
        self.events.append(f"+{name}")
        return len(self.open)

    def pop(self) -> int:
        self.events.append(f"-{self.open.pop()}")
        return len(self.open)

    @property
    def ranges(self) -> Ranges:
        return Ranges(self.push, self.pop)

    def operation(
        self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.events.append(operation.name)
        if operation.name == self.fails:
            raise ZeroDivisionError("a kernel failed")
        operation.function(*args, **kwargs)


def reference() -> ExpertKernels:
    return expert_kernels(choose_backend("reference", CPU))


def layer_of(
    kernels: ExpertKernels, ranges: Ranges | None, pool: BufferPool | None = None
) -> RoutedExperts:
    generator = torch.Generator().manual_seed(5)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return RoutedExperts(
        kernels,
        pool or BufferPool(CPU),
        weight(EXPERTS, HIDDEN),
        weight(EXPERTS, 2 * INNER, HIDDEN),
        weight(EXPERTS, HIDDEN, INNER),
        top_k=TOP_K,
        renormalize=True,
        ranges=ranges,
    )


def run(layer: RoutedExperts, rows: int = 4, timeline: Timeline | None = None) -> torch.Tensor:
    hidden = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))
    out = torch.full_like(hidden, float("nan"))
    with layer._pool.step(), observed_by(timeline):
        layer(hidden, torch.arange(rows), out)
    return out


def test_each_operation_lies_in_its_range():
    timeline = Timeline()
    out = run(layer_of(reference(), timeline.ranges), timeline=timeline)
    assert timeline.events == [
        "+router", "router GEMM", "-router",
        "+top-k", "topk_softmax", "-top-k",
        "+fused MoE", "moe_align_block_size", "fused_moe w1", "silu_and_mul", "fused_moe w2",
        "merge", "-fused MoE",
    ]  # fmt: skip
    assert timeline.open == []
    marks = len(timeline.events)
    assert torch.equal(out, run(layer_of(reference(), None)))
    assert len(timeline.events) == marks


def test_by_pair_the_range_says_that_top_k_is_inside():
    timeline = Timeline()

    def gate_up(hidden, logits, row_ids, weight, act, *rest):
        act.zero_()

    def down(act, logits, row_ids, weights, ids, weight, out, renormalize):
        out.zero_()

    pairs = PairKernels(
        Operation("pair_gate_up", "test", gate_up), Operation("pair_down", "test", down)
    )
    run(layer_of(replace(reference(), pairs=pairs), timeline.ranges), 1, timeline)
    assert timeline.events == [
        "+router", "router GEMM", "-router",
        "+fused MoE with top-k", "pair_gate_up", "pair_down", "-fused MoE with top-k",
    ]  # fmt: skip


@pytest.mark.parametrize("fails", ["router GEMM", "topk_softmax", "silu_and_mul", "merge"])
def test_a_range_is_closed_when_a_kernel_fails(fails: str):
    timeline = Timeline(fails)
    with pytest.raises(ZeroDivisionError):
        run(layer_of(reference(), timeline.ranges), timeline=timeline)
    assert timeline.open == []
    assert timeline.events[-1].startswith("-")


def test_a_range_is_closed_when_the_pool_refuses():
    timeline = Timeline()
    layer = layer_of(reference(), timeline.ranges)
    run(layer, rows=2)
    layer._pool.freeze()
    with pytest.raises(PoolError):
        run(layer, rows=64)
    assert timeline.open == []


def test_ranges_lie_in_the_recording_of_a_step_and_not_in_its_replay():
    timeline = Timeline()
    pool = BufferPool(CPU)
    kernels = reference()
    layer = layer_of(kernels, timeline.ranges, pool)
    weights = [layer.router, layer.gate_up, layer.down]

    def step(inputs):
        out = pool.take("out", tuple(inputs["hidden"].shape), torch.float32)
        layer(inputs["hidden"], inputs["row_ids"], out)
        return {"out": out}

    slots = {
        "hidden": Slot((HIDDEN,), torch.float32),
        "row_ids": Slot((), torch.int64, PadPolicy.fill(-1)),
    }
    manager = CaptureManager(
        step,
        StaticInputs(3, slots, CPU),
        pool=pool,
        ladder=BucketLadder([3], 3),
        settings=Settings(),
    )
    with manager:
        manager.capture()
        assert timeline.events.count("+router") >= 2  # warm-up and recording
        assert timeline.events.count("+router") == timeline.events.count("-fused MoE")
        timeline.events.clear()
        hidden = torch.randn(3, HIDDEN)
        out = manager.run({"hidden": hidden, "row_ids": torch.arange(3)})["out"].clone()
        assert manager.stats().replays == 1
        assert timeline.events == []
        layer.down = weights[2] * 2  # what a step reads is still watched through the ranges
        with pytest.raises(Exception, match="down"):
            manager.run({"hidden": hidden, "row_ids": torch.arange(3)})
    expected = torch.full_like(hidden, float("nan"))
    plain = layer_of(kernels, None)
    with plain._pool.step():
        plain(hidden, torch.arange(3), expected)
    torch.testing.assert_close(out, expected)


def test_without_ranges_operations_are_called_as_before():
    layer = layer_of(reference(), None)
    assert layer._run_router == layer._pool.run
    assert layer._run_top_k == layer._pool.run
    assert "_by_expert" not in vars(layer)
    assert "_by_pair" not in vars(layer)


class Nvtx:
    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.calls: list[tuple[Any, ...]] = []

    def range_push(self, name: str) -> int:
        if self.error:
            raise RuntimeError(self.error)
        self.calls.append(("push", name))
        return 0

    def range_pop(self) -> int:
        self.calls.append(("pop",))
        return 0


def test_off_does_not_touch_nvtx():
    nvtx = Nvtx("never")
    assert nvtx_ranges(Settings(), nvtx) is None
    assert nvtx_ranges(Settings.from_env({}), nvtx) is None


def test_on_pushes_and_pops_through_nvtx():
    nvtx = Nvtx()
    ranges = nvtx_ranges(Settings.from_env({"GRAPHCAP_NVTX": "1"}), nvtx)
    assert ranges is not None
    assert nvtx.calls == [("push", "graphcap"), ("pop",)]  # it was tried, and left nothing open
    nvtx.calls.clear()
    assert ranges.around("router", max)(3, 4) == 4
    assert nvtx.calls == [("push", "router"), ("pop",)]


def test_a_torch_without_nvtx_is_told_once(caplog: pytest.LogCaptureFixture):
    ranges_module._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "graphcap"):
        for _ in range(3):
            assert nvtx_ranges(Settings(nvtx=True), Nvtx("NVTX functions not installed.")) is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "GRAPHCAP_NVTX=1 has no effect: torch has no NVTX here: NVTX functions not installed. "
        "(graphcap explain nvtx)"
    )


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVTX")
def test_torchs_own_answer_without_nvtx_is_understood():
    assert nvtx_ranges(Settings(nvtx=True)) is None


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no NVTX")
def test_torchs_own_nvtx_takes_ranges():
    ranges = nvtx_ranges(Settings(nvtx=True))
    assert ranges is not None
    run(layer_of(reference(), ranges))
    # 0 is the depth of a stack that the ranges left empty; negative where no profiler listens.
    assert torch.cuda.nvtx.range_push("depth") <= 0
    torch.cuda.nvtx.range_pop()
