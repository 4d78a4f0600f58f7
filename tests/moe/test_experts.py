"""Routed experts on the pool against a loop over tokens in float64."""

from __future__ import annotations

import pytest
import torch

from graphcap.moe.experts import RoutedExperts
from graphcap.moe.kernels import ExpertKernels, choose_backend, expert_kernels
from graphcap.pool import BufferPool

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Case:
    def __init__(
        self,
        rows: int,
        top_k: int,
        experts: int,
        size: int,
        inner: int,
        dtype: torch.dtype = torch.float32,
        renormalize: bool = True,
        kernels: ExpertKernels | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(rows * 100 + top_k)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.router, self.hidden = normal(experts, size), normal(rows, size)
        self.gate_up, self.down = normal(experts, 2 * inner, size), normal(experts, size, inner)
        self.top_k, self.renormalize, self.inner = top_k, renormalize, inner
        self.row_ids = torch.arange(rows)
        self.pool = BufferPool(CPU)
        self.layer = RoutedExperts(
            kernels or expert_kernels(choose_backend("reference", CPU)),
            self.pool,
            self.router,
            self.gate_up,
            self.down,
            top_k=top_k,
            renormalize=renormalize,
        )

    def run(self) -> torch.Tensor:
        out = torch.full_like(self.hidden, float("nan"))
        with self.pool.step():
            self.layer(self.hidden, self.row_ids, out)
        return out

    def expected(self) -> torch.Tensor:
        out = torch.zeros(self.hidden.shape, dtype=torch.float64)
        # The router's logits are rounded to the model's dtype, which can decide who is in the top-k.
        logits = (self.hidden @ self.router.t()).double()
        for row, identity in enumerate(self.row_ids.tolist()):
            if identity < 0:
                continue
            share = torch.softmax(logits[row], 0)
            best = sorted(range(len(share)), key=lambda e: -float(share[e]))[: self.top_k]
            total = share[best].sum() if self.renormalize else 1.0
            token = self.hidden[row].double()
            for expert in best:
                gate, up = (self.gate_up[expert].double() @ token).split(self.inner)
                inner = gate * torch.sigmoid(gate) * up
                out[row] += share[expert] / total * (self.down[expert].double() @ inner)
        return out

    def check(self) -> None:
        expected = self.expected()
        tolerance = TOLERANCE[self.hidden.dtype]
        scale = float(expected.abs().max())
        torch.testing.assert_close(
            self.run().double(), expected, rtol=tolerance, atol=tolerance * scale
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "size", "inner"),
    [(1, 1, 1, 1, 1), (1, 8, 16, 32, 8), (3, 1, 5, 7, 3), (17, 2, 3, 9, 5), (66, 3, 7, 11, 13)],
)
def test_equals_a_loop_over_tokens(
    rows: int,
    top_k: int,
    experts: int,
    size: int,
    inner: int,
    renormalize: bool,
    dtype: torch.dtype,
):
    Case(rows, top_k, experts, size, inner, dtype, renormalize).check()


@pytest.mark.parametrize("pads", [[0], [1, 3], [4], [0, 1, 2, 3, 4]])
def test_pads_anywhere_give_zeros_and_change_no_other_row(pads: list[int]):
    case, clean = Case(5, 2, 4, 6, 3), Case(5, 2, 4, 6, 3).run()
    case.row_ids[pads] = -1
    case.hidden[pads] = float("nan")
    out = case.run()
    real = [row for row in range(5) if row not in pads]
    assert (out[pads] == 0).all()
    torch.testing.assert_close(out[real], clean[real], rtol=1e-5, atol=1e-6)


def test_result_does_not_depend_on_what_the_frozen_pool_held():
    case = Case(5, 2, 4, 6, 3)
    case.row_ids[4] = -1
    expected = case.run()
    case.pool.freeze()
    before = case.pool.allocations
    for _ in range(2):
        case.pool.poison()
        assert torch.equal(case.run(), expected)
    assert case.pool.allocations == before


def test_out_may_be_the_input():
    case = Case(5, 2, 4, 6, 3)
    expected = case.run()
    with case.pool.step():
        case.layer(case.hidden, case.row_ids, case.hidden)
    assert torch.equal(case.hidden, expected)


def test_layers_share_bytes_and_the_plan_meets_its_lower_bound():
    one, other = Case(5, 2, 4, 6, 3), Case(5, 2, 4, 6, 3)
    other.layer._pool = one.pool
    out = torch.empty_like(one.hidden)
    with one.pool.step():
        one.layer(one.hidden, one.row_ids, out)
        other.layer(out, one.row_ids, out)
    plan = one.pool.freeze()
    single = Case(5, 2, 4, 6, 3)
    single.run()
    assert plan.total == single.pool.freeze().total
    assert plan.total <= 1.05 * plan.lower_bound


def test_every_buffer_is_released():
    case = Case(5, 2, 4, 6, 3)
    out = torch.empty_like(case.hidden)
    with case.pool.step():
        case.layer(case.hidden, case.row_ids, out)
        assert case.pool._held == {}
