"""Routed experts on ixformer's operations (a stand-in's) against a loop over tokens in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ixformer_standin
import pytest
import torch
from ixformer_standin import MOE_OPERATIONS, Misuse, installed
from test_experts import TOLERANCE, Case

from graphcap.moe.experts import fused_block_size
from graphcap.moe.kernels import Backend, ExpertKernels, expert_kernels
from graphcap.operations import Operation

BUILDS: dict[str, tuple[str, dict[str, Any]]] = {
    "0.4": ("0.4", {}),
    "0.4 without MoE": ("0.4", {"without": MOE_OPERATIONS}),
    "newer": ("newer", {}),
    "newer, merge missing": ("newer", {"without": ["moe_output_reduce_sum"]}),
    "newer, top-k renamed": (
        "newer",
        {"renamed": {"vllm_moe_topk_softmax": "moe_topk_softmax_v2"}},
    ),
    "newer, align missing": ("newer", {"without": ["vllm_moe_align_block_size"]}),
}
FUSED = [name for name in BUILDS if "without MoE" not in name and "align" not in name]

builds = pytest.mark.parametrize("build", BUILDS)
fused_builds = pytest.mark.parametrize("build", FUSED)


def kernels_of(build: str, **changes: Any) -> ExpertKernels:
    generation, own = BUILDS[build]
    with installed(generation, **own, **changes):
        return expert_kernels(Backend("ixformer", "tests"))


@builds
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
    build: str,
) -> None:
    Case(rows, top_k, experts, size, inner, dtype, renormalize, kernels_of(build)).check()


@builds
@pytest.mark.parametrize("pads", [[0], [1, 3], [4], [0, 1, 2, 3, 4]])
def test_pads_anywhere_give_zeros_and_change_no_other_row(pads: list[int], build: str) -> None:
    kernels = kernels_of(build)
    case, clean = (Case(5, 2, 4, 6, 3, kernels=kernels) for _ in range(2))
    expected = clean.run()
    case.row_ids[pads] = -1
    out = case.run()
    real = [row for row in range(5) if row not in pads]
    assert (out[pads] == 0).all()
    torch.testing.assert_close(out[real], expected[real], rtol=1e-5, atol=1e-6)
    case.hidden[pads] = float("nan")  # no pad of a step is, but its neighbours must not mind
    torch.testing.assert_close(case.run()[real], expected[real], rtol=1e-5, atol=1e-6)


@fused_builds
@pytest.mark.parametrize("row_dtype", [torch.int64, torch.int32])
def test_pads_read_no_further_expert(build: str, row_dtype: torch.dtype) -> None:
    """Each goes, with weight 0, where the first row goes; their logits may be NaN."""
    kernels = kernels_of(build)
    topk = kernels.topk_softmax
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(6, 9, generator=generator)
    logits[4:] = float("nan")
    rows = torch.tensor([0, -1, 2, 3, -1, -1], dtype=row_dtype)
    weights, ids = torch.full((6, 3), float("nan")), torch.full((6, 3), -77, dtype=torch.int32)
    args = (logits.clone(), rows, weights, ids, True)
    assert topk.scratch is not None
    scratch = {
        name: torch.full(shape, True if dtype == torch.bool else -55, dtype=dtype)
        for name, (shape, dtype) in topk.scratch(*args).items()
    }
    topk(*args, **scratch)
    best = torch.softmax(logits.double(), -1).topk(3)
    for row in (0, 2, 3):
        assert ids[row].tolist() == best.indices[row].tolist()
        share = best.values[row] / best.values[row].sum()
        torch.testing.assert_close(weights[row].double(), share, rtol=1e-6, atol=0)
    for row in (1, 4, 5):
        assert ids[row].tolist() == ids[0].tolist()
        assert weights[row].tolist() == [0, 0, 0]


@builds
def test_result_does_not_depend_on_what_the_frozen_pool_held(build: str) -> None:
    case = Case(5, 2, 4, 6, 3, kernels=kernels_of(build))
    case.row_ids[4] = -1
    expected = case.run()
    case.pool.freeze()
    before = case.pool.allocations
    for _ in range(2):
        case.pool.poison()
        assert torch.equal(case.run(), expected)
    assert case.pool.allocations == before


@builds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_is_added_to_every_row(build: str, dtype: torch.dtype) -> None:
    case = Case(5, 2, 4, 6, 3, dtype, kernels=kernels_of(build))
    case.row_ids[3] = -1
    residual = torch.randn(5, 6, generator=torch.Generator().manual_seed(3)).to(dtype)
    out = torch.full_like(case.hidden, float("nan"))
    with case.pool.step():
        case.layer(case.hidden, case.row_ids, out, residual)
        assert case.pool._held == {}
    expected = case.expected() + residual.double()
    tolerance = TOLERANCE[dtype]
    scale = float(expected.abs().max())
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * scale)
    assert torch.equal(out[3], residual[3])


@builds
def test_a_known_routing_gives_the_same(build: str) -> None:
    """`routed` is what a host calls that has chosen the experts itself."""
    case = Case(5, 2, 4, 6, 3, kernels=kernels_of(build))
    share = torch.softmax(case.hidden @ case.router.t(), -1)
    weights, order = share.topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.full_like(case.hidden, float("nan"))
    with case.pool.step():
        case.layer.routed(case.hidden, weights, order.int(), out)
        assert case.pool._held == {}
    torch.testing.assert_close(out, case.run(), rtol=1e-5, atol=1e-6)


@builds
def test_out_may_be_the_input_and_buffers_are_released(build: str) -> None:
    case = Case(5, 2, 4, 6, 3, kernels=kernels_of(build))
    expected = case.run()
    with case.pool.step():
        case.layer(case.hidden, case.row_ids, case.hidden)
        assert case.pool._held == {}
    assert torch.equal(case.hidden, expected)


def spied(build: str, name: str, seen: list[tuple[Any, ...]]) -> ExpertKernels:
    """Kernels of a build that note the arguments of one operation."""
    own = getattr(ixformer_standin.module_of(BUILDS[build][0]), name)

    def note(*args: Any) -> None:
        seen.append(args)
        own(*args)

    return kernels_of(build, replaced={name: note})


@pytest.mark.parametrize(
    ("rows", "top_k", "block"), [(8, 8, 32), (9, 8, 64), (128, 8, 64), (129, 8, 256), (1, 1, 32)]
)
def test_block_size_goes_by_the_number_of_pairs(rows: int, top_k: int, block: int) -> None:
    assert fused_block_size(rows * top_k) == block
    seen: list[tuple[Any, ...]] = []
    kernels = spied("newer", "vllm_invoke_fused_moe_kernel", seen)
    Case(rows, top_k, 8, 4, 2, kernels=kernels).check()
    assert len(seen) == 2
    for args in seen:
        assert args[10] == block
        assert args[11] is False  # persistent
        assert args[5].shape == (rows * top_k + 8 * (block - 1),)
        assert args[6].shape == (rows * top_k + 8,)


@pytest.mark.parametrize(
    ("build", "multiplied"), [("newer", False), ("newer, merge missing", True)]
)
def test_weights_are_applied_once(build: str, multiplied: bool) -> None:
    seen: list[tuple[Any, ...]] = []
    kernels = spied(build, "vllm_invoke_fused_moe_kernel", seen)
    Case(5, 2, 4, 6, 3, kernels=kernels).check()
    assert [args[8] for args in seen] == [False, multiplied]
    assert [args[9] for args in seen] == [2, 1]


@fused_builds
def test_every_argument_lies_in_the_pool(build: str) -> None:
    """Frozen, every tensor that an operation is given is a view of the arena, or the model's."""
    kernels = kernels_of(build)
    case = Case(5, 2, 4, 6, 3, kernels=kernels)
    case.run()
    case.pool.freeze()
    arena = case.pool.arena.untyped_storage().data_ptr()
    mine = (case.hidden, case.router, case.gate_up, case.down, case.row_ids)
    allowed = {arena, *(tensor.untyped_storage().data_ptr() for tensor in mine)}

    class Witness:
        def operation(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor):
                    seen.append(value.untyped_storage().data_ptr())
            op.function(*args, **kwargs)

    from graphcap.operations import observed_by

    seen: list[int] = []
    with case.pool.step(), observed_by(Witness()):
        case.layer(case.hidden, case.row_ids, case.hidden)
    assert len(seen) > 30
    assert set(seen) == allowed


