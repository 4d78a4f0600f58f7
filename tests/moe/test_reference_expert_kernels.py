"""The reference kernels: against float64, without allocation, and on either kind of device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import memory_events

from graphcap.errors import BackendError
from graphcap.moe.experts import block_size_m, sorted_length
from graphcap.moe.kernels import choose_backend, expert_kernels, reference, reference_align
from graphcap.operations import Operation

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else 1, dtype=dtype)


def bound(op: Operation, *args: Any) -> Callable[[], None]:
    """The call with the scratch that it declares, poisoned."""
    plan = {} if op.scratch is None else op.scratch(*args)
    scratch = {name: poisoned(*spec) for name, spec in plan.items()}
    return lambda: op(*args, **scratch)


def route(rows: int, experts: int, top_k: int, pads: int = 0, seed: int = 0) -> torch.Tensor:
    scores = torch.rand(rows, experts, generator=torch.Generator().manual_seed(seed))
    ids = scores.topk(top_k, 1)[1].to(torch.int32)
    ids[rows - pads :] = -1
    return ids


def aligned(ids: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, ...]:
    length = sorted_length(ids.numel(), experts, block)
    sorted_ids = torch.full((length,), -7, dtype=torch.int32)
    expert_ids = torch.full((-(-length // block),), -7, dtype=torch.int32)
    count = torch.full((1,), -7, dtype=torch.int32)
    bound(reference.align, ids, sorted_ids, expert_ids, count, experts, block)()
    return sorted_ids, expert_ids, count


def on_device_scratch(op: Operation, args: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """The scratch that `op` declares on a CUDA device, on the CPU."""

    class OnCuda:
        """An argument that says it lies on a CUDA device."""

        device = torch.device("cuda")

        def __init__(self, tensor: torch.Tensor) -> None:
            self._tensor = tensor

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tensor, name)

    assert op.scratch is not None
    plan = op.scratch(*[OnCuda(a) if isinstance(a, torch.Tensor) else a for a in args])
    return {name: poisoned(*spec) for name, spec in plan.items()}


# -- each against float64 ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "experts", "size"), [(1, 3, 7), (5, 8, 16), (33, 5, 9)])
def test_router_gemm(rows: int, experts: int, size: int, dtype: torch.dtype):
    hidden, weight = normal(rows, size, dtype=dtype), normal(experts, size, dtype=dtype, seed=1)
    logits = torch.full((rows, experts), float("nan"))
    bound(reference.router_gemm, hidden, weight, logits)()
    expected = hidden.double() @ weight.double().t()
    torch.testing.assert_close(
        logits.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    assert torch.equal(logits, logits.to(dtype).float())  # rounded to the model's dtype


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k"), [(1, 1, 1), (4, 5, 1), (7, 9, 9), (3, 64, 8)]
)
def test_topk_softmax(rows: int, experts: int, top_k: int, renormalize: bool):
    logits = normal(rows, experts)
    row_ids = torch.arange(rows)
    row_ids[rows // 2] = -1
    weights = torch.full((rows, top_k), float("nan"))
    ids = torch.full((rows, top_k), -7, dtype=torch.int32)
    bound(reference.topk_softmax, logits, row_ids, weights, ids, renormalize)()
    for row in range(rows):
        if row == rows // 2:
            assert ids[row].tolist() == [-1] * top_k
            assert weights[row].tolist() == [0.0] * top_k
            continue
        share = torch.softmax(logits[row].double(), 0)
        best = sorted(range(experts), key=lambda e: -share[e].item())[:top_k]
        assert ids[row].tolist() == best
        expected = share[best] / (share[best].sum() if renormalize else 1)
        torch.testing.assert_close(weights[row].double(), expected, rtol=1e-5, atol=1e-7)


def test_of_equal_scores_the_lower_expert_comes_first():
    logits = torch.tensor([[0.0, 2.0, 2.0, 0.0, 2.0]])
    weights, ids = torch.empty(1, 4), torch.empty(1, 4, dtype=torch.int32)
    bound(reference.topk_softmax, logits, torch.zeros(1, dtype=torch.int64), weights, ids, True)()
    assert ids.tolist() == [[1, 2, 4, 0]]


def test_pad_logits_of_nan_reach_no_expert():
    logits = torch.tensor([[1.0, 2.0], [float("nan"), float("nan")]])
    weights, ids = torch.empty(2, 2), torch.empty(2, 2, dtype=torch.int32)
    bound(reference.topk_softmax, logits, torch.tensor([5, -1]), weights, ids, True)()
    assert ids[1].tolist() == [-1, -1]
    assert weights[1].tolist() == [0, 0]
    assert weights.isfinite().all()


@settings(max_examples=60)
@given(st.data())
def test_align_groups_every_real_pair_once_in_whole_blocks(data: st.DataObject):
    experts = data.draw(st.integers(1, 12))
    block = data.draw(st.sampled_from([1, 2, 3, 16]))
    rows, top_k = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 4))
    chosen = data.draw(
        st.lists(st.integers(-1, experts - 1), min_size=rows * top_k, max_size=rows * top_k)
    )
    ids = torch.tensor(chosen, dtype=torch.int32).view(rows, top_k)
    sorted_ids, expert_ids, count = aligned(ids, experts, block)
    used = int(count)
    assert used % block == 0
    # Never more than there is room for, and the rest is marked unused.
    assert used <= len(sorted_ids)
    assert (sorted_ids[used:] == len(chosen)).all()
    assert (expert_ids[used // block :] == -1).all()
    listed = []
    for index in range(used // block):
        expert = int(expert_ids[index])
        pairs = sorted_ids[index * block : (index + 1) * block].tolist()
        real = [p for p in pairs if p < len(chosen)]
        assert real
        assert pairs == real + [len(chosen)] * (block - len(real))
        assert all(chosen[p] == expert for p in real)
        listed += [(expert, p) for p in real]
    assert listed == sorted((e, p) for p, e in enumerate(chosen) if e >= 0)


@settings(max_examples=60)
@given(st.data())
def test_align_on_a_device_equals_align_on_the_host(data: st.DataObject):
    experts = data.draw(st.integers(1, 12))
    block = data.draw(st.sampled_from([1, 4, 16]))
    rows, top_k = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    chosen = data.draw(
        st.lists(st.integers(-1, experts - 1), min_size=rows * top_k, max_size=rows * top_k)
    )
    ids = torch.tensor(chosen, dtype=torch.int32).view(rows, top_k)
    host = aligned(ids, experts, block)
    device = tuple(torch.full_like(t, -7) for t in host)
    args = (ids, *device, experts, block)
    reference_align._align_on_device(*args, **on_device_scratch(reference.align, args))
    for theirs, ours in zip(device, host, strict=True):
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pads", [0, 2])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(3, 5, 1), (5, 3, 2), (9, 11, 3)])
def test_expert_gemm_on_host_and_device(
    rows: int, experts: int, top_k: int, second: bool, pads: int, dtype: torch.dtype
):
    block, width, depth = 4, 10, 7
    ids = route(rows, experts, top_k, pads)
    routing = aligned(ids, experts, block)
    weight = normal(experts, width, depth, dtype=dtype, seed=1)
    per_row = 1 if second else top_k
    a = normal(rows * top_k if second else rows, depth, dtype=dtype)
    if second and pads:
        a[-pads * top_k :] = float("nan")  # nobody wrote them
    out = torch.full((rows * top_k, width), float("nan"), dtype=dtype)
    bound(reference.expert_gemm, a, weight, *routing, out, per_row, block)()
    other = torch.full_like(out, float("nan"))
    args = (a, weight, *routing, other, per_row, block)
    scratch = on_device_scratch(reference.expert_gemm, args)
    pairs, row_of_pair = scratch["pairs"], scratch["row_of_pair"]
    pairs.copy_(routing[0])
    torch.div(pairs, per_row, rounding_mode="floor", out=row_of_pair)
    reference._gemm_on_device(a, weight, routing[1], other, block, pairs, row_of_pair, scratch)
    assert scratch["rows"].shape == (block, depth)  # the pool's views keep their shape
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert < 0:
            continue
        expected = weight[expert].double() @ a[pair // per_row].double()
        for result in (out, other):
            torch.testing.assert_close(
                result[pair].double(), expected, rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype]
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype):
    gate_up, out = normal(5, 14, dtype=dtype), torch.empty(5, 7, dtype=dtype)
    bound(reference.silu_and_mul, gate_up, out)()
    gate, up = gate_up.double().chunk(2, 1)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_leaves_out_dropped_pairs_whatever_they_hold(dtype: torch.dtype):
    pairs, weights = normal(3, 2, 5, dtype=dtype), torch.rand(3, 2)
    ids = torch.tensor([[0, 1], [1, -1], [-1, -1]], dtype=torch.int32)
    pairs[1, 1], pairs[2] = float("nan"), float("inf")
    out = torch.full((3, 5), float("nan"), dtype=dtype)
    bound(reference.merge, pairs, weights, ids, out)()
    first = (pairs[0].double() * weights[0, :, None].double()).sum(0)
    second = pairs[1, 0].double() * weights[1, 0].double()
    expected = torch.stack([first, second, torch.zeros(5, dtype=torch.float64)])
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "block"), [(1, 16), (16, 16), (17, 32), (64, 32), (65, 64), (4096, 64)]
)
def test_block_size_rule(tokens: int, block: int):
    assert block_size_m(tokens) == block


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.sampled_from([1, 2, 16, 64]))
def test_sorted_length_is_never_too_short(chosen: list[int], block: int):
    groups = [chosen.count(expert) for expert in range(10)]
    needed = sum(-(-size // block) * block for size in groups)
    assert needed <= sorted_length(len(chosen), 10, block)


@pytest.mark.parametrize(("pairs", "experts", "block"), [(40, 10, 16), (3, 10, 16), (10, 10, 4)])
def test_sorted_length_is_no_longer_than_the_worst_case(pairs: int, experts: int, block: int):
    """Worst case: as many groups as can be hold one pair more than whole blocks do."""
    groups = [0] * experts
    for index in range(min(pairs, experts)):
        groups[index] = 1
    rest = pairs - sum(groups)
    groups[0] += rest // block * block
    worst = sum(-(-size // block) * block for size in groups)
    assert worst <= sorted_length(pairs, experts, block) < worst + block


# -- no allocation -------------------------------------------------------------------------------


def calls(dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    rows, experts, top_k, size, inner, block = 5, 6, 2, 8, 4, 16
    ids = route(rows, experts, top_k, pads=1)
    routing = aligned(ids, experts, block)
    hidden = normal(rows, size, dtype=dtype)
    pairs = rows * top_k
    gate_up = torch.zeros(pairs, 2 * inner, dtype=dtype)
    narrow = torch.zeros(pairs, inner, dtype=dtype)
    wide = torch.zeros(rows, top_k, size, dtype=dtype)
    weights = torch.rand(rows, top_k)
    kernels = expert_kernels(choose_backend("reference", CPU))
    w1 = normal(experts, 2 * inner, size, dtype=dtype)
    w2 = normal(experts, size, inner, dtype=dtype)
    router = normal(experts, size, dtype=dtype)
    logits = normal(rows, experts)
    row_ids = torch.arange(rows)
    flat = wide.view(pairs, size)
    return {
        "router_gemm": bound(kernels.router_gemm, hidden, router, logits),
        "topk_softmax": bound(kernels.topk_softmax, logits, row_ids, weights, ids.clone(), True),
        "align": bound(kernels.align, ids, *routing, experts, block),
        "gemm 1": bound(kernels.expert_gemm, hidden, w1, *routing, gate_up, top_k, block),
        "silu_and_mul": bound(kernels.silu_and_mul, gate_up, narrow),
        "gemm 2": bound(kernels.expert_gemm, narrow, w2, *routing, flat, 1, block),
        "merge": bound(kernels.merge, wide, weights, ids, torch.zeros(rows, size, dtype=dtype)),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(calls(torch.float32)))
def test_given_scratch_nothing_is_allocated(name: str, dtype: torch.dtype):
    call = calls(dtype)[name]
    call()
    assert memory_events(call) == 0


# -- backends ------------------------------------------------------------------------------------


def test_cpu_runs_the_reference():
    backend = choose_backend("auto", CPU)
    assert backend.name == "reference"
    assert "cpu" in backend.why
    assert expert_kernels(backend).name == "reference"


@pytest.mark.parametrize("wanted", ["vllm", "ixformer"])
def test_backends_that_cannot_serve_are_refused_by_name(wanted: str):
    with pytest.raises(BackendError, match=f"GRAPHCAP_KERNELS={wanted}.*use auto"):
        choose_backend(wanted, CPU)


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="use auto or reference"):
        choose_backend("triton", CPU)
