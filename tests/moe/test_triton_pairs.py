"""The kernels that take pairs one by one, against float64, with everything unwritten poisoned."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import pytest
import torch
from triton_support import DEVICE, DTYPES, ON_GPU, assert_close, normal, poisoned, run, sizes

pytest.importorskip("triton", minversion="3.0")

from graphcap.moe.experts import RoutedExperts, few_pairs
from graphcap.moe.kernels import Backend, expert_kernels, triton_pairs
from graphcap.moe.kernels import triton as kernels
from graphcap.moe.kernels.triton_pairs import down_tile, gate_up_tile, routes_early
from graphcap.operations import Operation, observed_by
from graphcap.pool import BufferPool

NAN = float("nan")

SMALL = [
    # tokens, top-k, experts, hidden, inner: odd sizes, single elements, tiles in several pieces
    (1, 1, 1, 1, 1),
    (1, 3, 5, 40, 24),
    (2, 2, 3, 7, 5),
    (3, 5, 40, 72, 20),
    (1, 2, 4, 520, 6),
    (2, 3, 4, 8, 300),
    (1, 16, 20, 24, 33),
]
REAL = [
    (m, k, e, h, i)
    for m in (1, 2, 5, 8)
    for k, e, h, i in (
        (8, 256, 2048, 512),
        (8, 256, 2048, 256),
        (8, 128, 2048, 768),
        (10, 512, 2048, 512),
        (16, 512, 2880, 360),
    )
]


class Layer(NamedTuple):
    hidden: torch.Tensor
    logits: torch.Tensor
    row_ids: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    top_k: int


class Result(NamedTuple):
    act: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    out: torch.Tensor


def draw(m: int, k: int, e: int, h: int, i: int, dtype: torch.dtype, seed: int = 1) -> Layer:
    """Rows of `hidden` are part of wider ones whose remainder is NaN."""
    wide = torch.cat([normal(seed, m, h, dtype=dtype), poisoned(m, 8, dtype=dtype)], 1)
    return Layer(
        wide[:, :h],
        normal(seed + 1, m, e, scale=3.0),
        torch.arange(m, device=DEVICE),
        normal(seed + 2, e, 2 * i, h, dtype=dtype, scale=h**-0.5),
        normal(seed + 3, e, h, i, dtype=dtype, scale=i**-0.5),
        k,
    )


def compute(layer: Layer, renormalize: bool, early: bool = False) -> Result:
    """`early`: `pair_down` chooses the experts itself, as with one token where PDL is there."""
    (m, h), dtype, k = layer.hidden.shape, layer.hidden.dtype, layer.top_k
    act = poisoned(m * k, layer.down.shape[2], dtype=dtype)
    weights, ids = poisoned(m, k, dtype=torch.float32), poisoned(m, k, dtype=torch.int32)
    out = poisoned(m, h, dtype=dtype)
    routing = (layer.logits, layer.row_ids)
    run(
        kernels.pair_gate_up,
        layer.hidden,
        *routing,
        layer.gate_up,
        act,
        weights,
        ids,
        renormalize,
    )
    with mock.patch.object(triton_pairs, "routes_early", return_value=early):
        run(kernels.pair_down, act, *routing, weights, ids, layer.down, out, renormalize)
    return Result(act, weights, ids, out)


def choice(layer: Layer, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids by `topk_softmax`, which has its own tests."""
    shape = (layer.hidden.shape[0], layer.top_k)
    weights, ids = poisoned(*shape, dtype=torch.float32), poisoned(*shape, dtype=torch.int32)
    kernels.topk_softmax(layer.logits, layer.row_ids, weights, ids, renormalize)
    return weights, ids


