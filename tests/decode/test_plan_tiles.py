"""Tiles that a file of plans may name: those that the kernel takes, with counts that a kernel can be told."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", minversion="3.0")

from graphcap.decode.plan_files import tables
from graphcap.decode.plan_json import plan_from_json, plan_to_json
from graphcap.errors import InputError

ATTEND = {"tile": "AttendTile", "splits": 2, "tokens": 16, "warps": 4}
ROWS = {"tile": "RowsTile", "rows": 4, "warps": 4, "lanes": 1}
DOT = {"tile": "DotTile", "n": 16, "depth": 64, "warps": 4, "stages": 2}
GATE_UP = {"tile": "CudaGateUp", "rows": 32, "depth": 16, "registers": 96}
GEMM = {"tile": "Tile", "n": 16, "k": 32, "warps": 4, "stages": 2}


def test_every_packaged_plan_is_taken() -> None:
    for _, file in tables():
        for bucket in file.buckets:
            assert plan_from_json(plan_to_json(bucket.plan)) == bucket.plan


@pytest.mark.parametrize(
    ("kernel", "tile", "told"),
    [
        ("attend", ATTEND, ""),
        ("norm_qkv", {**ROWS, "registers": 0}, ""),
        (
            "qkv",
            {"tile": "DotTile", "n": 16, "depth": 64, "warps": 4, "stages": 2, "early": False},
            "",
        ),
        ("attend", ROWS, "a tile of attend is one of AttendTile, CudaAttend, found 'RowsTile'"),
        ("qkv", ATTEND, "one of DotTile, RowsTile, CudaRows, found 'AttendTile'"),
        ("pair_down", {"tile": "Tile", "n": 16, "k": 16, "warps": 4, "stages": 2}, "found 'Tile'"),
        ("gated_gemm", {"tile": "PairTile", "rows": 1, "depth": 64}, "one of Tile, found"),
        ("attend", {**ATTEND, "splits": 0}, "splits of a tile is a count, found 0"),
        ("attend", {**ATTEND, "splits": True}, "splits of a tile is a count, found True"),
        ("pair_down", {"tile": "CudaDown", "rows": True}, "rows of a tile is a count, found True"),
        ("gated_gemm", {**GEMM, "n": True}, "n of a tile is a count, found True"),
        ("norm_qkv", {**ROWS, "lanes": 10**400}, "lanes of a tile is a count, found 1000"),
        ("norm_qkv", {**ROWS, "registers": -1}, "registers of a tile is a count, found -1"),
        ("norm_qkv", {**ROWS, "rows": 3}, "rows of a RowsTile: expected a power of two, found 3"),
        ("norm_qkv", {**ROWS, "lanes": 3}, ""),
        ("norm_qkv", {"tile": "CudaRows", "rows": 20}, ""),  # CUDA C++ takes other numbers
        ("pair_gate_up", GATE_UP, ""),
        ("pair_gate_up", {**GATE_UP, "rows": 48, "depth": 10, "registers": 72}, ""),
        ("pair_down", GATE_UP, "one of PairTile, CudaDown, found 'CudaGateUp'"),
        ("pair_gate_up", {"tile": "CudaDown", "rows": 8}, "one of PairTile, CudaGateUp, found"),
        ("pair_gate_up", {**GATE_UP, "rows": 24}, "takes 64, 48, 32, 16 or 8 outputs, found 24"),
        ("pair_gate_up", {**GATE_UP, "rows": True}, "rows of a tile is a count, found True"),
        (
            "pair_gate_up",
            {**GATE_UP, "rows": 8},
            "has 4 to 8 loads on their way, its rows, found 16",
        ),
        (
            "pair_gate_up",
            {**GATE_UP, "depth": 3},
            "has 4 to 32 loads on their way, its rows, found 3",
        ),
        ("pair_gate_up", {**GATE_UP, "depth": 0}, "depth of a tile is a count, found 0"),
        ("pair_gate_up", {**GATE_UP, "registers": 88}, "8 registers from 96 to 128, found 88"),
        ("pair_gate_up", {**GATE_UP, "registers": 100}, "a multiple of 8 registers from 96"),
        ("pair_gate_up", {**GATE_UP, "registers": 136}, "to 128, found 136"),
        ("pair_gate_up", {**GATE_UP, "depth": 8, "registers": 56}, "from 64 to 128, found 56"),
        (
            "pair_gate_up",
            {**GATE_UP, "rows": 64, "depth": 8, "registers": 64},
            "from 80 to 128, found 64",
        ),
        ("pair_gate_up", {"tile": "CudaGateUp", "rows": 32}, "missing 2 required"),
        ("pair_gate_up", {**GATE_UP, "warps": 4}, "unexpected keyword argument 'warps'"),
        ("pair_gate_up", {**GATE_UP, "registers": "96"}, "registers of a tile is a count"),
        ("attend", {**ATTEND, "splits": 65}, ""),
        ("attend", {**ATTEND, "tokens": 24}, "tokens of an AttendTile"),
        ("attend", {**ATTEND, "tokens": 8}, "power of two of at least 16, found 8"),
        (
            "attend",
            {**ATTEND, "warps": 6},
            "warps of an AttendTile: expected a power of two up to 32",
        ),
        ("attend", {**ATTEND, "warps": 32}, ""),
        ("attend", {**ATTEND, "warps": 64}, "up to 32, found 64"),
        (
            "pair_gate_up",
            {"tile": "PairTile", "rows": 2, "depth": 96},
            "depth of a PairTile: expected",
        ),
        ("pair_gate_up", {"tile": "PairTile", "rows": 2, "depth": 8}, ""),
        (
            "pair_gate_up",
            {"tile": "PairTile", "rows": 2048, "depth": 1024},
            "rows and depth of a PairTile: expected at most 1,048,576 elements, found 2,097,152",
        ),
        ("qkv", {**DOT, "n": 48}, "n of a DotTile: expected a power of two, found 48"),
        ("qkv", {**DOT, "depth": 8}, "depth of a DotTile: expected a power of two of at least 16"),
        ("down_gemm", {**GEMM, "k": 100}, "k of a Tile: expected a power of two of at least 16"),
        ("down_gemm", {**GEMM, "warps": 3}, "warps of a Tile"),
    ],
)
def test_a_tile_that_its_kernel_cannot_take_is_refused(
    kernel: str, tile: dict[str, Any], told: str
) -> None:
    found = {"layers": "apart", "tiles": {kernel: tile}}
    if not told:
        taken = plan_from_json(found).tiles[kernel]
        assert {"tile": type(taken).__name__, **taken._asdict()}.items() >= tile.items()
        return
    with pytest.raises(InputError) as caught:
        plan_from_json(found)
    assert told in str(caught.value)


@pytest.mark.parametrize("tile", ["abc", ["abc"], 5, None])
def test_a_tile_that_is_no_mapping_is_refused(tile: Any) -> None:
    with pytest.raises(InputError, match="a tile of qkv is a mapping, found"):
        plan_from_json({"tiles": {"qkv": tile}})