def test_operations_that_synchronise_or_allocate_are_never_called() -> None:
    def refused(name: str) -> Callable[..., None]:
        def call(*_: Any, **__: Any) -> None:
            raise AssertionError(f"{name} was called")

        return call

    names = ("moe_topk_softmax", "moe_compute_token_index", "moe_w16a16_group_gemm")
    kernels = kernels_of("newer", replaced={name: refused(name) for name in names})
    Case(5, 2, 4, 6, 3, kernels=kernels).check()


def test_without_the_alignment_routing_is_the_stand_ins() -> None:
    """And says so: the lists of one and the GEMM of the other do not go together."""
    kernels = kernels_of("newer, align missing")
    assert kernels.fused is None
    by_operation = {choice.operation: choice for choice in kernels.choices()}
    align = by_operation["moe_align_block_size"]
    assert align.kernel == "torch"
    assert align.note == "ixformer.inference.functions has no vllm_moe_align_block_size"
    assert "bound only together" in by_operation["fused_moe"].note
    assert by_operation["silu_and_mul"].kernel == "ixformer: silu_and_mul"
    assert by_operation["silu_and_mul"].note == ""


def test_a_negative_expert_is_refused_by_the_alignment() -> None:
    """The stand-in raises where a card would write out of bounds."""
    case = Case(5, 2, 4, 6, 3, kernels=kernels_of("newer"))
    ids = torch.zeros(5, 2, dtype=torch.int32)
    ids[2] = -1
    with pytest.raises(Misuse, match="topk_ids: expected values of 0 to 3"), case.pool.step():
        case.layer.routed(case.hidden, torch.ones(5, 2), ids, torch.empty_like(case.hidden))
