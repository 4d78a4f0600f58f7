"""The Triton kernels of the MoE layer against float64, with everything unwritten poisoned."""

from __future__ import annotations

import pytest
import torch
from triton_support import DEVICE, DTYPES, assert_close, generator, normal, poisoned, sizes

pytest.importorskip("triton", minversion="3.0")

from graphcap.moe.kernels import triton as kernels
from graphcap.moe.kernels.triton_align import PAIRWISE_MAX
from graphcap.moe.kernels.triton_gemm import PROGRAMS_WANTED, ROWWISE_MAX, expert_tile, router_tile

REAL = [
    (m, k, e, h, i) for m in (1, 8, 32) for k, e, h, i in ((8, 256, 2048, 512), (8, 128, 2048, 768))
]


def random_ids(seed: int, m: int, k: int, e: int, dropped: float = 0.2) -> torch.Tensor:
    """Expert ids (M, K), repeats allowed, some of them -1."""
    ids = torch.randint(0, e, (m, k), generator=generator(seed), dtype=torch.int32)
    ids[torch.rand(m, k, generator=generator(seed + 1)) < dropped] = -1
    return ids.to(DEVICE)


def aligned_sizes(pairs: int, e: int, block: int) -> tuple[int, int]:
    capacity = min(pairs + e * (block - 1), pairs * block)
    return capacity, -(-capacity // block)


def reference_align(ids: torch.Tensor, e: int, block: int) -> tuple[list[int], list[int]]:
    """The used entries of sorted_ids and expert_ids."""
    flat = ids.flatten().tolist()
    order: list[int] = []
    owners: list[int] = []
    for expert in range(e):
        group = [p for p, owner in enumerate(flat) if owner == expert]
        group += [len(flat)] * (-len(group) % block)
        order += group
        owners += [expert] * (len(group) // block)
    return order, owners


def run_align(
    ids: torch.Tensor, e: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    capacity, blocks = aligned_sizes(ids.numel(), e, block)
    order = poisoned(capacity, dtype=torch.int32)
    owners = poisoned(blocks, dtype=torch.int32)
    count = poisoned(1, dtype=torch.int32)
    kernels.align(ids, order, owners, count, e, block)
    return order, owners, count


def check_align(ids: torch.Tensor, e: int, block: int) -> None:
    order, owners, count = run_align(ids, e, block)
    expected_order, expected_owners = reference_align(ids, e, block)
    assert count.tolist() == [len(expected_order)]
    unused = [ids.numel()] * (len(order) - len(expected_order))
    assert order.tolist() == expected_order + unused
    assert owners.tolist() == expected_owners + [-1] * (len(owners) - len(expected_owners))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "e", "h"),
    sizes(
        [(1, 2, 8), (1, 5, 24), (ROWWISE_MAX, 33, 72), (ROWWISE_MAX + 1, 7, 40), (19, 20, 136)],
        [(m, e, 2048) for m in (1, 8, 9, 32, 512) for e in (128, 256, 512)],
    ),
)
def test_router_gemm(m: int, e: int, h: int, dtype: torch.dtype) -> None:
    # A view of wider rows whose remainder is NaN.
    wide = torch.cat([normal(1, m, h, dtype=dtype), poisoned(m, 8, dtype=dtype)], 1)
    hidden = wide[:, :h]
    weight = normal(2, e, h, dtype=dtype)
    logits = poisoned(m, e, dtype=torch.float32)
    kernels.router_gemm(hidden, weight, logits)
    exact = hidden.double() @ weight.double().T
    # One unit in the last place: the interpreter truncates where the device rounds.
    assert bool(((logits - exact).abs() <= exact.abs() * torch.finfo(dtype).eps + 1e-4).all())
    assert torch.equal(logits, logits.to(dtype).float())  # rounded to the model's dtype


def test_router_gemm_keeps_a_poisoned_row_to_itself() -> None:
    for m in (ROWWISE_MAX, ROWWISE_MAX + 1):
        hidden, weight = normal(1, m, 48), normal(2, 6, 48)
        hidden[m - 1] = float("nan")
        logits = poisoned(m, 6, dtype=torch.float32)
        kernels.router_gemm(hidden, weight, logits)
        assert_close(logits[:-1], hidden[:-1].double() @ weight.double().T, torch.float32)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("m", "k", "e"),
    sizes(
        [(1, 1, 2), (3, 2, 2), (5, 3, 7), (4, 8, 100), (2, 16, 512), (2, 10, 33)],
        [(m, 8, e) for m in (1, 32, 512) for e in (128, 256)],
    ),
)
def test_topk_softmax(m: int, k: int, e: int, renormalize: bool) -> None:
    logits = normal(m * e, m, e, scale=3.0)
    row_ids = torch.arange(m, device=DEVICE)
    weights = poisoned(m, k, dtype=torch.float32)
    ids = poisoned(m, k, dtype=torch.int32)
    kernels.topk_softmax(logits, row_ids, weights, ids, renormalize)
    expected, expected_ids = torch.softmax(logits.double(), -1).topk(k)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(ids.long(), expected_ids)
    assert_close(weights, expected, torch.float32)


