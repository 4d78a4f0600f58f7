"""The first expert product of one token in CUDA C++ (``cuda/gate_up.cu``); signature as in `triton_pairs`.

Blocks are few and large: about one for every multiprocessor, whose threads keep as many loads of weights on
their way as a tile says, and which leaves `pair_down` the registers to start its own meanwhile. In Triton
single warps fill every multiprocessor, and each makes the choice of experts again.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from graphcap.cuda.source import CudaKernel, as_constants, function, obstacle
from graphcap.operations import operation

LONGEST_ROW = 4096
"""Columns: two groups of threads take 8 each, and a block has at most 1,024 threads."""

ROWS = (64, 48, 32, 16, 8)
"""Outputs of a block that there can be."""

LEAST_DEPTH = 4

MOST_REGISTERS = 128
"""Of a thread; more are of no use."""

BESIDES = 32
"""Registers of a thread for all but its loads on their way, which take four each."""

REGISTERS = 65536
"""Of a multiprocessor."""

DOWN_REGISTERS = 64 * 32
"""That a warp of `pair_down` takes, of which there is one for each expert of a token."""


class CudaGateUp(NamedTuple):
    """Outputs of one block, loads of weights that a thread starts before it uses the first, and the registers
    it may use, with which the assembler starts more where some are left; for one token."""

    rows: int
    depth: int
    registers: int


DEEP, SHALLOW = (16, 96), (8, 64)
"""Loads on their way, and registers."""


def threads_of(hidden: int) -> int:
    """Of a block: half of them take gate rows, half up rows, 8 columns each."""
    return hidden // 4


def gate_up_tile(
    hidden: int, inner: int, top_k: int, multiprocessors: int = 132
) -> CudaGateUp | None:
    """Of the tiles that fit those that give the busiest multiprocessor the least to do; of these, those that
    leave it the registers for a block of `pair_down`; of these the one with the most outputs, and then the
    most loads on their way. None: none fits."""
    threads = threads_of(hidden)
    left = REGISTERS - DOWN_REGISTERS * top_k

    def cost(tile: CudaGateUp) -> tuple[int, bool]:
        blocks = top_k * inner // tile.rows
        return -(-blocks // multiprocessors) * tile.rows, threads * tile.registers > left

    there = [
        tile
        for rows in ROWS
        for tile in (CudaGateUp(rows, *DEEP), CudaGateUp(rows, *SHALLOW))
        if not unfit(tile, hidden, inner)
    ]
    return min(there, key=cost) if there else None


def least_registers(rows: int) -> int:
    """Of a thread, however few its loads: with fewer the assembler keeps values in memory."""
    return 80 if rows == 64 else 64


def no_tile(tile: CudaGateUp) -> str:
    """Why this can be a tile for no experts at all; empty where it can be one."""
    rows, depth, registers = tile
    if rows not in ROWS:
        return f"a block takes {_listed(ROWS)} outputs, found {rows}"
    if not LEAST_DEPTH <= depth <= rows:
        return f"a thread has {LEAST_DEPTH} to {rows} loads on their way, its rows, found {depth}"
    least = max(least_registers(rows), 4 * depth + BESIDES)
    if registers % 8 or not least <= registers <= MOST_REGISTERS:
        return (
            f"with {depth} loads on their way a thread needs a multiple of 8 registers from {least} to "
            f"{MOST_REGISTERS}, found {registers}"
        )
    return ""


def unfit(tile: CudaGateUp, hidden: int, inner: int) -> str:
    """Why experts of these sizes cannot be taken so; empty where they can."""
    why = no_tile(tile) or _no_sizes(hidden, inner)
    if why:
        return why
    fitting = tuple(rows for rows in ROWS if inner % rows == 0)
    if tile.rows not in fitting:
        return (
            f"of an intermediate size of {inner} a block takes {_listed(fitting)} outputs, found "
            f"{tile.rows}"
        )
    threads = threads_of(hidden)
    if threads * tile.registers > REGISTERS:
        most = REGISTERS // threads // 8 * 8
        return f"a thread, of {threads} of a block, has at most {most} registers, found {tile.registers}"
    return ""


def why_not(
    experts: int,
    hidden: int,
    inner: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device,
    tile: CudaGateUp | None = None,
) -> str:
    """Why this kernel cannot take one token's experts; empty where it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, found {dtype}"
    if experts % 128 or experts > 512 or not 1 <= top_k <= 16:
        return f"it needs 128, 256, 384 or 512 experts and a top-k up to 16, found {experts} and {top_k}"
    why = _no_sizes(hidden, inner) if tile is None else unfit(tile, hidden, inner)
    return why or obstacle(device)


def _no_sizes(hidden: int, inner: int) -> str:
    if hidden % 256 or not 256 <= hidden <= LONGEST_ROW:
        return f"it needs a hidden size of a multiple of 256 up to {LONGEST_ROW:,}, found {hidden}"
    if inner < 1 or inner % ROWS[-1]:
        return f"it needs an intermediate size of a multiple of {ROWS[-1]}, found {inner}"
    return ""


def _listed(numbers: tuple[int, ...]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


@cache
def _kernel(
    device: torch.device,
    half: bool,
    experts: int,
    hidden: int,
    inner: int,
    top_k: int,
    tile: CudaGateUp,
    renormalize: bool,
    row_id: str,
    pdl: bool,
) -> CudaKernel:
    constants = as_constants(
        {
            "HALF": half,
            "E": experts,
            "H": hidden,
            "INNER": inner,
            "K": top_k,
            "ROWS": tile.rows,
            "DEPTH": tile.depth,
            "REGISTERS": tile.registers,
            "RENORMALIZE": renormalize,
            "row_id_t": row_id,
            "PDL": pdl,
        }
    )
    found = function("gate_up.cu", "pair_gate_up", constants, device, 0)
    grid = top_k * (inner // tile.rows) + 1  # the last one writes the routing
    return CudaKernel("pair_gate_up", found, grid, threads_of(hidden), pdl=pdl)


@operation("pair_gate_up", "cuda: pair_gate_up")
def pair_gate_up(
    hidden: torch.Tensor,
    logits: torch.Tensor,
    row_ids: torch.Tensor,
    gate_up: torch.Tensor,
    act: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    renormalize: bool,
    pdl: bool = True,
    tile: CudaGateUp | None = None,
) -> None:
    """As `triton_pairs.pair_gate_up`, for one token and where `why_not` is empty. Of padding no weights
    are read."""
    experts, _, size = gate_up.shape
    top_k, inner = act.shape
    assert ids.shape == (1, top_k), "for one token; see LayerPlan"
    tile = gate_up_tile(size, inner, top_k) if tile is None else tile
    assert tile is not None, "see why_not"
    kernel = _kernel(
        gate_up.device,
        gate_up.dtype == torch.float16,
        experts,
        size,
        inner,
        top_k,
        tile,
        renormalize,
        "int" if row_ids.dtype == torch.int32 else "long long",
        pdl,
    )
    kernel.launch(gate_up.device, hidden, logits, row_ids, gate_up, act, weights, ids)
