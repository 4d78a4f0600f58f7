"""The down projection of one token's experts in CUDA C++ (``cuda/down.cu``); signature as in `triton_pairs`.

Its weights are copied into shared memory while `pair_gate_up` is still reading its own. In Triton they wait
in registers, of which the kernel before leaves few.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from graphcap.cuda.source import CudaKernel, as_constants, function, obstacle
from graphcap.operations import operation

SHARED_MEMORY = 200 * 1024
"""Bytes for the weights of a block, of the 227 KiB that one of compute capability 9.0 may have: some are left
to the kernel before, to the routing and to the runtime."""

ROWS = (16, 8, 4)
"""Outputs of a block that there can be."""


class CudaDown(NamedTuple):
    """Outputs of one block; for one token."""

    rows: int


def down_tile(inner: int, top_k: int) -> CudaDown | None:
    """The most outputs whose weights, of all experts, shared memory holds; None: not even 4."""
    for rows in ROWS:
        if top_k * rows * inner * 2 <= SHARED_MEMORY:
            return CudaDown(rows)
    return None


def why_not(
    experts: int,
    hidden: int,
    inner: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device,
    tile: CudaDown | None = None,
) -> str:
    """Why this kernel cannot take one token's experts; empty where it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, found {dtype}"
    if experts % 128 or experts > 512 or not 1 <= top_k <= 16:
        return f"it needs 128, 256, 384 or 512 experts and a top-k up to 16, found {experts} and {top_k}"
    most = down_tile(inner, top_k)
    if inner % 256 or inner > 1024 or hidden % 16 or most is None:
        return (
            f"it needs an intermediate size of a multiple of 256 up to 1,024 and a hidden size of a "
            f"multiple of 16, and shared memory for {top_k} experts, found {inner} and {hidden}"
        )
    if tile is not None and not (tile.rows in ROWS and tile.rows <= most.rows):
        fitting = " or ".join(str(rows) for rows in ROWS if rows <= most.rows)
        return f"a block takes {fitting} outputs, found {tile.rows}"
    return obstacle(device)


@cache
def _kernel(
    device: torch.device,
    half: bool,
    experts: int,
    hidden: int,
    inner: int,
    top_k: int,
    rows: int,
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
            "ROWS": rows,
            "RENORMALIZE": renormalize,
            "row_id_t": row_id,
            "PDL": pdl,
        }
    )
    shared = top_k * rows * inner * 2
    found = function("down.cu", "pair_down", constants, device, shared)
    return CudaKernel("pair_down", found, hidden // rows, 32 * top_k, shared, pdl)


@operation("pair_down", "cuda: pair_down")
def pair_down(
    act: torch.Tensor,
    logits: torch.Tensor,
    row_ids: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    renormalize: bool,
    pdl: bool = True,
    tile: CudaDown | None = None,
) -> None:
    """As `triton_pairs.pair_down`, for one token and where `why_not` is empty.

    It chooses the experts again, from `logits`, and reads neither `weights` nor `ids`. `logits` are read,
    and the weights of what they choose, while `pair_gate_up` may still be running, of padding too.
    """
    experts, hidden, inner = down.shape
    top_k = ids.shape[1]
    assert ids.shape[0] == 1, "for one token; see LayerPlan"
    tile = down_tile(inner, top_k) if tile is None else tile
    assert tile is not None, "see why_not"
    kernel = _kernel(
        down.device,
        down.dtype == torch.float16,
        experts,
        hidden,
        inner,
        top_k,
        tile.rows,
        renormalize,
        "int" if row_ids.dtype == torch.int32 else "long long",
        pdl,
    )
    kernel.launch(down.device, act, logits, row_ids, down, out)
