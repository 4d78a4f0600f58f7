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
        ("attend", ROWS, "a tile of attend is one of AttendTile, found 'RowsTile'"),
        ("qkv", ATTEND, "one of DotTile, RowsTile, CudaRows, found 'AttendTile'"),
        ("pair_down", {"tile": "Tile", "n": 16, "k": 16, "warps": 4, "stages": 2}, "found 'Tile'"),
        ("gated_gemm", {"tile": "PairTile", "rows": 1, "depth": 64}, "one of Tile, found"),
        ("attend", {**ATTEND, "splits": 0}, "splits of a tile is a count, found 0"),
        ("norm_qkv", {**ROWS, "lanes": 10**400}, "lanes of a tile is a count, found 1000"),
        ("norm_qkv", {**ROWS, "registers": -1}, "registers of a tile is a count, found -1"),
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
