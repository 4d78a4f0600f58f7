"""Which plans are worth a try: for a bucket a starting plan and, knob by knob, what else could be better.

All tiles are for bfloat16. A knob is tried with the others as they are best so far, so the order counts:
what takes most time comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from graphcap.decode.kernels.cuda_attend import MOST_SPLITS, CudaAttend, tile_obstacle
from graphcap.decode.kernels.cuda_linear import MOST_ROWS, CudaRows
from graphcap.decode.kernels.triton_fused_attention import AttendTile
from graphcap.decode.kernels.triton_fused_linear import DotTile, RowsTile
from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.model_shape import ModelShape
from graphcap.moe.experts import few_pairs
from graphcap.moe.kernels.cuda_down import ROWS, CudaDown
from graphcap.moe.kernels.cuda_gate_up import CudaGateUp, unfit
from graphcap.moe.kernels.triton_gemm import Tile
from graphcap.moe.kernels.triton_pairs import PairTile

Change = Callable[[LayerPlan], LayerPlan]
"""Turns the best plan so far into one that is to be tried."""

WIDE = (
    RowsTile(4, 4, 1),
    RowsTile(4, 4, 1, 96),
    RowsTile(4, 4, 1, 80),
    RowsTile(8, 8, 1, 80),
    RowsTile(8, 8, 1, 96),
    RowsTile(2, 2, 1),
    RowsTile(8, 4, 1),
)
PROJECTIONS = (
    DotTile(16, 256, 4, 4, True),
    DotTile(16, 256, 4, 4),
    DotTile(16, 128, 4, 6, True),
    DotTile(16, 512, 4, 2, True),
    DotTile(32, 128, 4, 5, True),
    DotTile(32, 256, 8, 3, True),
)
PAIR_GATE_UPS = (
    PairTile(1, 2048, 80),
    PairTile(1, 2048),
    PairTile(1, 1024, 64),
    PairTile(2, 1024, 64),
    PairTile(2, 1024, 96),
    PairTile(2, 2048, 128),
)
PAIR_DOWNS = (
    PairTile(1, 512),
    PairTile(1, 512, 96),
    PairTile(2, 512),
    PairTile(2, 512, 128),
    PairTile(2, 256),
    PairTile(4, 256),
)
HEADROOM = 64
"""Tokens that a sequence of a trial may grow between two resets of the slots."""

CUDA_GATE_UPS = tuple(
    CudaGateUp(rows, depth, registers)
    for rows in (32, 16, 64, 48)
    for depth, registers in ((16, 96), (10, 80), (8, 64))
)

CUDA_ATTENDS = ((64, 4), (128, 8), (128, 4), (32, 2), (64, 2))
"""Tokens of an iteration, and warps."""

CUDA_ROWS = (2, 4, 8, 10, 16, 20)
ROUTERS = ((4, 4, 8), (4, 4, 16), (4, 4, 99), (8, 4, 8), (8, 4, 99), (4, 2, 8), (2, 4, 4))
GROUPED = (
    Tile(64, 128, 4, 4),
    Tile(64, 128, 4, 3),
    Tile(64, 64, 4, 4),
    Tile(32, 128, 4, 4),
    Tile(32, 256, 4, 3),
    Tile(32, 256, 4, 4),
    Tile(128, 64, 4, 4),
    Tile(128, 128, 8, 3),
)
GATED = (
    Tile(32, 128, 4, 4),
    Tile(32, 128, 4, 3),
    Tile(32, 256, 4, 3),
    Tile(16, 256, 4, 4),
    Tile(16, 128, 4, 4),
    Tile(64, 64, 4, 4),
    Tile(64, 128, 4, 3),
    Tile(64, 128, 8, 4),
)


def starts(rows: int, cuda: LayerPlan | None = None) -> list[LayerPlan]:
    """The schedules that a bucket of `rows` could run by.

    Args:
        cuda: see `cuda_plan`.
    """
    found = []
    if rows <= 4:
        found.append(LayerPlan("fused"))
    if rows == 1 and cuda is not None:
        # Together: one alone gains little, as the others leave it no room to start early.
        found.append(cuda)
    if rows >= 2:
        found.append(LayerPlan("apart", block=16))
        found.append(LayerPlan("apart", blas=frozenset({"qkv", "output"}), block=16))
    return found


def knobs(
    plan: LayerPlan, shape: ModelShape, rows: int, context: int, cuda: LayerPlan | None = None
) -> Iterator[tuple[str, list[Change]]]:
    """(name, changes) for each knob of the schedule of `plan`; with the tiles in CUDA C++ that `cuda` has."""
    in_cuda = cuda.tiles if cuda is not None and rows == 1 else {}

    def rows_in_cuda(name: str) -> list[Change]:
        if name not in in_cuda:
            return []
        most = in_cuda[name].rows
        return [
            _tile(name, CudaRows(n)) for n in dict.fromkeys((most, *CUDA_ROWS)) if n <= MOST_ROWS
        ]

    attends = cuda_attend_tiles(shape, context) if "attend" in in_cuda else []
    yield (
        "attend",
        [_tile("attend", tile) for tile in (*attends, *attend_tiles(shape, rows, context))],
    )
    grouped = not few_pairs(rows, shape.top_k, shape.num_experts)
    if grouped:
        yield "gated_gemm", [_tile("gated_gemm", tile) for tile in GATED]
        yield "down_gemm", [_tile("down_gemm", tile) for tile in GROUPED]
    else:
        hidden, inner = shape.hidden_size, shape.moe_intermediate_size
        blocks = (
            [in_cuda["pair_gate_up"], *(t for t in CUDA_GATE_UPS if not unfit(t, hidden, inner))]
            if "pair_gate_up" in in_cuda
            else []
        )
        yield (
            "pair_gate_up",
            [_tile("pair_gate_up", tile) for tile in (*dict.fromkeys(blocks), *PAIR_GATE_UPS)],
        )
        slabs = (
            [n for n in ROWS if n <= in_cuda["pair_down"].rows] if "pair_down" in in_cuda else []
        )
        yield (
            "pair_down",
            [_tile("pair_down", tile) for tile in (*PAIR_DOWNS, *map(CudaDown, slabs))],
        )
    routers: list[RowsTile | DotTile] = list(
        dict.fromkeys(RowsTile(r, w, min(rows, lanes)) for r, w, lanes in ROUTERS)
    )
    if plan.layers == "fused":
        for name, tiles in (
            ("norm_qkv", WIDE),
            ("output_residual", WIDE),
            ("norm_router", routers),
        ):
            yield name, [*rows_in_cuda(name), *(_tile(name, tile) for tile in tiles)]
        chain = ["norm_qkv", "attend", "output_residual", "norm_router"]
    else:
        for name in ("qkv", "output"):
            yield name, [_blas(name), *(_tile(name, tile) for tile in PROJECTIONS)]
        if rows >= 16:
            routers.append(DotTile(16, 256, 4, 4, True))
        yield "router", [_tile("router", tile) for tile in routers]
        chain = ["attend", "qkv", "output", "router", "add_norm"]
    chain += (
        ["top_k", "align", "gated_gemm", "down_gemm", "merge"]
        if grouped
        else ["pair_gate_up", "pair_down"]
    )
    yield "pdl", [_all_without_pdl(chain), *(_without_pdl(name) for name in chain)]


def attend_tiles(shape: ModelShape, rows: int, context: int) -> list[AttendTile]:
    """Splits for sequences that stand at `context` and grow by `HEADROOM`: where fewer splits hold just what
    there is at first in one iteration each, the next token doubles the chain of every split."""
    pairs = rows * shape.num_kv_heads
    found = []
    for tokens, warps in ((32, 4), (64, 4), (16, 4), (16, 1), (32, 2), (32, 8), (64, 8)):
        most = -(-(context + HEADROOM) // tokens)
        for splits in dict.fromkeys(min(most, s) for s in (128, 64, 32, 16, 8, 4, 2)):
            # Between half a program and four for each multiprocessor, if there are tokens enough.
            if 64 <= splits * pairs <= 600 or (splits == most and splits * pairs < 64):
                found.append(AttendTile(splits, tokens, warps))
    return found


def cuda_attend_tiles(shape: ModelShape, context: int) -> list[CudaAttend]:
    """For one sequence that stands at `context` and grows by `HEADROOM`: one iteration a split, and where
    those are many also two."""
    found = []
    for tokens, warps in CUDA_ATTENDS:
        most = -(-(context + HEADROOM) // tokens)
        for splits in (most, -(-most // 2)) if most >= 32 else (most,):
            tile = CudaAttend(min(MOST_SPLITS, splits), tokens, warps)
            found += [tile._replace(cluster=1), tile]
    return [t for t in dict.fromkeys(found) if not tile_obstacle(t, shape.head_dim)]


def _tile(name: str, tile: object) -> Change:
    return lambda plan: replace(plan.with_tile(name, tile), blas=plan.blas - {name})


def _blas(name: str) -> Change:
    def change(plan: LayerPlan) -> LayerPlan:
        tiles = {key: tile for key, tile in plan.tiles.items() if key != name}
        return replace(plan, tiles=tiles, blas=plan.blas | {name})

    return change


def _without_pdl(name: str) -> Change:
    return lambda plan: replace(plan, without_pdl=plan.without_pdl ^ {name})


def _all_without_pdl(names: list[str]) -> Change:
    return lambda plan: replace(plan, without_pdl=frozenset(names))
