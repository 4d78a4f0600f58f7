"""moe_align_block_size in plain torch: on the host where index tensors are host memory, else on the
device without a synchronisation."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphcap.operations import BufferSpec, operation


def _align_scratch(
    ids: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded_count: torch.Tensor,
    num_experts: int,
    block: int,
) -> Mapping[str, BufferSpec]:
    if ids.device.type != "cuda":
        return {}
    pairs = ids.numel()
    return {
        "keys": ((pairs,), torch.int64),
        "order": ((pairs,), torch.int64),
        "sorted_keys": ((pairs,), torch.int64),
        "counts": ((num_experts + 1,), torch.int64),
        "ends": ((num_experts + 1,), torch.int64),
        "padded_ends": ((num_experts + 1,), torch.int64),
        "target": ((pairs,), torch.int64),
        "shift": ((pairs,), torch.int64),
        "ones": ((pairs,), torch.int64),
        "positions": ((max(pairs, sorted_ids.numel()),), torch.int64),
        "landing": ((sorted_ids.numel() + 1,), torch.int32),
        "values": ((pairs,), torch.int32),
        "block_starts": ((expert_ids.numel(),), torch.int64),
        "block_experts": ((expert_ids.numel(),), torch.int64),
        "unused": ((expert_ids.numel(),), torch.bool),
        "dropped": ((pairs,), torch.bool),
    }


@operation("moe_align_block_size", scratch=_align_scratch)
def align(
    ids: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded_count: torch.Tensor,
    num_experts: int,
    block: int,
    **scratch: torch.Tensor,
) -> None:
    """Group the M*K (token, expert) pairs by expert, each group padded to whole blocks.

    sorted_ids: flat pair indices in ascending expert, then ascending pair; M*K where padded.
    expert_ids: the expert of each block, -1 where unused. padded_count: used entries of sorted_ids.
    Pairs with a negative id are dropped.
    """
    if ids.device.type == "cpu":
        _align_on_host(ids, sorted_ids, expert_ids, padded_count, block)
    else:
        _align_on_device(ids, sorted_ids, expert_ids, padded_count, num_experts, block, **scratch)


def _align_on_host(
    ids: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded_count: torch.Tensor,
    block: int,
) -> None:
    chosen = ids.flatten().tolist()
    groups: dict[int, list[int]] = {}
    for pair, expert in enumerate(chosen):
        if expert >= 0:
            groups.setdefault(expert, []).append(pair)
    sorted_view, expert_view = sorted_ids.numpy(), expert_ids.numpy()
    sorted_view.fill(len(chosen))
    expert_view.fill(-1)
    used = 0
    for expert in sorted(groups):
        group = groups[expert]
        sorted_view[used : used + len(group)] = group
        blocks = -(-len(group) // block)
        expert_view[used // block : used // block + blocks] = expert
        used += blocks * block
    padded_count.fill_(used)


def _align_on_device(
    ids: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded_count: torch.Tensor,
    num_experts: int,
    block: int,
    *,
    keys: torch.Tensor,
    order: torch.Tensor,
    sorted_keys: torch.Tensor,
    counts: torch.Tensor,
    ends: torch.Tensor,
    padded_ends: torch.Tensor,
    target: torch.Tensor,
    shift: torch.Tensor,
    ones: torch.Tensor,
    positions: torch.Tensor,
    landing: torch.Tensor,
    values: torch.Tensor,
    block_starts: torch.Tensor,
    block_experts: torch.Tensor,
    unused: torch.Tensor,
    dropped: torch.Tensor,
) -> None:
    pairs = ids.numel()
    keys.copy_(ids.view(-1))
    torch.lt(keys, 0, out=dropped)
    keys.masked_fill_(dropped, num_experts)  # dropped pairs sort behind every expert
    torch.sort(keys, stable=True, out=(sorted_keys, order))
    counts.zero_()
    ones.fill_(1)
    counts.index_add_(0, keys, ones)
    torch.cumsum(counts, 0, out=ends)
    counts[num_experts:].zero_()
    # padded_ends: cumulative sum of the counts rounded up to whole blocks.
    torch.add(counts, block - 1, out=padded_ends)
    padded_ends.div_(block, rounding_mode="floor").mul_(block)
    torch.cumsum(padded_ends, 0, out=padded_ends)
    padded_count.copy_(padded_ends[num_experts - 1 : num_experts])
    # Where each sorted pair lands: its rank, moved by the padding of the groups before its own.
    torch.sub(padded_ends, ends, out=counts)  # padding up to and including each group
    torch.sub(sorted_keys, 1, out=keys)
    keys.clamp_(min=0)
    torch.index_select(counts, 0, keys, out=shift)
    torch.eq(sorted_keys, 0, out=dropped)
    shift.masked_fill_(dropped, 0)
    torch.arange(pairs, out=positions[:pairs])
    torch.add(positions[:pairs], shift, out=target)
    torch.eq(sorted_keys, num_experts, out=dropped)
    target.masked_fill_(dropped, sorted_ids.numel())  # dropped pairs land behind the end
    landing.fill_(pairs)
    values.copy_(order)
    landing.index_copy_(0, target, values)
    sorted_ids.copy_(landing[:-1])
    # A block belongs to the first expert whose padded end lies beyond the block's start.
    torch.arange(0, expert_ids.numel() * block, block, out=block_starts)
    torch.searchsorted(padded_ends[:num_experts], block_starts, right=True, out=block_experts)
    torch.ge(block_starts, padded_ends[num_experts - 1 : num_experts], out=unused)
    block_experts.masked_fill_(unused, -1)
    expert_ids.copy_(block_experts)