def test_topk_softmax_breaks_ties_by_the_lower_expert() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [-0.0, 0.0, -0.0, 0.0, -1.0]], device=DEVICE)
    weights = poisoned(2, 4, dtype=torch.float32)
    ids = poisoned(2, 4, dtype=torch.int32)
    kernels.topk_softmax(
        logits, torch.zeros(2, dtype=torch.int64, device=DEVICE), weights, ids, True
    )
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


def test_topk_softmax_pads_reach_no_expert() -> None:
    logits = normal(3, 4, 9)
    logits[1] = float("nan")
    logits[3] = float("inf")
    row_ids = torch.tensor([0, -1, 7, -5], device=DEVICE)
    weights = poisoned(4, 3, dtype=torch.float32)
    ids = poisoned(4, 3, dtype=torch.int32)
    kernels.topk_softmax(logits, row_ids, weights, ids, False)
    assert ids[[1, 3]].tolist() == [[-1] * 3] * 2
    assert weights[[1, 3]].tolist() == [[0.0] * 3] * 2
    expected, expected_ids = torch.softmax(logits[[0, 2]].double(), -1).topk(3)
    assert torch.equal(ids[[0, 2]].long(), expected_ids)
    assert_close(weights[[0, 2]], expected, torch.float32)


def test_topk_softmax_names_existing_experts_even_for_a_broken_row() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [[nan] * 5, [-inf, -inf, -inf, 1.0, -inf], [nan, 1.0, 2.0, -nan, 0.0]], device=DEVICE
    )
    rows = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    weights = poisoned(3, 4, dtype=torch.float32)
    ids = poisoned(3, 4, dtype=torch.int32)
    kernels.topk_softmax(logits, rows, weights, ids, False)
    assert ids.tolist() == [[0, 1, 2, 3], [3, 0, 1, 2], [2, 1, 4, 0]]
    assert weights[1].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert weights[[0, 2]].isnan().all()


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize(
    ("m", "k", "e"),
    sizes(
        [(1, 1, 2), (1, 8, 256), (3, 5, 7), (16, 8, 40), (17, 8, 5), (33, 16, 100), (130, 1, 2)],
        [(m, 8, e) for m in (1, 8, 16, 17, 32, 128, 512) for e in (128, 256, 512)],
    ),
)
def test_align(m: int, k: int, e: int, block: int) -> None:
    check_align(random_ids(m * k, m, k, e), e, block)


@pytest.mark.parametrize("m", [2, PAIRWISE_MAX])
def test_align_extremes(m: int) -> None:
    """All pairs dropped; all to one expert; the last expert alone; a sequence known to repeat."""
    for fill in (-1, 0, 4):
        ids = torch.full((m, 2), fill, dtype=torch.int32, device=DEVICE)
        check_align(ids, 5, 16)
    ids = (torch.arange(2 * m, dtype=torch.int32, device=DEVICE) % 5).view(m, 2)
    check_align(ids, 5, 16)


def test_align_takes_several_chunks() -> None:
    check_align(random_ids(5, 150, 16, 3), 3, 16)


