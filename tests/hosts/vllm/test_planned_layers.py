"""MoE layers of vLLM's models run by plans: which, what they compute, and what is told of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.0")

from graphcap.cuda import source
from graphcap.decode import expert_plans
from graphcap.decode.kernels import decode_kernels
from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.plan_choice import PlanChoice
from graphcap.decode.plan_files import PlanFile, TunedBucket
from graphcap.decode.plan_key import DIMENSIONS, PlanKey, kernels_digest, versions_here
from graphcap.errors import BackendError
from graphcap.hosts.vllm import experts as vllm_experts
from graphcap.hosts.vllm.choice import Choice
from graphcap.hosts.vllm.experts import PooledExperts
from graphcap.hosts.vllm.reporting import Reporter, lines_of_plans
from graphcap.moe.kernels import Backend
from graphcap.moe.kernels.triton_gemm import Tile
from graphcap.operations import Operation
from graphcap.pool import BufferPool
from graphcap.settings import Settings

CPU = torch.device("cpu")
EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 32, 16
CARD = "A Card"


@pytest.fixture(autouse=True)
def _a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are taken for this CPU, whose name is that of a card."""
    monkeypatch.setattr(expert_plans, "device_obstacle", lambda dtype, device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: CARD)


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """The folder with a plan for 4 rows of these experts, of a model with other attention."""
    sizes = {
        "hidden_size": HIDDEN,
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "moe_intermediate_size": INNER,
    }
    key = PlanKey(CARD, tuple((name, sizes.get(name, 77)) for name in DIMENSIONS), "float32")
    plan = LayerPlan("apart", tiles={"gated_gemm": Tile(16, 16, 4, 2)}, block=16)
    file = PlanFile(key, "other", kernels_digest(), versions_here(), ())
    file = file.with_buckets([TunedBucket(4, 256, plan, 1.0)])
    file.write(tmp_path / key.file_name)
    return tmp_path


