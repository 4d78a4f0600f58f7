# mypy: allow-untyped-defs
"""The end of a decode step: the likeliest token of each row, and the slots of the next step."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from graphcap.decode.kernels.triton_attention import processors
from graphcap.operations import BufferSpec, operation

TILE = 1024
"""Logits that one program of `argmax` looks at in one go."""


def argmax_splits(rows: int, vocabulary: int, multiprocessors: int) -> int:
    """How many programs share one row; 1 means a single launch. None of them is left without work."""
    if vocabulary <= 4 * TILE:
        return 1
    wanted = max(1, min(2 * multiprocessors // rows, triton.cdiv(vocabulary, TILE)))
    return triton.cdiv(vocabulary, _tiles(vocabulary, wanted) * TILE)


def _tiles(vocabulary: int, splits: int) -> int:
    """How many tiles one of `splits` programs goes through."""
    return triton.cdiv(triton.cdiv(vocabulary, splits), TILE)


def argmax_scratch(logits: torch.Tensor, *_: object) -> Mapping[str, BufferSpec]:
    """The best value and index of each split (M, splits); nothing where one split does."""
    rows, vocabulary = logits.shape
    splits = argmax_splits(rows, vocabulary, processors(logits.device))
    if splits == 1:
        return {}
    return {
        "values": ((rows, splits), torch.float32),
        "indices": ((rows, splits), torch.int32),
    }


@triton.jit(do_not_specialize=["splits", "tiles"])
def _argmax_kernel(
    logits_ptr,
    out_ptr,
    values_ptr,
    indices_ptr,
    stride,
    vocabulary,
    tiles,
    splits,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1)
    begin = split * tiles * BLOCK
    end = tl.minimum(begin + tiles * BLOCK, vocabulary)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_at = begin + lane
    logits_row = logits_ptr + row.to(tl.int64) * stride
    for start in range(begin, end, BLOCK):
        at = start + lane
        x = tl.load(logits_row + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        # Strictly greater: of equal logits the first stays. A NaN is never greater.
        better = x > best
        best = tl.where(better, x, best)
        best_at = tl.where(better, at, best_at)
    top = tl.max(best, 0)
    index = tl.min(tl.where(best == top, best_at, vocabulary), 0)
    if SPLIT:
        tl.store(values_ptr + row * splits + split, top)
        tl.store(indices_ptr + row * splits + split, index)
    else:
        tl.store(out_ptr + row, index)


@triton.jit(do_not_specialize=["splits"])
def _argmax_join_kernel(
    values_ptr, indices_ptr, out_ptr, vocabulary, splits, BLOCK_S: tl.constexpr
):
    row = tl.program_id(0)
    s = tl.arange(0, BLOCK_S)
    at = row * splits + s
    value = tl.load(values_ptr + at, mask=s < splits, other=-float("inf"))
    index = tl.load(indices_ptr + at, mask=s < splits, other=vocabulary)
    tl.store(out_ptr + row, tl.min(tl.where(value == tl.max(value, 0), index, vocabulary), 0))


@triton.jit(do_not_specialize=["rows"])
def _advance_kernel(
    sampled_ptr,
    tokens_ptr,
    positions_ptr,
    lengths_ptr,
    slots_ptr,
    tables_ptr,
    tables_row,
    table_width,
    rows,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row, mask=row < rows, other=-1)
    real = slot >= 0
    token = tl.load(sampled_ptr + row, mask=real, other=0)
    position = tl.load(positions_ptr + row, mask=real, other=0) + 1
    length = tl.load(lengths_ptr + row, mask=real, other=0) + 1
    column = position // PAGE
    fits = column < table_width
    block = tl.load(tables_ptr + row * tables_row + column, mask=real & fits, other=0).to(tl.int64)
    # Block 0 is the null block: the sequence owns no block for this position.
    following = tl.where(fits & (block != 0), block * PAGE + position % PAGE, -1)
    tl.store(tokens_ptr + row, token, mask=real)
    tl.store(positions_ptr + row, position, mask=real)
    tl.store(lengths_ptr + row, length, mask=real)
    tl.store(slots_ptr + row, following, mask=real)


@operation("sampling", "triton: argmax", scratch=argmax_scratch)
def argmax(
    logits: torch.Tensor,
    out: torch.Tensor,
    values: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
) -> None:
    """out (M,) int32: the index of the largest of logits (M, V); ties go to the lowest index.

    A NaN is never the largest; a row of nothing but NaN gives 0. Without the scratch buffers one
    program goes through a whole row.
    """
    rows, vocabulary = logits.shape
    splits = 1 if values is None else values.shape[1]
    _argmax_kernel[(splits, rows)](
        logits,
        out,
        values,
        indices,
        logits.stride(0),
        vocabulary,
        _tiles(vocabulary, splits),
        splits,
        SPLIT=splits > 1,
        BLOCK=TILE,
        num_warps=4,
    )
    if splits > 1:
        _argmax_join_kernel[(rows,)](
            values,
            indices,
            out,
            vocabulary,
            splits,
            BLOCK_S=triton.next_power_of_2(splits),
            num_warps=1,
        )


@operation("advance", "triton: advance")
def advance(
    sampled: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> None:
    """Make the inputs of this step those of the next, in place, for rows with slot_mapping >= 0.

    sampled, token_ids, seq_lens (M,) int32; positions (M,) int64; slot_mapping (M,) int64 or int32;
    block_tables (M, nb) int32. A row that owns no block for its next position (its table is full, or
    holds the null block 0 there) gets slot -1. Padding rows are left as they are.
    """
    rows = sampled.shape[0]
    _advance_kernel[(triton.cdiv(rows, 128),)](
        sampled,
        token_ids,
        positions,
        seq_lens,
        slot_mapping,
        block_tables,
        block_tables.stride(0),
        block_tables.shape[1],
        rows,
        PAGE=block_size,
        BLOCK=128,
        num_warps=1,
    )
