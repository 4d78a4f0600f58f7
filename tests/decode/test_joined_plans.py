"""Plans whose output projection joins the splits of attention: whom they serve, what becomes of them where
attention runs by another tile, and that a layer by one of them is the same layer.

The kernel itself needs a device, see tests/gpu/test_cuda_joined.py; here one of torch's stands in for it."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import batch_at, make_cache
from fused_shapes import draw_small
from plan_samples import SEED, bucket, file_of, pretend, schedule_of
from triton_support import ON_GPU

pytest.importorskip("triton", minversion="3.0")

from graphcap.cuda import source
from graphcap.decode import schedule as schedule_module
from graphcap.decode.cache import NULL_BLOCK
from graphcap.decode.cuda_kernels import cuda_obstacles, cuda_plan
from graphcap.decode.kernels import cuda_linear, decode_kernels
from graphcap.decode.kernels.cuda_linear import MOST_PARTS, CudaJoinRows, CudaRows
from graphcap.decode.kernels.triton_fused_attention import AttendTile
from graphcap.decode.kernels.triton_fused_linear import RowsTile
from graphcap.decode.layer_plan import LayerPlan, can_join, planned
from graphcap.decode.plan_json import plan_from_json, plan_to_json
from graphcap.decode.step import DecodeStep
from graphcap.errors import BackendError, InputError
from graphcap.moe.kernels import Backend, cuda_down
from graphcap.operations import Operation, observed_by
from graphcap.pool import BufferPool
from graphcap.tuning.space import HEADROOM, MOST_ITERATIONS, joined_tiles, knobs, starts

CPU = torch.device("cpu")
BF16 = torch.bfloat16
TRITON = decode_kernels(Backend("triton", "tests"))
FEW = AttendTile(5, 64, 8)
MANY = AttendTile(MOST_PARTS, 32, 4)
PLAN = LayerPlan(
    "fused",
    tiles={"attend": FEW, "output_residual": CudaJoinRows(16), "norm_qkv": CudaRows(20)},
    without_pdl=frozenset({"attend"}),
)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_linear, "obstacle", lambda device: "")
    monkeypatch.setattr(cuda_down, "obstacle", lambda device: "")


# -- what a plan may say -------------------------------------------------------------------------


def test_json_keeps_it() -> None:
    found = plan_to_json(PLAN)
    assert found["tiles"]["output_residual"] == {"tile": "CudaJoinRows", "rows": 16}
    assert plan_from_json(found) == PLAN
    assert PLAN.joins
    assert PLAN.in_cuda == ("norm_qkv", "output_residual")


@pytest.mark.parametrize(
    ("tiles", "told"),
    [
        ({"output_residual": CudaJoinRows(8)}, "at most 8 splits, found none; give it one"),
        ({"output_residual": CudaJoinRows(8), "attend": MANY}, "at most 8 splits, found one of 9"),
        (
            {"norm_qkv": CudaJoinRows(8), "attend": FEW},
            "norm_qkv is not made by kernels with a Cuda",
        ),
    ],
)
def test_a_plan_that_cannot_join_is_refused(tiles: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        LayerPlan("fused", tiles=tiles)
    assert told in str(caught.value)
    layers = {name: {"tile": type(t).__name__, **t._asdict()} for name, t in tiles.items()}
    with pytest.raises(InputError):
        plan_from_json({"layers": "fused", "tiles": layers})


@pytest.mark.parametrize(
    ("kernel", "rows", "told"),
    [
        ("output_residual", 0, "rows of a tile is a count, found 0"),
        ("output_residual", "8", "rows of a tile is a count, found '8'"),
        ("output_residual", 2**31, "rows of a tile is a count"),
        ("norm_qkv", 8, "one of DotTile, RowsTile, CudaRows, found 'CudaJoinRows'"),
        ("attend", 8, "one of AttendTile, found 'CudaJoinRows'"),
    ],
)
def test_json_that_is_no_such_tile_is_refused(kernel: str, rows: object, told: str) -> None:
    tiles = {"attend": {"tile": "AttendTile", **FEW._asdict()}}
    tiles[kernel] = {"tile": "CudaJoinRows", "rows": rows}
    with pytest.raises(InputError) as caught:
        plan_from_json({"layers": "fused", "tiles": tiles})
    assert told in str(caught.value)


def test_without_a_tile_of_attention_the_projection_keeps_its_rows_and_joins_nothing() -> None:
    unjoined = CudaRows(16)
    for plan in (
        PLAN.without(["attend"]),
        PLAN.without(["attend", "norm_qkv"]),
        PLAN.with_tile("attend", MANY),
    ):
        assert not plan.joins
        assert plan.tiles["output_residual"] == unjoined
    assert PLAN.without(["norm_qkv"]).joins
    assert "output_residual" not in PLAN.without(["output_residual"]).tiles
    assert PLAN.without(["output_residual"]).tiles["attend"] == FEW
    assert PLAN.with_tile("attend", AttendTile(MOST_PARTS - 1, 16, 4)).joins
    assert can_join(FEW)
    assert not can_join(MANY)
    assert not can_join(None)
    assert not PLAN.of_experts().tiles


# -- whom it serves ------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("sizes", "dtype", "tile", "words"),
    [
        ((16, 128, 5), BF16, CudaJoinRows(16), ""),
        ((16, 256, 8), torch.float16, None, ""),
        ((64, 12, 5), BF16, None, "multiple of 8 values, found 12"),
        ((16, 128, 9), BF16, None, "1 to 8 splits, found 9"),
        ((16, 128, 0), BF16, None, "1 to 8 splits, found 0"),
        ((16, 128, 5), torch.float32, None, "float32"),
        ((33, 128, 5), BF16, None, "found 4224"),
        ((16, 128, 5), BF16, CudaJoinRows(21), "found 21"),
    ],
)
def test_attention_that_the_projection_joins(sizes, dtype, tile, words) -> None:
    why = cuda_linear.why_not_joined(*sizes, dtype, CPU, tile)
    assert bool(why) == bool(words)
    assert words in why


@pytest.mark.usefixtures("on_hopper")
def test_it_serves_one_row_of_fused_layers() -> None:
    assert cuda_obstacles(SEED, BF16, CPU, 1, PLAN) == {}
    assert "one row" in cuda_obstacles(SEED, BF16, CPU, 2, PLAN)["output_residual"]
    apart = replace(PLAN, layers="apart")
    assert not apart.joins
    assert "apart" in cuda_obstacles(SEED, BF16, CPU, 1, apart)["output_residual"]
    narrow = replace(SEED, num_heads=64, head_dim=12)
    assert "found 12" in cuda_obstacles(narrow, BF16, CPU, 1, PLAN)["output_residual"]
    assert "found cpu" in source.obstacle(CPU)


@pytest.mark.parametrize(
    ("context", "joins", "told"),
    [
        (320, True, ""),
        (512, True, ""),
        (2048, False, "attention by its own tile"),
        (96, False, "own"),
    ],
)
def test_a_tuned_plan_joins_near_the_context_it_was_tuned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: int, joins: bool, told: str
) -> None:
    pretend(monkeypatch)
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", str(tmp_path))
    file = file_of(bucket(1, 256, PLAN))
    file.write(tmp_path / file.key.file_name)
    choice = schedule_of(TRITON, context=context).choice(1)
    assert choice.source == "cache"
    assert choice.plan.joins == joins
    assert type(choice.plan.tiles["output_residual"]) is (CudaJoinRows if joins else CudaRows)
    assert choice.plan.tiles["output_residual"].rows == 16
    assert told in choice.why
    assert planned(TRITON, choice.plan).parts == (6 if joins else 0)


def test_where_it_cannot_be_compiled_attention_joins_its_splits_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", str(tmp_path))
    file = file_of(bucket(1, 256, PLAN))
    file.write(tmp_path / file.key.file_name)
    monkeypatch.setattr(cuda_linear, "obstacle", lambda device: "there is no NVRTC")
    choice = schedule_of(TRITON).choice(1)
    assert choice.plan.tiles == {"attend": FEW}
    assert "output_residual by Triton, not CUDA C++: there is no NVRTC" in choice.why
    assert planned(TRITON, choice.plan).attend.implementation == "triton: fused_attention"


def test_the_plan_says_how_both_kernels_run() -> None:
    found = planned(TRITON, PLAN)
    assert found.parts == 1 + FEW.splits
    assert (found.attend.name, found.output_residual.name) == ("attend", "output_residual")
    assert found.attend.implementation == "triton: fused_attention, not joined"
    assert found.output_residual.implementation == "cuda: joined linear"
    assert found.attend.scratch is None
    options = [each.function.keywords for each in (found.attend, found.output_residual)]  # type: ignore[attr-defined]
    assert options[0] == {"pdl": False, "tile": FEW}
    assert options[1] == {"pdl": True, "tile": CudaJoinRows(16), "tokens": FEW.tokens}
    other = planned(TRITON, PLAN.with_tile("attend", MANY))
    assert (other.parts, other.output_residual.implementation) == (0, "cuda: linear")
    assert other.attend.scratch is not None


# -- tuning --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_hopper")
def test_a_search_tries_it_with_few_splits() -> None:
    cuda = cuda_plan(SEED, BF16, CPU)
    assert cuda is not None
    plain_start, joined = starts(1, cuda)[-2:]
    assert (plain_start, joined.joins, joined.without(["attend"])) == (cuda, True, cuda)
    assert not any(plan.joins for rows in (1, 2) for plan in starts(rows))
    for start in (LayerPlan("fused"), cuda, joined):
        tried = [
            (name, change(start))
            for name, changes in knobs(start, SEED, 1, 256, cuda)
            for change in changes
        ]
        rows = {
            p.tiles["output_residual"].rows
            for name, p in tried
            if name == "output_residual" and p.joins
        }
        assert rows >= {8, 10, 16, 20}
        splits = {plan.tiles["attend"].splits for name, plan in tried if name == "joined"}
        assert splits >= {2, 3, 4, 5}
        assert all(plan.joins for name, plan in tried if name == "joined")
        for _, plan in tried:
            assert plan_from_json(plan_to_json(plan)) == plan
    # A tile of attention with more splits is tried without being joined.
    unjoined = [plan for name, plan in tried if name == "attend" and not plan.joins]
    assert unjoined
    assert all(type(plan.tiles["output_residual"]) is CudaRows for plan in unjoined)
    own = replace(joined, tiles={**joined.tiles, "output_residual": CudaJoinRows(4)})
    changes = dict(knobs(own, SEED, 1, 256, cuda))["joined"]
    assert {change(own).tiles["output_residual"] for change in changes} == {CudaJoinRows(4)}
    triton = own.with_tile("output_residual", RowsTile(4, 4, 1))
    assert {change(triton).tiles["output_residual"] for change in changes} == {CudaJoinRows(16)}
    with_two = dict(knobs(cuda, SEED, 2, 256, cuda))
    assert "joined" not in with_two


def test_long_sequences_are_not_joined() -> None:
    assert joined_tiles(SEED, 16384) == []
    assert joined_tiles(replace(SEED, head_dim=12), 256) == []
    for context in (64, 256, 1024):
        for tile in joined_tiles(SEED, context):
            assert can_join(tile)
            assert tile.splits * tile.tokens * MOST_ITERATIONS >= context + HEADROOM
            assert (tile.splits - 1) * tile.tokens < context + HEADROOM


# -- a layer -------------------------------------------------------------------------------------


def join_and_project(
    partial: torch.Tensor,
    lse: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    capacity: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    tokens: int,
    tile: CudaJoinRows,
    pdl: bool,
) -> None:
    """What `output_residual_joined` says of itself, in float64 and for any number of rows."""
    assert (tile, pdl) == (CudaJoinRows(4), True)
    splits = lse.shape[2] - 1
    joined = torch.zeros(*partial.shape[:2], partial.shape[3], dtype=torch.float64)
    for row in range(len(slots)):
        if slots[row] < 0:
            continue
        cached = min(int(seq_lens[row]), capacity) - 1
        share = max(1, math.ceil(cached / splits / tokens)) * tokens
        there = 1 + math.ceil(cached / share)
        shares = torch.softmax(lse[row, :, :there].double() * torch.log(torch.tensor(2.0)), 1)
        joined[row] = torch.einsum("hs,hsd->hd", shares, partial[row, :, :there].double())
    total = joined.flatten(1) @ weight.double().T
    residual += (total if bias is None else total + bias.double()).to(residual.dtype)


class Seen:
    """Notes the operations of a step and runs them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kernels: list[str] = []

    def operation(self, operation: Operation, args: tuple[Any, ...], kwargs: dict) -> None:
        self.names.append(operation.name)
        self.kernels.append(operation.implementation)
        with observed_by(None):
            operation(*args, **kwargs)