class Layer:
    """What graphcap reads of vLLM's runner of a layer, with random weights."""

    def __init__(self, experts: int = EXPERTS) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape) / shape[-1] ** 0.5

        self.routed_experts = SimpleNamespace(
            w13_weight=normal(experts, 2 * INNER, HIDDEN),
            w2_weight=normal(experts, HIDDEN, INNER),
            top_k=TOP_K,
            renormalize=True,
        )
        self.gate = SimpleNamespace(weight=3 * normal(experts, HIDDEN))

    def expected(self, hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(hidden.shape, dtype=torch.float64)
        for row in (slots >= 0).nonzero().flatten().tolist():
            token = hidden[row].double()
            share = torch.softmax(self.gate.weight.double() @ token, 0)
            best = share.topk(TOP_K).indices
            for expert in best.tolist():
                gate, up = (self.routed_experts.w13_weight[expert].double() @ token).split(INNER)
                part = self.routed_experts.w2_weight[expert].double() @ (gate * gate.sigmoid() * up)
                out[row] += share[expert] / share[best].sum() * part
        return out


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    run = BufferPool.run

    def watched(self: BufferPool, operation: Any, *args: Any) -> None:
        found.append(operation.implementation)
        run(self, operation, *args)

    monkeypatch.setattr(BufferPool, "run", watched)
    return found


def run_layer(
    experts: PooledExperts, rows: int = 4, gap: bool = False, layer: Layer | None = None
) -> None:
    """One layer beside float64, a row of padding among the rows."""
    torch.manual_seed(torch.initial_seed() % 2**31)
    layer = Layer() if layer is None else layer
    hidden = torch.randn(2 * rows, HIDDEN)[::2] if gap else torch.randn(rows, HIDDEN)
    slots = torch.arange(rows)
    if rows > 1:
        slots[1], hidden[1] = -1, float("nan")
    with experts.pool.step():
        out = experts.run(layer, hidden, slots)
    torch.testing.assert_close(out.double(), layer.expected(hidden, slots), rtol=1e-4, atol=1e-5)


def pooled(folder: Path, **changes: Any) -> PooledExperts:
    settings = Settings(kernels="triton", tune_cache=folder, **changes)
    return PooledExperts(BufferPool(CPU), settings, CPU)


def test_a_tuned_plan_of_another_model_with_such_experts_serves(
    tuned: Path, ran: list[str]
) -> None:
    experts = pooled(tuned)
    run_layer(experts)
    assert ran == [
        "triton: fused_linear",
        "triton: topk_softmax",
        "triton: align",
        "triton: gated_gemm",
        "triton: expert_gemm",
        "triton: merge",
    ]
    assert experts.plans[4].source == "cache"
    assert experts.plans[4].plan.tiles["gated_gemm"] == Tile(16, 16, 4, 2)
    run_layer(experts, rows=1)
    run_layer(experts, rows=9)
    assert {rows: choice.source for rows, choice in experts.plans.items()} == {
        4: "cache",
        1: "default",
        9: "default",
    }


def test_plain_means_without_plans(tuned: Path, ran: list[str]) -> None:
    experts = pooled(tuned, schedule="plain")
    run_layer(experts)
    assert "triton: gated_gemm" not in ran
    assert ran[0] == "triton: router_gemm"
    assert experts.plans[4].source == "not supported"
    assert lines_of_plans(experts) == []


def test_a_plan_that_cannot_run_costs_neither_the_engine_nor_the_bucket(
    tuned: Path,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its tiles are legal, and want more shared memory than there is."""
    kernels = decode_kernels(Backend("triton", "tests"))
    assert kernels.fused is not None

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("out of resource: shared memory")

    fused = replace(kernels.fused, gated_gemm=Operation("fused_moe w1", "too large", refuse))
    monkeypatch.setattr(
        vllm_experts, "decode_kernels", lambda backend: replace(kernels, fused=fused)
    )
    experts = pooled(tuned)
    for _ in range(2):
        run_layer(experts)
    assert ran.count("too large") == 1
    assert ran[-1] == "triton: merge"
    assert experts.plans[4].source == "failed"
    assert caplog.text.count("experts of 4 rows run without a plan") == 1
    assert str(next(tuned.iterdir())) in caplog.text
    assert lines_of_plans(experts) == [
        "experts without a plan, theirs failed (see the WARNING), at batch 4"
    ]
    experts.pool.freeze()
    run_layer(experts)


def test_kernels_of_plans_that_cannot_be_imported_leave_the_experts_without(
    tuned: Path,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As with a Triton that has what experts need, and not what attention does."""

    def broken(backend: Backend) -> None:
        raise AttributeError("module 'triton.language' has no attribute 'gather'")

    monkeypatch.setattr(vllm_experts, "decode_kernels", broken)
    monkeypatch.setattr(vllm_experts, "_told", set())
    run_layer(pooled(tuned))  # as the threads that compile ahead have their own
    experts = pooled(tuned)
    ran.clear()
    run_layer(experts)
    assert ran[0] == "triton: router_gemm"
    assert experts.plans[4].source == "not supported"
    assert caplog.text.count("experts run without plans: AttributeError") == 1
    assert "graphcap explain plan-failed" in caplog.text


def test_rows_with_gaps_run_without_a_plan(tuned: Path, ran: list[str]) -> None:
    """A projection of a plan takes contiguous tensors; the kernels without one take rows with gaps."""
    experts = pooled(tuned)
    run_layer(experts, gap=True)
    assert ran[0] == "triton: router_gemm"
    assert experts.plans == {}


def test_kernels_without_plans(tuned: Path, ran: list[str]) -> None:
    settings = Settings(kernels="reference", tune_cache=tuned)
    experts = PooledExperts(BufferPool(CPU), settings, CPU)
    run_layer(experts)
    assert experts.plans[4].why == "reference kernels are to run without plans"


def test_what_is_told(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = pooled(tuned)
    for rows in (1, 2, 3, 4):
        run_layer(experts, rows)
    lacking = PlanChoice(
        1, LayerPlan("fused"), "table", "", file="h200.json", lacks="pair_down by Triton: no NVRTC"
    )
    experts.plans[1] = lacking
    path = next(tuned.iterdir())
    assert lines_of_plans(experts) == [
        "experts by table h200.json at batch 1",
        "experts by rule at batch 2",
        f"experts by cache {path} at batch 3, 4",
        "experts at batch 1: pair_down by Triton: no NVRTC",
    ]
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.26.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    reporter = Reporter(
        Choice(True), Settings(), SimpleNamespace(parallel_config=SimpleNamespace(rank=0))
    )
    engine: Any = SimpleNamespace(pool=experts.pool, failed=None, experts=experts)
    report: Any = SimpleNamespace(recorder="cuda", census=None, to_json=dict)
    plain = reporter._plain(engine, {"decode": report}, ())["expert_plans"]
    assert plain["4"]["source"] == "cache"
    by_size = reporter._plain(engine, {"decode": report}, ())["expert_plans_by_size"]
    assert by_size["8 experts of 32 x 16, top-2, float32"]["4"] == plain["4"]
    assert plain["4"]["plan"]["tiles"]["gated_gemm"] == {
        "tile": "Tile",
        "n": 16,
        "k": 16,
        "warps": 4,
        "stages": 2,
    }


def test_layers_of_several_sizes_are_told_apart(tuned: Path) -> None:
    """A plan of one does not hide what is said of another."""
    experts = pooled(tuned)
    run_layer(experts)
    run_layer(experts, layer=Layer(12))
    run_layer(experts, rows=3, layer=Layer(12))
    path = next(tuned.iterdir())
    assert lines_of_plans(experts) == [
        f"8 experts of 32 x 16, top-2, float32 by cache {path} at batch 4",
        "12 experts of 32 x 16, top-2, float32 by rule at batch 3, 4",
    ]


def test_kernels_that_are_held_are_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is the driver asked, which cannot be loaded here."""

    def refuse() -> None:
        raise BackendError("no driver")

    monkeypatch.setattr(source, "libraries", refuse)
    kernel = source.CudaKernel("test", None, 1, 32)
    with source.not_launched():
        kernel.launch(CPU)
        with source.not_launched():
            kernel.launch(CPU)
        kernel.launch(CPU)
    with pytest.raises(BackendError, match="no driver"):
        kernel.launch(CPU)
