"""Expert kernels of ixformer, bound operation by operation to what the imported library has.

Out-parameters are always given and nothing is cast, so that a step allocates nothing: gating stays
float32, indices int32. ``moe_topk_softmax`` (allocates a scratch whatever it is given),
``expert_sizes_cpu`` and ``moe_w16a16_group_gemm`` (read counts on the host) are never used.

Padding rows. ixformer's alignment is not known to take negative expert ids, nor its merge to leave out
rows that nobody wrote. So a padding row is routed, with weight 0, to the experts of the first row: no
expert is read for its sake, every row of every buffer is written, and what comes out is zero as long
as its hidden state is finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphcap.moe.kernels import ExpertKernels, FusedGemm
from graphcap.moe.kernels.constants import constant
from graphcap.moe.kernels.ixformer_library import FIRST, NEWER, Form, Found, Library
from graphcap.operations import BufferSpec, Operation

_TOPK = Form("vllm_moe_topk_softmax", 4, {"topk_weights": 0, "topk_ids": 1, "gating_output": 3})
_ALIGN = Form(
    "vllm_moe_align_block_size",
    6,
    {"topk_ids": 0, "num_experts": 1, "block_size": 2, "sorted_ids": 3, "expert_ids": 4},
)
_GEMM_PLACES = {"A": 0, "B": 1, "C": 2, "mul_routed_weight": 8, "top_k": 9, "block_size_m": 10}
_GEMM = Form("vllm_invoke_fused_moe_kernel", 12, {**_GEMM_PLACES, "persistent": 11}, NEWER)
_GEMM_FIRST = Form("vllm_invoke_fused_moe_kernel", 11, _GEMM_PLACES, FIRST)
_SILU = Form("silu_and_mul", 2, {"input": 0, "output": 1})
_MERGE = Form(
    "moe_output_reduce_sum",
    6,
    {
        "input": 0,
        "topk_weight": 1,
        "output": 2,
        "mask": 3,
        "extra_residual": 4,
        "scaling_factor": 5,
    },
)


def bind(library: Library, stand_in: ExpertKernels) -> ExpertKernels:
    """ixformer's expert kernels, with those of `stand_in` for what the library lacks.

    The alignment and the fused GEMM are bound together or not at all, since one reads the lists of
    the other; without them top-k and merge are the stand-in's too, which drop padding rows.
    """
    silu = library.find(_SILU)
    notes = {"router_gemm": "ixformer has no such operation"}
    if isinstance(silu, str):
        notes["silu_and_mul"] = silu
    silu_and_mul = stand_in.silu_and_mul if isinstance(silu, str) else _silu_and_mul(silu)
    align, gemm = library.find(_ALIGN), library.find(_GEMM, _GEMM_FIRST)
    topk, merge = library.find(_TOPK), library.find(_MERGE)
    if isinstance(align, str) or isinstance(gemm, str):
        for name, found in (("topk_softmax", topk), ("align", align), ("expert_gemm", gemm)):
            notes[name] = found if isinstance(found, str) else _USELESS_ALONE
        notes["merge"] = _USELESS_ALONE
        return ExpertKernels(
            "ixformer",
            stand_in.router_gemm,
            stand_in.topk_softmax,
            stand_in.align,
            stand_in.expert_gemm,
            silu_and_mul,
            stand_in.merge,
            stand_in.pairs,
            notes=notes,
        )
    if isinstance(topk, str):
        notes["topk_softmax"] = topk
    if isinstance(merge, str):
        notes["merge"] = merge
    inner = stand_in.topk_softmax if isinstance(topk, str) else _topk_softmax(topk)
    gemm_operation = _fused_gemm(gemm)
    return ExpertKernels(
        "ixformer",
        stand_in.router_gemm,
        _following_first_row(inner, reads_rows=isinstance(topk, str)),
        _align(align),
        gemm_operation,
        silu_and_mul,
        _sum() if isinstance(merge, str) else _merge(merge),
        fused=FusedGemm(gemm_operation, weighs=isinstance(merge, str)),
        notes=notes,
    )


_USELESS_ALONE = (
    "bound only together with vllm_moe_align_block_size and vllm_invoke_fused_moe_kernel"
)


def _topk_softmax(found: Found) -> Operation:
    call = found.call

    def scratch(
        logits: torch.Tensor,
        row_ids: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        renormalize: bool,
    ) -> Mapping[str, BufferSpec]:
        specs: dict[str, BufferSpec] = {"indices": (tuple(ids.shape), torch.int32)}
        if renormalize:
            specs["total"] = ((ids.shape[0], 1), torch.float32)
        return specs

    def topk_softmax(
        logits: torch.Tensor,
        row_ids: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        renormalize: bool,
        *,
        indices: torch.Tensor,
        total: torch.Tensor | None = None,
    ) -> None:
        call(weights, ids, indices, logits)
        if total is not None:  # the operation does not renormalise
            torch.sum(weights, -1, keepdim=True, out=total)
            weights.div_(total)

    return Operation("topk_softmax", found.implementation, topk_softmax, scratch)


def _following_first_row(inner: Operation, *, reads_rows: bool) -> Operation:
    """`inner` with padding rows routed where the first row is, with weight 0; see above.

    The logits of padding rows are overwritten with zeros: of NaN a kernel may choose an expert that
    does not exist. `reads_rows`: inner drops padding rows itself, and is told that there are none.
    """

    def scratch(
        logits: torch.Tensor,
        row_ids: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        renormalize: bool,
    ) -> Mapping[str, BufferSpec]:
        specs: dict[str, BufferSpec] = {
            "pad_rows": ((ids.shape[0], 1), torch.bool),
            "own_ids": (tuple(ids.shape), torch.int32),
        }
        if reads_rows:
            specs["real_rows"] = (tuple(row_ids.shape), row_ids.dtype)
        if inner.scratch is not None:
            specs.update(inner.scratch(logits, row_ids, weights, ids, renormalize))
        return specs

    def topk_softmax(
        logits: torch.Tensor,
        row_ids: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        renormalize: bool,
        *,
        pad_rows: torch.Tensor,
        own_ids: torch.Tensor,
        real_rows: torch.Tensor | None = None,
        **rest: torch.Tensor,
    ) -> None:
        device = logits.device
        zero = constant(0, device, torch.float32)
        torch.lt(row_ids[:, None], constant(0, device, row_ids.dtype), out=pad_rows)
        torch.where(pad_rows, zero, logits, out=logits)
        if real_rows is not None:
            torch.clamp(row_ids, min=0, out=real_rows)
            row_ids = real_rows
        inner.function(logits, row_ids, weights, own_ids, renormalize, **rest)
        torch.where(pad_rows, zero, weights, out=weights)
        torch.where(pad_rows, own_ids[:1], own_ids, out=ids)

    return Operation("topk_softmax", inner.implementation, topk_softmax, scratch)


def _align(found: Found) -> Operation:
    call = found.call

    def align(
        ids: torch.Tensor,
        sorted_ids: torch.Tensor,
        expert_ids: torch.Tensor,
        padded_count: torch.Tensor,
        num_experts: int,
        block: int,
    ) -> None:
        # As its callers do: the operation writes pairs, not the padding between them.
        sorted_ids.fill_(ids.numel())
        call(ids, num_experts, block, sorted_ids, expert_ids, padded_count)

    return Operation("moe_align_block_size", found.implementation, align)


def _fused_gemm(found: Found) -> Operation:
    call = found.call
    last: tuple[Any, ...] = (False,) if found.form is _GEMM else ()  # persistent

    def fused_gemm(
        a: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        sorted_ids: torch.Tensor,
        expert_ids: torch.Tensor,
        padded_count: torch.Tensor,
        multiplies: bool,
        pairs_per_row: int,
        block: int,
    ) -> None:
        routing = (weights, ids, sorted_ids, expert_ids, padded_count)
        call(a, weight, out, *routing, multiplies, pairs_per_row, block, *last)

    return Operation("fused_moe", found.implementation, fused_gemm)


def _silu_and_mul(found: Found) -> Operation:
    call = found.call

    def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
        call(gate_up, out)

    return Operation("silu_and_mul", found.implementation, silu_and_mul)


def _merge(found: Found) -> Operation:
    """Weights, sum over the experts of a token, and residual in one launch."""
    call = found.call

    def merge(
        pairs: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> None:
        call(pairs, weights, out, None, residual, 1.0)

    return Operation("merge", found.implementation, merge)


def _sum() -> Operation:
    """The sum alone, where the GEMM has multiplied by the weights."""

    def merge(
        pairs: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> None:
        torch.sum(pairs, 1, out=out)
        if residual is not None:
            out.add_(residual)

    return Operation("merge", "torch: sum", merge)
