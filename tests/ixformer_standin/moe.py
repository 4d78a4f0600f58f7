"""Operations around the experts; both generations have them where a build has any."""

from __future__ import annotations

from typing import Any

import torch

from ixformer_standin.checks import MODEL_DTYPES, Misuse, host_range, number, operation, tensor


@operation
def silu_and_mul(input: Any, output: Any = None) -> Any:
    tensor("input", input, (None, None), *MODEL_DTYPES)
    tensor("output", output, (input.shape[0], input.shape[1] // 2), input.dtype)
    gate, up = input.float().chunk(2, -1)
    output.copy_(gate * torch.sigmoid(gate) * up)
    return output


@operation
def vllm_moe_topk_softmax(
    topk_weights: Any, topk_ids: Any, token_expert_indicies: Any, gating_output: Any
) -> None:
    tensor("gating_output", gating_output, (None, None), torch.float32)
    tensor("topk_weights", topk_weights, (gating_output.shape[0], None), torch.float32)
    shape = tuple(topk_weights.shape)
    tensor("topk_ids", topk_ids, shape, torch.int32)
    tensor("token_expert_indicies", token_expert_indicies, shape, torch.int32)
    if gating_output.is_cpu and bool(gating_output.isnan().any()):
        raise Misuse("gating_output: which expert a kernel chooses of NaN is not known")
    rows, k = shape
    scores = torch.softmax(gating_output, -1)
    best, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    topk_weights.copy_(best[:, :k])  # not renormalised
    topk_ids.copy_(order[:, :k])
    places = torch.arange(rows * k, device=topk_ids.device).view(k, rows)
    token_expert_indicies.copy_(places.t())


@operation
def vllm_moe_align_block_size(
    topk_ids: Any,
    num_experts: Any,
    block_size: Any,
    sorted_ids: Any,
    expert_ids: Any,
    num_tokens_post_pad: Any,
) -> None:
    """Writes the pairs, the experts of used blocks and the count; nothing else, like vLLM's kernel."""
    tensor("topk_ids", topk_ids, (None, None), torch.int32)
    number("num_experts", num_experts, int)
    number("block_size", block_size, int)
    pairs, device = topk_ids.numel(), topk_ids.device
    tensor("sorted_ids", sorted_ids, (pairs + num_experts * (block_size - 1),), torch.int32)
    tensor("expert_ids", expert_ids, (pairs + num_experts,), torch.int32)
    tensor("num_tokens_post_pad", num_tokens_post_pad, (1,), torch.int32)
    host_range("topk_ids", topk_ids, 0, num_experts)
    flat = topk_ids.flatten().long()
    counts = torch.zeros(num_experts, dtype=torch.long, device=device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    grouped, order = torch.sort(flat, stable=True)
    rank = torch.arange(pairs, device=device) - (counts.cumsum(0) - counts)[grouped]
    target = (ends - padded)[grouped] + rank
    sorted_ids.index_copy_(0, target, order.int())
    starts = torch.arange(expert_ids.numel(), device=device) * block_size
    experts = torch.searchsorted(ends, starts, right=True).int()
    expert_ids.copy_(torch.where(starts < ends[-1:], experts, expert_ids))
    num_tokens_post_pad.copy_(ends[-1:])


def fused_gemm(
    A: Any,
    B: Any,
    C: Any,
    topk_weight: Any,
    topk_ids: Any,
    sorted_token_ids: Any,
    expert_ids: Any,
    num_tokens_post_padded: Any,
    mul_routed_weight: Any,
    top_k: Any,
    block_size_m: Any,
) -> None:
    """Reads the sorted lists, not topk_ids, and writes only rows that are listed, as the kernel does."""
    tensor("A", A, (None, None), *MODEL_DTYPES)
    tensor("B", B, (None, None, A.shape[1]), A.dtype)
    tensor("topk_ids", topk_ids, (None, None), torch.int32)
    tensor("C", C, (*topk_ids.shape, B.shape[1]), A.dtype)
    tensor("topk_weight", topk_weight, tuple(topk_ids.shape), torch.float32)
    number("mul_routed_weight", mul_routed_weight, bool)
    number("top_k", top_k, int)
    number("block_size_m", block_size_m, int)
    pairs, experts, device = topk_ids.numel(), B.shape[0], A.device
    if A.shape[0] * top_k != pairs:
        raise Misuse(f"A: {A.shape[0]} rows of {top_k} pairs each, but topk_ids has {pairs} pairs")
    if block_size_m not in (16, 32, 64, 128, 256):
        raise Misuse(f"block_size_m: found {block_size_m}")
    length = pairs + experts * (block_size_m - 1)
    tensor("sorted_token_ids", sorted_token_ids, (length,), torch.int32)
    tensor("expert_ids", expert_ids, (pairs + experts,), torch.int32)
    tensor("num_tokens_post_padded", num_tokens_post_padded, (1,), torch.int32)
    place = torch.arange(length, device=device)
    used = place < num_tokens_post_padded
    if used.is_cpu:
        host_range("sorted_token_ids", sorted_token_ids[used], 0, pairs + 1)
        if sorted(sorted_token_ids[used & (sorted_token_ids < pairs)].tolist()) != [*range(pairs)]:
            raise Misuse("sorted_token_ids: every pair is expected once")
    listed = used & (sorted_token_ids < pairs)
    if listed.is_cpu:  # no more than there is to do
        place = listed.nonzero()[:, 0]
        listed = listed[place]
    pair = torch.where(listed, sorted_token_ids[place].long(), 0)
    expert = torch.where(listed, expert_ids[place // block_size_m].long(), 0)
    host_range("expert_ids", expert, 0, experts)
    product = torch.bmm(B[expert].float(), A[pair // top_k].float()[:, :, None])[:, :, 0]
    if mul_routed_weight:
        product = product * topk_weight.flatten()[pair][:, None]
    flat = C.view(pairs, -1)
    landing = torch.cat([flat, flat[:1]])  # what is not listed lands behind the end
    landing.index_copy_(0, torch.where(listed, pair, pairs), product.to(C.dtype))
    flat.copy_(landing[:-1])


@operation
def vllm_invoke_fused_moe_kernel(
    A: Any,
    B: Any,
    C: Any,
    topk_weight: Any,
    topk_ids: Any,
    sorted_token_ids: Any,
    expert_ids: Any,
    num_tokens_post_padded: Any,
    mul_routed_weight: Any,
    top_k: Any,
    block_size_m: Any,
    persistent: Any = False,
    w_scale: Any = None,
    a_scale: Any = None,
) -> None:
    number("persistent", persistent, bool, False)
    if w_scale is not None or a_scale is not None:
        raise Misuse("scales are for int8 weights")
    lists = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    fused_gemm(A, B, C, topk_weight, topk_ids, *lists, mul_routed_weight, top_k, block_size_m)


@operation
def moe_output_reduce_sum(
    input: Any,
    topk_weight: Any = None,
    output: Any = None,
    mask: Any = None,
    extra_residual: Any = None,
    scaling_factor: Any = 1.0,
) -> Any:
    tensor("input", input, (None, None, None), *MODEL_DTYPES)
    rows, k, width = input.shape
    tensor("topk_weight", topk_weight, (rows, k), torch.float32)
    tensor("output", output, (rows, width), input.dtype)
    number("scaling_factor", scaling_factor, float)
    if mask is not None:
        raise Misuse("mask: what becomes of masked rows that hold NaN is not known")
    total = (input.float() * topk_weight[:, :, None]).sum(1)
    if extra_residual is not None:
        tensor("extra_residual", extra_residual, (rows, width), input.dtype)
        total = total * scaling_factor + extra_residual.float()
    output.copy_(total)
    return output


@operation
def moe_topk_softmax(
    gating_output: Any,
    topk: Any,
    topk_weight: Any = None,
    topk_ids: Any = None,
    renormalize: Any = True,
) -> Any:
    raise Misuse("moe_topk_softmax allocates a scratch whatever it is given")


@operation
def moe_compute_token_index(
    topk_ids: Any,
    num_experts: Any,
    src_dst: Any = None,
    dst_src: Any = None,
    expert_sizes_gpu: Any = None,
    expert_sizes_cpu: Any = None,
) -> Any:
    raise Misuse("moe_compute_token_index gives sizes on the CPU: a synchronisation")


@operation
def moe_expand_input(
    hidden_states: Any,
    dst_to_src: Any,
    dst_tokens: Any,
    topk: Any,
    src_to_dst: Any = None,
    output: Any = None,
) -> Any:
    raise Misuse("moe_expand_input serves moe_w16a16_group_gemm only, which synchronises")


OPERATIONS = {
    function.__name__: function
    for function in (
        silu_and_mul,
        vllm_moe_topk_softmax,
        vllm_moe_align_block_size,
        vllm_invoke_fused_moe_kernel,
        moe_output_reduce_sum,
        moe_topk_softmax,
        moe_compute_token_index,
        moe_expand_input,
    )
}
