"""Expert kernels in plain torch: the oracle of the others, and what CPUs run.

Nothing here allocates: temporaries are declared as scratch and come from the pool. On a CUDA device
nothing synchronises either; on a CPU a kernel may read its index tensors, which are host memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphcap.moe.kernels.constants import constant
from graphcap.moe.kernels.reference_align import align
from graphcap.operations import BufferSpec, operation

__all__ = ["align", "expert_gemm", "merge", "router_gemm", "silu_and_mul", "topk_softmax"]


def _router_scratch(
    hidden: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor
) -> Mapping[str, BufferSpec]:
    if hidden.dtype == torch.float32:
        return {}
    return {"rounded": (tuple(logits.shape), hidden.dtype)}


@operation("router GEMM", scratch=_router_scratch)
def router_gemm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    logits: torch.Tensor,
    rounded: torch.Tensor | None = None,
) -> None:
    """logits (M, E) float32 = hidden (M, H) @ weight (E, H).T, rounded to the model's dtype first, as
    transformers' router does."""
    if rounded is None:
        torch.mm(hidden, weight.t(), out=logits)
    else:
        torch.mm(hidden, weight.t(), out=rounded)
        logits.copy_(rounded)


def _topk_scratch(
    logits: torch.Tensor,
    row_ids: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    renormalize: bool,
) -> Mapping[str, BufferSpec]:
    rows = weights.shape[0]
    return {
        "scores": (tuple(logits.shape), torch.float32),
        "order": (tuple(weights.shape), torch.int64),
        "total": ((rows, 1), torch.float32),
        "is_pad": ((rows, 1), torch.bool),
    }


@operation("topk_softmax", scratch=_topk_scratch)
def topk_softmax(
    logits: torch.Tensor,
    row_ids: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    renormalize: bool,
    *,
    scores: torch.Tensor,
    order: torch.Tensor,
    total: torch.Tensor,
    is_pad: torch.Tensor,
) -> None:
    """Softmax over the experts, then the top-k: weights (M, K) float32, ids (M, K) int32.

    Of equal scores the lower expert comes first. Rows with a negative row id (pads) get id -1 and
    weight 0: they reach no expert.
    """
    device = logits.device
    torch.softmax(logits, -1, out=scores)
    # Maxima one by one: torch.topk leaves the order of equal scores open, and a sort allocates.
    for k in range(weights.shape[1]):
        best, at = weights[:, k : k + 1], order[:, k : k + 1]
        torch.max(scores, -1, keepdim=True, out=(best, at))
        scores.scatter_(1, at, -1.0)
    ids.copy_(order)
    if renormalize:
        torch.sum(weights, -1, keepdim=True, out=total)
        weights.div_(total)
    torch.lt(row_ids[:, None], constant(0, device, row_ids.dtype), out=is_pad)
    # where, not masked_fill_: that reads its value on the host.
    torch.where(is_pad, constant(0, device, torch.float32), weights, out=weights)
    torch.where(is_pad, constant(-1, device, torch.int32), ids, out=ids)


def _gemm_scratch(
    a: torch.Tensor,
    weight: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded_count: torch.Tensor,
    out: torch.Tensor,
    pairs_per_row: int,
    block: int,
) -> Mapping[str, BufferSpec]:
    _, width, depth = tuple(weight.shape)
    specs: dict[str, BufferSpec] = {
        "rows": ((block, depth), a.dtype),
        "results": ((block, width), a.dtype),
        "pairs": ((sorted_ids.numel(),), torch.int64),
        "row_of_pair": ((sorted_ids.numel(),), torch.int64),
    }
    if a.device.type == "cuda":
        specs["one_weight"] = ((1, width, depth), a.dtype)
        specs["experts"] = ((expert_ids.numel(),), torch.int64)
        specs["landing"] = ((out.shape[0] + 1, width), a.dtype)
    return specs