@pytest.mark.skipif(ON_GPU, reason="the small decoders of these tests live on the CPU")
@pytest.mark.parametrize("tile", [AttendTile(2, 16, 1), AttendTile(5, 16, 1)])
def test_a_joined_layer_is_the_fused_layer(
    monkeypatch: pytest.MonkeyPatch, tile: AttendTile
) -> None:
    """Rows of one, some and many cached tokens, and padding; on a frozen pool that is poisoned."""
    monkeypatch.setattr(schedule_module, "cuda_obstacles", lambda *_: {})
    own = Operation("output_residual", "tests", join_and_project)
    monkeypatch.setattr(cuda_linear, "output_residual_joined", own)
    weights = draw_small(num_layers=2)
    found = {}
    plans = {"fused": LayerPlan("fused", {"attend": tile})}
    plans["joined"] = plans["fused"].with_tile("output_residual", CudaJoinRows(4))
    for name, plan in plans.items():
        cache = make_cache(weights, max_context=64)
        cache.fill_random(3)
        pool = BufferPool("cpu")
        how: Any = {"schedule": "fused", "plans": lambda rows, plan=plan: plan}
        step = DecodeStep(weights, cache, TRITON, pool, **how)
        tables = torch.stack([cache.allocate(64) for _ in range(4)])
        slots = batch_at(tables, [0, 7, 60, 1], [5, 6, 7, 8])
        slots["block_tables"][-1], slots["slot_mapping"][-1] = NULL_BLOCK, -1
        slots["positions"][-1], slots["seq_lens"][-1] = 0, 1
        start = {key: tensor.clone() for key, tensor in slots.items()}
        first = step(slots)["logits"][:3].clone()
        pool.freeze()
        pool.poison()
        for key, tensor in start.items():
            slots[key].copy_(tensor)
        seen = Seen()
        with observed_by(seen):
            again = step(slots)["logits"][:3].clone()
        assert torch.equal(first, again)
        buffers = set(pool.plan.offsets)
        assert ("attended" in buffers) == (name == "fused")
        assert {"attend/partial", "attend/lse"} <= buffers
        found[name] = (first, seen, cache)
    torch.testing.assert_close(found["joined"][0], found["fused"][0], rtol=1e-4, atol=1e-4)
    assert found["joined"][1].names == found["fused"][1].names
    assert found["joined"][1].kernels.count("tests") == 2
    assert found["joined"][1].kernels.count("triton: fused_attention, not joined") == 2
    caches = [[*found[name][2].keys, *found[name][2].values] for name in plans]
    for ours, theirs in zip(*caches, strict=True):
        torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-4, atol=1e-4)


# -- code ----------------------------------------------------------------------------------------


def test_an_integer_is_passed_as_one() -> None:
    assert source._passed(320) == (320, ctypes.c_int32)
    assert source._passed(1e-6) == (1e-6, ctypes.c_float)


@pytest.mark.parametrize("parts", [2, 5, 6, MOST_PARTS])
def test_it_compiles_without_a_device(parts: int) -> None:
    try:
        source.libraries()
    except BackendError as error:
        pytest.skip(str(error))
    values = {
        "HALF": 0,
        "PDL": 1,
        "COLUMNS": 2048,
        "OUTPUTS": 37,
        "ROWS": 16,
        "BIAS": 1,
        "RESIDUAL": 1,
    }
    values |= {"NORM": 0, "DELTA": 0, "NORMED": 0, "FLOAT_OUT": 0}
    values |= {"PARTS": parts, "HEAD": 128, "TOKENS": 64, "SLOT64": 1}
    assert source.compiled("linear.cu", source.as_constants(values), (9, 0))
