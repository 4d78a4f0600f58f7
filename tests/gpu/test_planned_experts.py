"""Routed experts by plan at real sizes: eagerly and in a graph against float64, and compiled ahead."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", minversion="3.2")

from graphcap.cuda import source
from graphcap.decode.expert_plans import ExpertPlans
from graphcap.decode.kernels import decode_kernels
from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.plan_files import PlanFile, TunedBucket
from graphcap.decode.plan_key import (
    DIMENSIONS,
    ExpertSizes,
    PlanKey,
    kernels_digest,
    versions_here,
)
from graphcap.hosts.vllm import ahead
from graphcap.moe.experts import RoutedExperts
from graphcap.moe.kernels import Backend, cuda_down
from graphcap.moe.kernels.triton_gemm import Tile
from graphcap.pool import BufferPool

BF16 = torch.bfloat16
SEED = ExpertSizes(2048, 256, 8, 512)
"""Of seed-64 and Qwen3.6-35B-A3B, which the packaged table of the H200 has plans for."""

RULE = ExpertSizes(1024, 128, 4, 256)


@pytest.fixture(autouse=True)
def _no_own_plans(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", str(tmp_path))


def plans(sizes: ExpertSizes, device: torch.device) -> ExpertPlans:
    kernels = decode_kernels(Backend("triton", "tests"))
    return ExpertPlans(kernels.experts, kernels.fused, sizes, BF16, device)


def expected(hidden, logits, row_ids, gate_up, down, top_k: int) -> torch.Tensor:
    """By float64 from logits as the kernels round them; ties go to the lower expert."""
    share = torch.softmax(logits.double(), -1)
    best = torch.sort(share, dim=-1, descending=True, stable=True).indices[:, :top_k]
    out = torch.zeros_like(hidden, dtype=torch.float64)
    for row in (row_ids >= 0).nonzero().flatten().tolist():
        token, experts = hidden[row].double(), best[row]
        gate, up = (gate_up[experts].double() @ token).chunk(2, -1)
        part = torch.einsum("khi,ki->kh", down[experts].double(), gate * gate.sigmoid() * up)
        weights = share[row, experts] / share[row, experts].sum()
        out[row] = weights @ part
    return out


@pytest.mark.parametrize("rows", [1, 2, 4, 7, 16, 33, 64])
@pytest.mark.parametrize("sizes", [SEED, RULE], ids=["table", "rule"])
def test_against_float64_eagerly_and_in_a_graph(device, sizes: ExpertSizes, rows: int) -> None:
    torch.manual_seed(torch.initial_seed() % 2**31)
    size, experts, top_k, inner = sizes

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(BF16)

    found = plans(sizes, device)
    choice = found.choice(rows)
    if sizes == SEED and "H200" in torch.cuda.get_device_name(device):
        assert choice.source == "table"
        assert bool(choice.plan.in_cuda) == (rows == 1)
        assert choice.lacks == ""
    router, gate_up, down = (
        normal(experts, size),
        normal(experts, 2 * inner, size),
        normal(experts, size, inner),
    )
    pool = BufferPool(device)
    layer = RoutedExperts(
        found.kernels(rows), pool, router, gate_up, down, top_k=top_k, renormalize=True
    )
    row_ids = torch.arange(rows, device=device)
    if rows > 2:
        row_ids[[1, rows - 1]] = -1

    def routing(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and whether a row is real and no rounding decides which experts it has."""
        logits = (hidden.double() @ router.double().T).to(BF16)
        chosen = logits.double().sort(-1, descending=True).values
        return logits, (row_ids >= 0) & (chosen[:, top_k - 1] - chosen[:, top_k] > 2.0**-6)

    def draw() -> torch.Tensor:
        """With at least one row that can be judged."""
        for _ in range(100):  # about one row in four cannot be judged
            drawn = torch.randn(rows, size, device=device).to(BF16)
            if bool(routing(drawn)[1].any()):
                return drawn
        raise AssertionError("no draw has a row that no rounding decides")

    source_rows = draw()
    hidden = torch.empty_like(source_rows)
    out = torch.empty_like(hidden)

    def step() -> None:
        with pool.step():
            # What comes before writes the input only when it has run: a kernel that starts early
            # and does not wait reads the poison.
            hidden.copy_(source_rows)
            layer(hidden, row_ids, out)

    def check() -> None:
        logits, real = routing(hidden)
        wanted = expected(hidden, logits, row_ids, gate_up, down, top_k)
        assert bool(real.any())
        assert float((out.double() - wanted)[real].abs().max()) < 2.0**-6 * float(
            wanted.abs().max()
        )
        assert (out[row_ids < 0] == 0).all()
        assert out.isfinite().all()

    for _ in range(2):
        step()
    pool.freeze()
    pool.poison()
    out.fill_(float("nan"))
    step()
    torch.cuda.synchronize()
    eager = out.clone()
    check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        source_rows.copy_(draw())
        source_rows[row_ids < 0] = float("nan")
        for tensor in (out, hidden):
            tensor.fill_(float("nan"))
        pool.poison()
        graph.replay()
        torch.cuda.synchronize()
        replayed = out.clone()
        check_rows = row_ids >= 0
        step()
        torch.cuda.synchronize()
        assert torch.equal(replayed[check_rows], out[check_rows])  # bit for bit
        hidden[row_ids < 0] = 0
        check()
    assert eager.isfinite().all()