def expected(
    layer: Layer, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations (M*K, I), NaN where nothing is computed, and outputs (M, H), in float64."""
    acts, outs = [], torch.zeros(layer.hidden.shape, dtype=torch.float64, device=DEVICE)
    for row, experts in enumerate(ids.tolist()):
        for slot, expert in enumerate(experts):
            if expert < 0:
                acts.append(poisoned(layer.down.shape[2], dtype=torch.float64))
                continue
            gate, up = (layer.gate_up[expert].double() @ layer.hidden[row].double()).chunk(2)
            acts.append(torch.nn.functional.silu(gate) * up)
            outs[row] += weights[row, slot].double() * (layer.down[expert].double() @ acts[-1])
    return torch.stack(acts), outs


def check(layer: Layer, renormalize: bool) -> Result:
    if len(layer.hidden) == 1:
        check_once(layer, renormalize, early=True)
    return check_once(layer, renormalize, early=False)


def check_once(layer: Layer, renormalize: bool, early: bool) -> Result:
    result = compute(layer, renormalize, early)
    weights, ids = choice(layer, renormalize)
    assert torch.equal(result.ids, ids)
    torch.testing.assert_close(result.weights, weights, equal_nan=True, rtol=1e-6, atol=0)
    acts, outs = expected(layer, weights, ids)
    kept = ids.flatten() >= 0
    assert result.act[~kept].isnan().all()
    assert_close(result.act[kept], acts[kept], layer.hidden.dtype)
    assert_close(result.out, outs, layer.hidden.dtype)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("m", "k", "e", "h", "i"), sizes(SMALL, REAL))
def test_pairs(
    m: int, k: int, e: int, h: int, i: int, renormalize: bool, dtype: torch.dtype
) -> None:
    check(draw(m, k, e, h, i, dtype, seed=m + k), renormalize)


@pytest.mark.parametrize(("m", "pads"), [(1, [0]), (2, [1]), (3, [0, 2])])
def test_pads_reach_no_expert_and_give_zeros(m: int, pads: list[int]) -> None:
    layer = draw(m, 3, 9, 24, 20, torch.float32)
    layer.row_ids[pads] = -1
    layer.hidden[pads] = NAN
    layer.logits[pads] = NAN
    result = check(layer, True)
    assert (result.out[pads] == 0).all()
    assert (result.ids[pads] == -1).all()
    assert (result.weights[pads] == 0).all()


@pytest.mark.parametrize("m", [1, 2])
def test_ties_go_to_the_lower_expert(m: int) -> None:
    layer = draw(m, 4, 6, 16, 8, torch.float32)
    layer.logits[:] = torch.tensor([-0.0, 2.0, 2.0, 0.0, 2.0, -0.0], device=DEVICE)
    assert check(layer, True).ids.tolist() == [[1, 2, 4, 0]] * m


@pytest.mark.parametrize("m", [1, 2])
def test_a_broken_row_names_existing_experts_and_gives_nan(m: int) -> None:
    layer = draw(m, 4, 5, 16, 8, torch.float32)
    layer.logits[m - 1] = torch.tensor([NAN, 1.0, 2.0, NAN, 0.0], device=DEVICE)
    result = compute(layer, False, early=m == 1)
    assert result.ids[m - 1].tolist() == [2, 1, 4, 0]
    assert result.out[m - 1].isnan().all()
    assert result.out[: m - 1].isfinite().all()


def test_all_pairs_may_share_experts() -> None:
    layer = draw(4, 2, 2, 24, 12, torch.float32)
    check(layer, True)


@pytest.mark.parametrize("m", [1, 3])
def test_results_are_the_same_every_time(m: int) -> None:
    layer = draw(m, 3, 9, 40, 24, torch.bfloat16)
    first, *others = (compute(layer, True, early=m == 1) for _ in range(3))
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def test_tiles() -> None:
    assert routes_early(1, True)
    assert not routes_early(1, False)
    assert not routes_early(2, True)
    assert gate_up_tile(2048, 2) == (1, 2048, 64)
    assert down_tile(1, 8, 512, 2) == (1, 512, 0)
    assert down_tile(2, 8, 512, 2) == (2, 512, 0)
    for size in (1, 8, 40, 256, 360, 512, 768, 2048, 2880, 4096, 7168, 14336):
        for itemsize in (2, 4):
            rows, depth, _ = gate_up_tile(size, itemsize)
            assert rows * depth * itemsize <= 4096
            assert depth <= 256 or size % depth == 0
            for tokens in (1, 8):
                for k in (1, 2, 6, 8, 10, 16):
                    rows, depth, _ = down_tile(tokens, k, size, itemsize)
                    # Registers: a warp holds 8 KiB in 64 of each thread.
                    assert rows * depth * k * itemsize <= (8192 if tokens == 1 else 16384)
                    assert depth <= 256 or size % depth == 0


# -- the layer -----------------------------------------------------------------------------------


class Names:
    """Notes the operations of a step and runs them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def operation(self, operation: Operation, args: tuple, kwargs: dict) -> None:
        self.names.append(operation.name)
        with observed_by(None):
            operation(*args, **kwargs)


BY_PAIR = ["router GEMM", "pair_gate_up", "pair_down"]
BY_EXPERT = [
    "router GEMM",
    "topk_softmax",
    "moe_align_block_size",
    "fused_moe w1",
    "silu_and_mul",
    "fused_moe w2",
    "merge",
]


class Routed:
    """`RoutedExperts` on the Triton kernels, E = 24 and K = 3: by pair up to 4 tokens."""

    limit = 4

    def __init__(self, dtype: torch.dtype = torch.float32, renormalize: bool = True) -> None:
        self.pool = BufferPool(DEVICE)
        drawn = draw(1, 3, 24, 40, 16, dtype)
        self.router = normal(9, 24, 40, dtype=dtype)
        self.gate_up, self.down, self.renormalize = drawn.gate_up, drawn.down, renormalize
        self.layer = RoutedExperts(
            expert_kernels(Backend("triton", "tests")),
            self.pool,
            self.router,
            drawn.gate_up,
            drawn.down,
            top_k=3,
            renormalize=renormalize,
        )

    def inputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The last row of several is padding."""
        hidden = normal(rows, rows, 40, dtype=self.router.dtype)
        row_ids = torch.arange(rows, device=DEVICE)
        if rows > 1:
            hidden[-1], row_ids[-1] = NAN, -1
        return hidden, row_ids

    def run(self, rows: int) -> torch.Tensor:
        hidden, row_ids = self.inputs(rows)
        out = torch.full_like(hidden, NAN)
        with self.pool.step():
            self.layer(hidden, row_ids, out)
            assert self.pool._held == {}
        return out

    def check(self, rows: int) -> None:
        hidden, row_ids = self.inputs(rows)
        # The router's own logits, whose rounding to the model's dtype has a test of its own.
        logits = torch.empty(rows, self.router.shape[0], device=DEVICE)
        kernels.router_gemm(hidden, self.router, logits)
        layer = Layer(hidden, logits, row_ids, self.gate_up, self.down, 3)
        _, outs = expected(layer, *choice(layer, self.renormalize))
        assert_close(self.run(rows), outs, hidden.dtype)


@pytest.mark.parametrize(("renormalize", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_every_batch_up_to_the_limit_and_beyond(renormalize: bool, dtype: torch.dtype) -> None:
    routed = Routed(dtype, renormalize)
    for rows in range(1, Routed.limit + 2):
        routed.check(rows)


def test_the_number_of_tokens_chooses_the_schedule() -> None:
    routed = Routed()
    for rows in (1, Routed.limit, Routed.limit + 1):
        seen = Names()
        with observed_by(seen):
            routed.run(rows)
        assert seen.names == (BY_PAIR if rows <= Routed.limit else BY_EXPERT)


def test_few_pairs() -> None:
    assert few_pairs(1, 8, 8)
    assert few_pairs(16, 8, 256)
    assert not few_pairs(17, 8, 256)
    assert not few_pairs(2, 8, 8)


@pytest.mark.parametrize("order", [[1, 4, 9], [9, 4, 1]])
def test_schedules_share_a_frozen_pool(order: list[int]) -> None:
    routed = Routed()
    wanted = {rows: routed.run(rows) for rows in order}
    plan = routed.pool.freeze()
    assert plan.total <= 1.05 * plan.lower_bound
    before = routed.pool.allocations
    for rows in [*order, *order]:
        routed.pool.poison()
        assert torch.equal(routed.run(rows), wanted[rows])
    assert routed.pool.allocations == before


def test_a_pool_planned_by_one_schedule_alone_serves_its_smaller_batches() -> None:
    routed = Routed()
    wanted = {rows: routed.run(rows) for rows in (4, 2, 1)}
    routed.pool.freeze()
    for rows in (1, 2, 4):
        routed.pool.poison()
        assert torch.equal(routed.run(rows), wanted[rows])


@pytest.mark.parametrize("rows", [1, 3])
def test_out_may_be_the_input(rows: int) -> None:
    routed = Routed()
    wanted = routed.run(rows)
    hidden, row_ids = routed.inputs(rows)
    with routed.pool.step():
        routed.layer(hidden, row_ids, hidden)
    assert torch.equal(hidden, wanted)


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("m", [1, 2, 8])
def test_layers_in_a_graph_equal_single_launches(m: int) -> None:
    """Launched one upon the other, with foreign kernels between some: whoever started too early or
    wrote too early would be seen."""
    k, e, h, i, depth = 8, 256, 2048, 512, 6
    layers = [draw(m, k, e, h, i, torch.bfloat16, seed=10 * n) for n in range(2)]
    router = [normal(50 + n, e, h, dtype=torch.bfloat16, scale=h**-0.5) for n in range(2)]
    pool = BufferPool(DEVICE)
    experts = [
        RoutedExperts(
            expert_kernels(Backend("triton", "tests")),
            pool,
            router[n],
            layers[n].gate_up,
            layers[n].down,
            top_k=k,
            renormalize=True,
        )
        for n in range(2)
    ]
    start = torch.empty(m, h, dtype=torch.bfloat16, device=DEVICE)
    outs = [torch.empty_like(start) for _ in range(depth)]

    def step(pause: bool) -> None:
        value = start
        with pool.step():
            for n, out in enumerate(outs):
                experts[n % 2](value, layers[0].row_ids, out)
                if pause:
                    torch.cuda.synchronize()
                if n % 3 == 2:
                    out.mul_(8.0)
                if pause:
                    torch.cuda.synchronize()
                value = out

    start.normal_()
    step(pause=True)
    pool.freeze()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(pause=False)
    for seed in range(5):
        start.copy_(normal(seed, m, h, dtype=torch.bfloat16))
        step(pause=True)
        wanted = [out.clone() for out in outs]
        assert all(out.isfinite().all() and out.any() for out in wanted)
        for _ in range(20):
            for out in outs:
                out.fill_(NAN)
            pool.poison()
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(x, y) for x, y in zip(outs, wanted, strict=True))
