"""pair_gate_up in CUDA C++ against float64 and Triton's, with everything unwritten poisoned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cpp_checks import BF16, HALF, NAN, STEP, compiles, error  # noqa: F401 - compiles is a fixture

pytest.importorskip("triton", minversion="3.2")

from graphcap.decode.kernels import cuda_linear
from graphcap.moe.kernels import cuda_down, cuda_gate_up, triton_pairs
from graphcap.moe.kernels.cuda_gate_up import CudaGateUp, unfit
from graphcap.tuning.space import CUDA_GATE_UPS

I32, I64 = torch.int32, torch.int64


def normal(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Of variance 1 / columns."""
    return torch.randn(*shape, device=device, dtype=dtype).mul_(shape[-1] ** -0.5)


def poisoned(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.full(shape, NAN, device=device, dtype=dtype)


def ranked(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Experts of one row in the order of its logits: a NaN is as minus infinity, equals by their number."""
    clean = torch.where(logits.isnan(), -torch.inf, logits.double())
    return clean.sort(descending=True, stable=True).indices[:top_k]


def expected(x: torch.Tensor, gate_up: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    gate, up = (gate_up[experts].double() @ x[0].double()).chunk(2, -1)
    return gate * gate.sigmoid() * up


class Outputs:
    """What the kernel writes, with a row behind each that it must not write."""

    def __init__(self, device: torch.device, dtype: torch.dtype, top_k: int, inner: int) -> None:
        self.acts = poisoned(device, dtype, top_k + 1, inner)
        self.all_weights = poisoned(device, torch.float32, 2, top_k)
        self.all_ids = torch.full((2, top_k), -7, device=device, dtype=I32)
        self.act, self.weights, self.ids = self.acts[:-1], self.all_weights[:1], self.all_ids[:1]

    def check_ends(self) -> None:
        assert self.acts[-1].isnan().all()
        assert self.all_weights[1].isnan().all()
        assert (self.all_ids[1] == -7).all()


@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize(
    ("hidden", "inner", "experts", "top_k", "dtype", "renormalize", "row_id", "tile"),
    [
        (2048, 512, 256, 8, BF16, True, I64, None),
        (2048, 512, 256, 8, HALF, False, I32, CudaGateUp(16, 8, 64)),
        (2048, 768, 128, 8, BF16, True, I32, None),
        (2560, 1024, 128, 8, HALF, True, I64, None),
        (1024, 256, 512, 10, BF16, False, I64, None),
        (1024, 256, 512, 16, HALF, True, I64, CudaGateUp(64, 10, 80)),
        (4096, 256, 128, 8, BF16, True, I64, None),
        (4096, 1536, 128, 8, BF16, False, I32, None),
        (256, 264, 384, 1, BF16, True, I64, None),
    ],
)
def test_against_float64_and_triton(
    device, hidden, inner, experts, top_k, dtype, renormalize, row_id, tile, pdl
) -> None:
    x = torch.randn(1, hidden, device=device, dtype=dtype)
    logits = torch.randn(1, experts, device=device).to(dtype).float()
    gate_up = normal(device, dtype, experts, 2 * inner, hidden)
    ours, again, theirs = (Outputs(device, dtype, top_k, inner) for _ in range(3))
    rows = torch.tensor([3], device=device, dtype=row_id)

    def run(operation: Callable[..., None], to: Outputs, **tiles: object) -> None:
        given = (x, logits, rows, gate_up, to.act, to.weights, to.ids, renormalize)
        operation(*given, pdl=pdl, **tiles)

    run(cuda_gate_up.pair_gate_up, ours, tile=tile)
    run(cuda_gate_up.pair_gate_up, again, tile=tile)
    run(triton_pairs.pair_gate_up, theirs)
    chosen = ranked(logits[0], top_k)
    assert torch.equal(ours.ids[0].long(), chosen)
    assert torch.equal(ours.ids, theirs.ids)
    share = torch.softmax(logits[0].double(), -1)[chosen]
    share = share / share.sum() if renormalize else share
    assert error(ours.weights[0], share) < 1e-5
    assert error(ours.weights, theirs.weights) < 1e-5
    wanted = expected(x, gate_up, chosen)
    assert error(ours.act, wanted) < 2 * STEP[dtype]
    assert error(ours.act, theirs.act) < 2 * STEP[dtype]
    # Of every value by itself: one rounding, and what the sums in float32 lose.
    lost = (ours.act.double() - wanted).abs() - STEP[dtype] * wanted.abs()
    assert float(lost.max()) < 1e-4
    ours.check_ends()
    assert torch.equal(ours.act, again.act)  # the same bits at every run
    assert torch.equal(ours.weights, again.weights)

    for tensor in (x, logits):  # what padding has may be anything
        tensor.fill_(NAN)
    rows.fill_(-1)
    ours.acts.fill_(5.0)
    for tensor in (ours.all_weights, ours.all_ids):
        tensor.fill_(-7)
    run(cuda_gate_up.pair_gate_up, ours, tile=tile)
    assert (ours.acts == 5).all()  # of padding it is not written
    assert (ours.all_weights == torch.tensor([[0.0], [-7.0]], device=device)).all()
    assert (ours.all_ids == torch.tensor([[-1], [-7]], device=device)).all()


@pytest.mark.parametrize("experts", [128, 256, 512])
@pytest.mark.parametrize("what", ["ties", "zeros", "few", "nan", "all nan", "infinite", "any"])
def test_choice_of_experts(device, experts: int, what: str) -> None:
    """Every slot finds its expert, and the block of the routing finds the same."""
    hidden, inner, top_k = 256, 16, 10
    x = torch.randn(1, hidden, device=device, dtype=BF16)
    gate_up = normal(device, BF16, experts, 2 * inner, hidden)
    rows = torch.zeros(1, device=device, dtype=I64)
    for _ in range(4):
        logits = torch.randn(1, experts, device=device)
        order = torch.randperm(experts, device=device)
        if what == "ties":
            logits = logits.round()
        elif what == "zeros":  # of either sign, which are equal
            logits = torch.where(logits > 0, 0.0, -0.0)
        elif what == "few":  # two values, all experts of one lane among them
            logits.fill_(-1.5)
            logits[0, 32:40] = -1.25
        elif what == "nan":
            logits[0, order[top_k - 3 :]] = NAN
            logits[0, order[-experts // 2 :]] = -torch.inf
        elif what == "all nan":
            logits.fill_(NAN)
        elif what == "infinite":
            logits[0, order[:3]] = torch.inf
        ours = Outputs(device, BF16, top_k, inner)
        to = (ours.act, ours.weights, ours.ids)
        cuda_gate_up.pair_gate_up(x, logits, rows, gate_up, *to, True)
        chosen = ranked(logits[0], top_k)
        assert torch.equal(ours.ids[0].long(), chosen)
        assert error(ours.act, expected(x, gate_up, chosen)) < 2 * STEP[BF16]
        theirs = Outputs(device, BF16, top_k, inner)
        to = (theirs.act, theirs.weights, theirs.ids)
        triton_pairs.pair_gate_up(x, logits, rows, gate_up, *to, True)
        assert torch.equal(ours.ids, theirs.ids)
        if what in ("ties", "zeros", "few", "any"):
            assert error(ours.weights, theirs.weights) < 1e-5


def test_every_tile_gives_the_same_bits(device) -> None:
    hidden, inner, experts, top_k = 2048, 768, 128, 8
    x = torch.randn(1, hidden, device=device, dtype=BF16)
    logits = torch.randn(1, experts, device=device)
    gate_up = normal(device, BF16, experts, 2 * inner, hidden)
    rows = torch.zeros(1, device=device, dtype=I64)
    wanted = expected(x, gate_up, ranked(logits[0], top_k))
    others = (CudaGateUp(8, 4, 64), CudaGateUp(8, 8, 128), CudaGateUp(64, 24, 128))
    tiles = [tile for tile in (*CUDA_GATE_UPS, *others) if not unfit(tile, hidden, inner)]
    assert {tile.rows for tile in tiles} == set(cuda_gate_up.ROWS)
    first: Outputs | None = None
    for tile in tiles:
        ours = Outputs(device, BF16, top_k, inner)
        to = (ours.act, ours.weights, ours.ids)
        cuda_gate_up.pair_gate_up(x, logits, rows, gate_up, *to, True, tile=tile)
        ours.check_ends()
        assert error(ours.act, wanted) < 2 * STEP[BF16]
        first = ours if first is None else first
        assert torch.equal(ours.act, first.act), tile


def test_gates_far_from_zero(device) -> None:
    """Their exponential is infinite, or nothing."""
    hidden, inner, experts, top_k = 1024, 256, 128, 4
    x = 60 * torch.randn(1, hidden, device=device, dtype=BF16)
    logits = torch.randn(1, experts, device=device)
    gate_up = normal(device, BF16, experts, 2 * inner, hidden)
    ours = Outputs(device, BF16, top_k, inner)
    to = (ours.act, ours.weights, ours.ids)
    rows = torch.zeros(1, device=device, dtype=I64)
    cuda_gate_up.pair_gate_up(x, logits, rows, gate_up, *to, True)
    wanted = expected(x, gate_up, ranked(logits[0], top_k))
    gates = gate_up[ranked(logits[0], top_k)][:, :inner].double() @ x[0].double()
    assert float(gates.min()) < -100
    assert float(gates.max()) > 100
    assert ours.act.isfinite().all()
    assert error(ours.act, wanted) < 2 * STEP[BF16]
    assert float(ours.act[gates < -40].abs().max()) < 1e-9


@pytest.mark.parametrize("down", ["cuda", "triton"])
@pytest.mark.parametrize("sizes", [(2048, 512, 256, 8), (1024, 256, 512, 10)])
def test_layers_in_a_graph_give_the_bits_of_eager_ones(device, sizes, down) -> None:
    """norm_router, pair_gate_up, pair_down of three layers that share their buffers: who starts early reads
    nothing that is not there yet, and writes nothing that is still read."""
    hidden, inner, experts, top_k = sizes
    layers = [
        (
            torch.ones(hidden, device=device, dtype=BF16),
            normal(device, BF16, experts, hidden),
            normal(device, BF16, experts, 2 * inner, hidden),
            normal(device, BF16, experts, hidden, inner),
        )
        for _ in range(3)
    ]
    x = torch.randn(1, hidden, device=device, dtype=BF16)
    rows = torch.zeros(1, device=device, dtype=I64)
    normed, out = (poisoned(device, BF16, 1, hidden) for _ in range(2))
    logits = poisoned(device, torch.float32, 1, experts)
    made = Outputs(device, BF16, top_k, inner)
    kernels = cuda_down if down == "cuda" else triton_pairs

    def step(pdl: bool) -> None:
        stream = x
        for norm, router, gate_up, weights_down in layers:
            cuda_linear.norm_router(stream, norm, 1e-6, router, normed, logits, pdl=pdl)
            routing = (made.weights, made.ids)
            cuda_gate_up.pair_gate_up(
                normed, logits, rows, gate_up, made.act, *routing, True, pdl=pdl
            )
            kernels.pair_down(made.act, logits, rows, *routing, weights_down, out, True, pdl=pdl)
            stream = out

    def poison() -> None:
        for tensor in (normed, out, logits, made.acts, made.all_weights):
            tensor.fill_(NAN)
        made.all_ids.fill_(-7)

    def results() -> list[torch.Tensor]:
        torch.cuda.synchronize()
        made.check_ends()
        return [t.clone() for t in (normed, logits, made.act, made.weights, made.ids, out)]

    poison()
    step(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(True)
    for _ in range(5):
        x.copy_(torch.randn(1, hidden, device=device))
        poison()
        graph.replay()
        replayed = results()
        assert all(bool(t.isfinite().all()) for t in replayed)
        # Triton's pair_down chooses by itself where it starts early, and reads the routing otherwise.
        for pdl in (True, False) if down == "cuda" else (True,):
            poison()
            step(pdl)
            assert all(map(torch.equal, replayed, results()))
    # The last layer of the last replay against float64, from what the router gave it.
    _, _, gate_up, weights_down = layers[-1]
    found_normed, found_logits, act, weights, ids, found = replayed
    chosen = ranked(found_logits[0], top_k)
    assert torch.equal(ids[0].long(), chosen)
    assert error(act, expected(found_normed, gate_up, chosen)) < 2 * STEP[BF16]
    each = torch.einsum("khi,ki->kh", weights_down[chosen].double(), act.double())
    assert error(found[0], (weights[0].double()[:, None] * each).sum(0)) < 2 * STEP[BF16]