def test_all_of_them_are_compiled_ahead_with_the_weights_of_one_expert(device) -> None:
    """Afterwards a kernel in CUDA C++ is loaded, and none has run on weights that are not there."""
    if source.obstacle(device):
        pytest.skip(source.obstacle(device))
    found = plans(SEED, device)
    shapes = ((256, 1024, 2048), (256, 2048, 512))
    in_cuda = found.choice(1).plan.in_cuda
    if in_cuda:
        source.function.cache_clear()
        cuda_down._kernel.cache_clear()  # another test may have had it loaded
        ahead.our_experts(found, [1], True, device, shapes, BF16, 8)
        torch.cuda.synchronize()
        assert source.function.cache_info().currsize == len(in_cuda)
    ahead.our_experts(found, [2, 16, 64], True, device, shapes, BF16, 8)
    torch.cuda.synchronize()


@pytest.mark.plan_fails
@pytest.mark.parametrize("kernel", ["gated_gemm", "down_gemm"])
def test_a_plan_that_wants_more_shared_memory_than_there_is_costs_itself_alone(
    device, kernel: str, tmp_path, caplog
) -> None:
    """Warmed up and captured all the same, on the kernels without a plan, bit for bit."""
    sizes = RULE._replace(moe_intermediate_size=1024)  # four iterations: one alone takes no stages
    dimensions = dict(zip(ExpertSizes._fields, sizes, strict=True))
    key = PlanKey(
        torch.cuda.get_device_name(device),
        tuple((name, dimensions.get(name, 7)) for name in DIMENSIONS),
        "bfloat16",
    )
    plan = LayerPlan("apart", tiles={kernel: Tile(256, 256, 8, 6)}, block=128)
    file = PlanFile(key, "too large", kernels_digest(), versions_here(), ())
    file.with_buckets([TunedBucket(64, 256, plan, 1.0)]).write(tmp_path / key.file_name)
    found = plans(sizes, device)
    assert found.choice(64).source == "cache"
    size, experts, top_k, inner = sizes

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(BF16)

    weights = (
        normal(experts, size),
        normal(experts, 2 * inner, size),
        normal(experts, size, inner),
    )
    hidden, row_ids = normal(64, size), torch.arange(64, device=device)
    pool = BufferPool(device)

    def layer(kernels, out: torch.Tensor) -> None:
        with pool.step():
            RoutedExperts(kernels, pool, *weights, top_k=top_k, renormalize=True)(
                hidden, row_ids, out
            )

    def run(out: torch.Tensor) -> None:
        with pool.step():
            found.run(64, pool, lambda kernels: layer(kernels, out))

    expected, out = torch.empty_like(hidden), torch.full_like(hidden, float("nan"))
    layer(decode_kernels(Backend("triton", "tests")).experts, expected)
    run(out)
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    assert found.choice(64).source == "failed"
    assert "OutOfResources" in found.choice(64).why
    assert caplog.text.count("experts of 64 rows run without a plan") == 1
    pool.freeze()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(out)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_beside_another_current_device() -> None:
    """Eagerly, on a device that is not the current one."""
    other = torch.device("cuda:1")
    torch.manual_seed(torch.initial_seed() % 2**31)
    sizes = ExpertSizes(1024, 128, 4, 256)
    for rows in (1, 16):
        hidden = torch.randn(rows, 1024, device=other).to(BF16)
        router, gate_up, down = (
            (torch.randn(*shape, device=other) * shape[-1] ** -0.5).to(BF16)
            for shape in ((128, 1024), (128, 512, 1024), (128, 1024, 256))
        )
        pool = BufferPool(other)
        kernels = plans(sizes, other).kernels(rows)
        layer = RoutedExperts(kernels, pool, router, gate_up, down, top_k=4, renormalize=True)
        out = torch.full_like(hidden, float("nan"))
        row_ids = torch.arange(rows, device=other)
        assert torch.cuda.current_device() == 0
        with pool.step():
            layer(hidden, row_ids, out)
        torch.cuda.synchronize(other)
        logits = (hidden.double() @ router.double().T).to(BF16)
        wanted = expected(hidden, logits, row_ids, gate_up, down, 4)
        close = (out.double() - wanted).abs().amax(1) < 2.0**-6 * wanted.abs().max()
        assert close.sum() >= 0.8 * rows  # a near-tie of experts may fall otherwise
        assert out.isfinite().all()
