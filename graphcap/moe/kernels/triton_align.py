# mypy: allow-untyped-defs
"""moe_align_block_size in Triton: sort the token-expert pairs by expert, in whole blocks.

Both kernels count instead of racing: a pair's place is the number of pairs that must come before it,
so the result does not depend on the order in which anything runs. Few pairs compare all with all in
one program, at a cost independent of E; more pairs take one program for each expert.
"""

import torch
import triton
import triton.language as tl

from graphcap.moe.kernels.triton_pdl import let_next_start, pdl_options, wait_for_previous
from graphcap.operations import operation

PAIRWISE_MAX = 128
"""Up to this many pairs the comparison of all with all is the shorter way."""

FILL = tl.constexpr(256)
"""Entries that one program fills at a time beyond what is used."""


@triton.jit
def _fill(ptr, value, start, stop, step):
    lane = tl.arange(0, FILL)
    for at in range(start, stop, step):
        tl.store(ptr + at + lane, tl.zeros((FILL,), tl.int32) + value, mask=at + lane < stop)


@triton.jit(do_not_specialize=["pairs", "capacity", "blocks"])
def _align_pairwise_kernel(
    ids_ptr,
    sorted_ptr,
    expert_ids_ptr,
    count_ptr,
    pairs,
    capacity,
    blocks,
    BLOCK: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    # The same pairs along both axes; r is the pair that looks for its place, c those it looks at.
    lane = tl.arange(0, PAIRS_PAD)
    expert = tl.load(ids_ptr + lane, mask=lane < pairs, other=-1)
    r = lane[:, None]
    c = lane[None, :]
    expert_r = expert[:, None]
    expert_c = expert[None, :]
    same = (expert_r == expert_c) & (expert_c >= 0)
    rank = tl.sum((same & (c < r)).to(tl.int32), 1)
    count = tl.sum(same.to(tl.int32), 1)
    # Every BLOCK-th pair of an expert opens a block, so blocks are counted by their openers.
    rank_c = tl.sum((same & (r < c)).to(tl.int32), 0)
    opens_c = (expert >= 0) & (rank_c % BLOCK == 0)
    earlier = tl.sum((opens_c[None, :] & (expert_c < expert_r)).to(tl.int32), 1)
    used = tl.sum(opens_c.to(tl.int32), 0)

    real = expert >= 0
    tl.store(sorted_ptr + earlier * BLOCK + rank, lane, mask=real)
    opens = real & (rank % BLOCK == 0)
    block = earlier + rank // BLOCK
    tl.store(expert_ids_ptr + block, expert, mask=opens)
    j = tl.arange(0, BLOCK_PAD)[None, :]
    tl.store(
        sorted_ptr + (block * BLOCK)[:, None] + j,
        tl.zeros((PAIRS_PAD, BLOCK_PAD), tl.int32) + pairs,
        mask=opens[:, None] & (j >= (count - rank)[:, None]) & (j < BLOCK),
    )
    _fill(sorted_ptr, pairs, used * BLOCK, capacity, FILL)
    _fill(expert_ids_ptr, -1, used, blocks, FILL)
    tl.store(count_ptr, used * BLOCK)


@triton.jit(do_not_specialize=["pairs", "capacity", "blocks"])
def _align_experts_kernel(
    ids_ptr,
    sorted_ptr,
    expert_ids_ptr,
    count_ptr,
    pairs,
    capacity,
    blocks,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    me = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros((E_PAD,), tl.int32)
    for start in range(0, pairs, CHUNK):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < pairs, other=-1)
        # Dropped pairs go to a bin of their own: a histogram has no place for -1.
        counts += tl.histogram(tl.where(ids < 0, E, ids), E_PAD)
    expert = tl.arange(0, E_PAD)
    needed = tl.where(expert < E, (counts + (BLOCK - 1)) // BLOCK, 0)
    first = tl.sum(tl.where(expert < me, needed, 0), 0)
    mine = tl.sum(tl.where(expert == me, counts, 0), 0)
    own = (mine + (BLOCK - 1)) // BLOCK
    used = tl.sum(needed, 0)

    begin = first * BLOCK
    for start in range(0, pairs, CHUNK):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < pairs, other=-1)
        hit = (ids == me).to(tl.int32)
        tl.store(sorted_ptr + begin + tl.cumsum(hit, 0) - 1, start + lane, mask=hit != 0)
        begin += tl.sum(hit, 0)
    j = tl.arange(0, BLOCK_PAD)
    pads = tl.zeros((BLOCK_PAD,), tl.int32) + pairs
    tl.store(sorted_ptr + begin + j, pads, mask=j < own * BLOCK - mine)
    _fill(expert_ids_ptr, me, first, first + own, FILL)
    # The unused end is shared out among the programs.
    _fill(sorted_ptr, pairs, used * BLOCK + me * FILL, capacity, E * FILL)
    _fill(expert_ids_ptr, -1, used + me * FILL, blocks, E * FILL)
    if me == 0:
        tl.store(count_ptr, used * BLOCK)


@operation("moe_align_block_size", "triton: align")
def align(
    ids: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded_count: torch.Tensor,
    num_experts: int,
    block: int,
    pdl: bool = False,
) -> None:
    """Group the pairs p = m*K + k of ids (M, K) by expert, each group in whole blocks of `block`.

    sorted_ids (P,): pairs by ascending expert, then ascending p; every other entry is M*K.
    expert_ids (B,): the expert of each block; -1 for blocks beyond the used ones.
    padded_count (1,): how many entries of sorted_ids are used, a multiple of `block`.
    All int32 and contiguous. Pairs whose id is -1 are dropped. All of P and B is written.
    """
    options = pdl_options(ids) if pdl else {"PDL": False}
    pairs = ids.numel()
    capacity = sorted_ids.shape[0]
    blocks = expert_ids.shape[0]
    block_pad = triton.next_power_of_2(block)
    if pairs <= PAIRWISE_MAX:
        _align_pairwise_kernel[(1,)](
            ids,
            sorted_ids,
            expert_ids,
            padded_count,
            pairs,
            capacity,
            blocks,
            BLOCK=block,
            BLOCK_PAD=block_pad,
            PAIRS_PAD=max(16, triton.next_power_of_2(pairs)),
            num_warps=4,
            **options,
        )
        return
    _align_experts_kernel[(num_experts,)](
        ids,
        sorted_ids,
        expert_ids,
        padded_count,
        pairs,
        capacity,
        blocks,
        E=num_experts,
        BLOCK=block,
        BLOCK_PAD=block_pad,
        E_PAD=triton.next_power_of_2(num_experts + 1),
        CHUNK=min(2048, triton.next_power_of_2(pairs)),
        num_warps=4,
        **options,
    )