@operation("fused_moe", scratch=_gemm_scratch)
def expert_gemm(
    a: torch.Tensor,
    weight: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded_count: torch.Tensor,
    out: torch.Tensor,
    pairs_per_row: int,
    block: int,
    **scratch: torch.Tensor,
) -> None:
    """out[p] (M*K, N) = a[p // pairs_per_row] @ weight[expert of p] (N, C).T for every sorted pair p.

    Rows of `out` whose pair was dropped are undefined.
    """
    pairs, row_of_pair = scratch["pairs"], scratch["row_of_pair"]
    pairs.copy_(sorted_ids)
    divisor = constant(pairs_per_row, a.device, torch.int64)
    torch.div(pairs, divisor, rounding_mode="floor", out=row_of_pair)
    if a.device.type == "cpu":
        _gemm_on_host(a, weight, expert_ids, padded_count, out, block, pairs, row_of_pair, scratch)
    else:
        _gemm_on_device(a, weight, expert_ids, out, block, pairs, row_of_pair, scratch)


def _gemm_on_host(
    a: torch.Tensor,
    weight: torch.Tensor,
    expert_ids: torch.Tensor,
    padded_count: torch.Tensor,
    out: torch.Tensor,
    block: int,
    pairs: torch.Tensor,
    row_of_pair: torch.Tensor,
    scratch: Mapping[str, torch.Tensor],
) -> None:
    rows, results = scratch["rows"], scratch["results"]
    used = int(padded_count)
    listed, row_list = pairs[:used].tolist(), row_of_pair[:used].tolist()
    end = out.shape[0]
    for index, expert in enumerate(expert_ids[: used // block].tolist()):
        start = index * block
        real = 1
        while real < block and listed[start + real] < end:
            real += 1
        matrix = weight[expert].t()
        if real == 1:
            pair, row = listed[start], row_list[start]
            torch.mm(a[row : row + 1], matrix, out=out[pair : pair + 1])
            continue
        torch.index_select(a, 0, row_of_pair[start : start + real], out=rows[:real])
        torch.mm(rows[:real], matrix, out=results[:real])
        out.index_copy_(0, pairs[start : start + real], results[:real])


def _gemm_on_device(
    a: torch.Tensor,
    weight: torch.Tensor,
    expert_ids: torch.Tensor,
    out: torch.Tensor,
    block: int,
    pairs: torch.Tensor,
    row_of_pair: torch.Tensor,
    scratch: Mapping[str, torch.Tensor],
) -> None:
    rows, results, one_weight = scratch["rows"], scratch["results"], scratch["one_weight"]
    experts, landing = scratch["experts"], scratch["landing"]
    experts.copy_(expert_ids)
    experts.clamp_(min=0)
    row_of_pair.clamp_(max=a.shape[0] - 1)  # padding reads some row and lands behind the end
    for index in range(min(expert_ids.numel(), out.shape[0])):
        span = slice(index * block, (index + 1) * block)
        torch.index_select(weight, 0, experts[index : index + 1], out=one_weight)
        # The last block may be cut short by the end of the list.
        length = min(block, pairs.numel() - index * block)
        torch.index_select(a, 0, row_of_pair[span], out=rows[:length])
        torch.mm(rows[:length], one_weight[0].t(), out=results[:length])
        landing.index_copy_(0, pairs[span], results[:length])
    out.copy_(landing[:-1])


def _silu_scratch(gate_up: torch.Tensor, out: torch.Tensor) -> Mapping[str, BufferSpec]:
    return {"gated": (tuple(out.shape), out.dtype)}


@operation("silu_and_mul", scratch=_silu_scratch)
def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor, *, gated: torch.Tensor) -> None:
    """out (R, I) = silu(gate_up[:, :I]) * gate_up[:, I:]."""
    half = out.shape[-1]
    torch.ops.aten.silu.out(gate_up[:, :half], out=gated)
    torch.mul(gated, gate_up[:, half:], out=out)


def _merge_scratch(
    pairs: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor
) -> Mapping[str, BufferSpec]:
    return {
        "wide": (tuple(pairs.shape), torch.float32),
        "dropped": ((*weights.shape, 1), torch.bool),
        "total": (tuple(out.shape), torch.float32),
    }


@operation("merge", scratch=_merge_scratch)
def merge(
    pairs: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
    *,
    wide: torch.Tensor,
    dropped: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """out (M, H) = sum over k of weights[m, k] * pairs[m, k], in float32, over real pairs only."""
    device = ids.device
    torch.lt(ids[:, :, None], constant(0, device, torch.int32), out=dropped)
    wide.copy_(pairs)
    wide.mul_(weights[:, :, None])
    # Nobody wrote the rows of dropped pairs.
    torch.where(dropped, constant(0, device, torch.float32), wide, out=wide)
    torch.sum(wide, 1, out=total)
    out.copy_(total)