def test_align_fills_whatever_it_is_given() -> None:
    """Buffers planned for a larger bucket are written to their end."""
    ids = random_ids(7, 2, 2, 4)
    order = poisoned(700, dtype=torch.int32)
    owners = poisoned(300, dtype=torch.int32)
    count = poisoned(1, dtype=torch.int32)
    kernels.align(ids, order, owners, count, 4, 16)
    assert (order[int(count) :] == 4).all()
    assert (owners[int(count) // 16 :] == -1).all()


def reference_experts(a: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, per_row: int):
    """out[p] in float64, NaN where the pair was dropped."""
    flat = ids.flatten().long()
    rows = a.double()[torch.arange(len(flat), device=a.device) // per_row]
    out = torch.full((len(flat), weight.shape[1]), float("nan"), dtype=torch.float64, device=DEVICE)
    for expert in flat.unique().tolist():
        if expert >= 0:
            mine = flat == expert
            out[mine] = rows[mine] @ weight[expert].double().T
    return out


def check_expert_gemm(
    ids: torch.Tensor, e: int, n: int, c: int, block: int, dtype: torch.dtype, per_row: int
) -> None:
    m, k = ids.shape
    rows = m * k // per_row
    a = torch.cat([normal(1, rows, c, dtype=dtype), poisoned(rows, 8, dtype=dtype)], 1)[:, :c]
    dropped = (ids < 0).view(rows, -1).all(1)
    a[dropped] = float("nan")
    weight = normal(2, e, n, c, dtype=dtype, scale=c**-0.5)
    order, owners, count = run_align(ids, e, block)
    out = poisoned(m * k, n, dtype=dtype)
    kernels.expert_gemm(a, weight, order, owners, count, out, per_row, block)
    expected = reference_experts(a, weight, ids, per_row)
    kept = ids.flatten() >= 0
    assert out[~kept].isnan().all()
    assert_close(out[kept], expected[kept], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize(
    ("m", "k", "e", "n", "c"),
    sizes(
        [(1, 1, 2, 8, 8), (5, 3, 7, 72, 40), (3, 4, 5, 64, 128)],
        [(m, k, e, 2 * i, h) for m, k, e, h, i in REAL] + [(512, 8, 128, 1536, 2048)],
    ),
)
def test_first_expert_gemm(
    m: int, k: int, e: int, n: int, c: int, block: int, dtype: torch.dtype
) -> None:
    check_expert_gemm(random_ids(m, m, k, e), e, n, c, block, dtype, per_row=k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "k", "e", "n", "c"),
    sizes([(7, 3, 3, 40, 24), (1, 8, 16, 136, 16)], [(m, k, e, h, i) for m, k, e, h, i in REAL]),
)
def test_second_expert_gemm(m: int, k: int, e: int, n: int, c: int, dtype: torch.dtype) -> None:
    check_expert_gemm(random_ids(m + 50, m, k, e), e, n, c, 16, dtype, per_row=1)


def test_expert_gemm_with_many_pairs_for_one_expert() -> None:
    ids = torch.zeros(20, 2, dtype=torch.int32, device=DEVICE)
    check_expert_gemm(ids, 3, 24, 32, 16, torch.float32, per_row=2)


def test_expert_gemm_without_any_pair_writes_nothing() -> None:
    ids = torch.full((3, 2), -1, dtype=torch.int32, device=DEVICE)
    check_expert_gemm(ids, 3, 24, 32, 16, torch.float32, per_row=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width"), sizes([(1, 8), (5, 24), (3, 520)], [(8, 512), (256, 768)])
)
def test_silu_and_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    x = normal(rows, rows, 2 * width, dtype=dtype, scale=4.0)
    out = poisoned(rows, width, dtype=dtype)
    kernels.silu_and_mul(x, out)
    gate, up = x.double().chunk(2, -1)
    assert_close(out, torch.nn.functional.silu(gate) * up, dtype)


def test_silu_and_mul_of_large_values_stays_finite() -> None:
    x = torch.tensor([[-1000.0, 1000.0, 2.0, 3.0]], device=DEVICE)
    out = poisoned(1, 2, dtype=torch.float32)
    kernels.silu_and_mul(x, out)
    assert out.tolist() == [[0.0, 3000.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "k", "h"), sizes([(1, 1, 8), (4, 3, 40), (2, 16, 264)], [(1, 8, 2048), (32, 8, 2048)])
)
def test_merge(m: int, k: int, h: int, dtype: torch.dtype) -> None:
    pairs = normal(h, m, k, h, dtype=dtype)
    weights = normal(k, m, k).abs()
    ids = random_ids(h, m, k, 5)
    ids[m - 1] = -1
    pairs[ids < 0] = float("nan")
    weights[ids < 0] = float("nan")
    out = poisoned(m, h, dtype=dtype)
    kernels.merge(pairs, weights, ids, out)
    kept = (ids >= 0)[..., None]
    terms = weights.double()[..., None] * pairs.double()
    assert_close(out, torch.where(kept, terms, 0.0).sum(1), dtype)
    assert (out[m - 1] == 0).all()


def test_the_layer_is_deterministic() -> None:
    first, *others = (run_align(random_ids(9, 20, 8, 6), 6, 16) for _ in range(3))
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def test_tiles_fit_and_fill_the_gpu() -> None:
    for pairs in (8, 64, 256, 4096):
        for n, c in ((1024, 2048), (2048, 512), (1536, 2048), (2048, 768), (8, 8)):
            for itemsize in (2, 4):
                for block in (16, 32, 64):
                    tile = expert_tile(pairs, pairs, n, c, itemsize, block)
                    shared = (block + tile.n) * tile.k * itemsize * tile.stages
                    assert shared <= 160 * 1024
                    assert min(tile.n, tile.k) >= 16
    # Batch 1 of a 256-expert model: both products occupy the whole device.
    for n, c in ((1024, 2048), (2048, 512)):
        tile = expert_tile(8, 8, n, c, 2, 16)
        assert 8 * n // tile.n >= PROGRAMS_WANTED
    assert router_tile(2048, 2).k == 256
