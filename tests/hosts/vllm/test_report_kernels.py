"""What the plugin tells of kernels: each operation that is not the backend's own, with the reason."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ixformer_standin import MOE_OPERATIONS, installed

from graphcap.hosts.vllm.choice import Choice
from graphcap.hosts.vllm.experts import PooledExperts, not_shown
from graphcap.hosts.vllm.reporting import Reporter
from graphcap.moe.kernels import Backend, expert_kernels
from graphcap.pool import BufferPool
from graphcap.settings import Settings

CPU = torch.device("cpu")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.6.3"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)

    def tell(experts: PooledExperts) -> tuple[list[str], dict[str, Any]]:
        config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0))
        reporter = Reporter(Choice(True), Settings(), config)
        engine = SimpleNamespace(pool=experts.pool, failed=None, experts=experts)
        report = SimpleNamespace(
            seconds=1.0,
            graph_bytes=0,
            buckets=(),
            recorder="tape",
            device="cpu",
            failures={},
            census=None,
            to_json=dict,
        )
        reports: Any = {"decode": report}
        return reporter._lines(engine, reports, ()), reporter._plain(engine, reports, ())

    return tell


def pooled(**changes: Any) -> PooledExperts:
    experts = PooledExperts(BufferPool(CPU), Settings(kernels="vllm"), CPU)
    with installed("newer", **changes):
        experts.kernels = expert_kernels(Backend("ixformer", "test"))
    return experts


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("recorder", ["cuda", "tape"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_only_experts_of_a_hybrid_on_the_tape_of_a_gpu_stay_vllms(
    hybrid: bool, recorder: str, device: str, kernels: str
) -> None:
    why = not_shown(hybrid, recorder, Settings(kernels=kernels), torch.device(device))
    if (hybrid, recorder, device, kernels) == (True, "tape", "cuda", "auto"):
        assert why is not None
        experts = PooledExperts(BufferPool(CPU), Settings(kernels="reference"), CPU, why)
        assert (experts.kernels, experts.why) == (None, why)
    else:
        assert why is None


def test_operations_that_ixformer_lacks_are_told_with_the_reason(told: Any) -> None:
    lines, plain = told(pooled(without=MOE_OPERATIONS))
    missing = "ixformer.inference.functions has no vllm_invoke_fused_moe_kernel"
    (line,) = [line for line in lines if line.endswith(f": {missing}")]
    assert line.startswith("fused_moe runs on torch")
    rows = {row["operation"]: row for row in plain["kernels"]}
    assert rows["fused_moe"]["note"] == missing
    assert rows["silu_and_mul"] == {
        "operation": "silu_and_mul",
        "kernel": "ixformer: silu_and_mul",
        "note": "",
    }


def test_kernels_of_vllm_are_not_told_as_graphcaps(told: Any) -> None:
    lines, plain = told(PooledExperts(BufferPool(CPU), Settings(kernels="vllm"), CPU))
    assert plain["kernels"] == []
    assert not [line for line in lines if " runs on " in line]
