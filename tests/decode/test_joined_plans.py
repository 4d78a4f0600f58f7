"""Plans whose output projection joins the splits of attention: whom they serve, what becomes of them where
attention runs by another tile, and what a search tries of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_samples import SEED, bucket, file_of, pretend, schedule_of

pytest.importorskip("triton", minversion="3.0")

from graphcap.cuda import source
from graphcap.decode.cuda_kernels import cuda_obstacles, cuda_plan
from graphcap.decode.kernels import cuda_linear, decode_kernels
from graphcap.decode.kernels.cuda_linear import MOST_PARTS, CudaJoinRows, CudaRows
from graphcap.decode.kernels.triton_fused_attention import AttendTile
from graphcap.decode.kernels.triton_fused_linear import RowsTile
from graphcap.decode.layer_plan import LayerPlan, can_join, planned
from graphcap.decode.plan_json import plan_from_json, plan_to_json
from graphcap.errors import InputError
from graphcap.moe.kernels import Backend, cuda_down
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
        ("attend", 8, "one of AttendTile, CudaAttend, found 'CudaJoinRows'"),
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
    assert (plain_start, joined.joins) == (cuda, True)
    assert joined.with_tile("attend", MANY) == cuda.with_tile("attend", MANY)
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


def test_plans_whose_tiles_are_of_two_kinds_differ() -> None:
    """Their numbers are the same, and both are tuples."""
    attend = {"attend": AttendTile(5, 64, 8)}
    joined = LayerPlan(tiles={**attend, "output_residual": CudaJoinRows(16)})
    assert joined != LayerPlan(tiles={**attend, "output_residual": CudaRows(16)})
    assert joined == LayerPlan(tiles={**attend, "output_residual": CudaJoinRows(16)})
