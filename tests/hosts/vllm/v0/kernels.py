"""vLLM 0.6.3's kernels in plain torch, so that its Python code runs without its compiled part.

`install` puts them where vLLM keeps its own, and refuses one whose parameters are not the wheel's. They
compute in float64 and round once, as different from graphcap's kernels as can be, and no observer of
torch's dispatcher sees what they do.
"""

from __future__ import annotations

import inspect
from collections import Counter
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from v0.absent import CausalBlocks, attention

calls: Counter[str] = Counter()
"""How often each has run."""


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    # The kernel goes by the rows of `x`; in its chunk loop vLLM hands it an `out` that names fewer.
    half = x.shape[-1] // 2
    wide = x.double()
    result = torch.nn.functional.silu(wide[..., :half]) * wide[..., half:]
    _as_far_as(out, x.shape[0]).copy_(result)


def rms_norm(out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    out.copy_(_normed(input, weight, epsilon))


def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    residual.add_(input)
    input.copy_(_normed(residual, weight, epsilon))


def _normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.double()


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    assert is_neox
    cos, sin = cos_sin_cache[positions].double().chunk(2, -1)
    for heads in (query, key):
        each = heads.view(heads.shape[0], -1, head_size)
        first, second = each.double().chunk(2, -1)
        turned = (
            first * cos[:, None] - second * sin[:, None],
            second * cos[:, None] + first * sin[:, None],
        )
        each.copy_(torch.cat(turned, -1))


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: float,
    v_scale: float,
) -> None:
    assert (kv_cache_dtype, k_scale, v_scale) == ("auto", 1.0, 1.0)
    size = value_cache.shape[3]
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:  # padding
            continue
        block, offset = divmod(slot, size)
        heads, head_size = key.shape[1:]
        key_cache[block, :, :, offset, :] = key[row].view(heads, -1, key_cache.shape[4])
        value_cache[block, :, :, offset] = value[row].view(heads, head_size)


def paged_attention_v1(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: float,
    v_scale: float,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    assert alibi_slopes is None
    for row, length in enumerate(seq_lens.tolist()):
        # What the kernel has shared memory for.
        assert 1 <= length <= max_seq_len, f"{length} tokens, launched for {max_seq_len}"
        blocks = block_tables[row, : -(-length // block_size)].long()
        keys = key_cache[blocks].permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)[:length]
        values = value_cache[blocks].permute(0, 3, 1, 2).flatten(0, 1)[:length]
        group = query.shape[1] // num_kv_heads
        k, v = (t.double().repeat_interleave(group, 1) for t in (keys, values))
        scores = torch.einsum("hd,khd->hk", query[row].double(), k) * scale
        out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v).to(out.dtype)


def paged_attention_v2(
    out: torch.Tensor,
    exp_sum: torch.Tensor,
    max_logits: torch.Tensor,
    tmp_out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: float,
    v_scale: float,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    caches = (key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size)
    paged_attention_v1(
        *(out, query, *caches, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale)
    )


def context_attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    kv_cache_dtype: str,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    b_loc: torch.Tensor,
    b_start_loc: torch.Tensor,
    b_seq_len: torch.Tensor,
    b_ctx_len: torch.Tensor,
    max_input_len: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    alibi_slopes: Any = None,
    sliding_window: int | None = None,
) -> None:
    """Prompts without a cached prefix."""
    prompts = b_start_loc.shape[0]
    assert int(b_ctx_len[:prompts].sum()) == 0
    group = q.shape[1] // k.shape[1]
    heads = [t[None].repeat_interleave(group, 2) for t in (k, v)]
    lengths = CausalBlocks(b_seq_len[:prompts].tolist())
    o.copy_(attention(q[None], *heads, lengths, 0.0, q.shape[-1] ** -0.5)[0])


def topk_softmax(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    token_expert_indicies: torch.Tensor,
    gating_output: torch.Tensor,
) -> None:
    # Of equal logits, which are common in bfloat16, the lower expert comes first.
    weights, ids = gating_output.double().softmax(-1).sort(stable=True, dim=-1, descending=True)
    topk_weights.copy_(weights[:, : topk_ids.shape[1]])
    topk_ids.copy_(ids[:, : topk_ids.shape[1]])


def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    experts_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
) -> None:
    flat = topk_ids.flatten()
    sorted_token_ids.fill_(flat.numel())
    used = 0
    for expert in range(num_experts):
        pairs = (flat == expert).nonzero().flatten()
        blocks = -(-pairs.numel() // block_size)
        sorted_token_ids[used : used + pairs.numel()] = pairs.to(torch.int32)
        experts_ids[used // block_size : used // block_size + blocks] = expert
        used += blocks * block_size
    num_tokens_post_pad.fill_(used)


def invoke_fused_moe_kernel(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A_scale: torch.Tensor | None,
    B_scale: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    mul_routed_weight: bool,
    top_k: int,
    config: dict[str, Any],
    compute_type: Any,
    use_fp8_w8a8: bool,
    use_int8_w8a16: bool,
) -> None:
    block, pairs = config["BLOCK_SIZE_M"], topk_ids.numel()
    a = _as_far_as(A, pairs // top_k).double()
    if use_int8_w8a16:
        assert B_scale is not None
    out = C.view(-1, C.shape[-1])
    for index in range(int(num_tokens_post_padded) // block):
        listed = sorted_token_ids[index * block : (index + 1) * block].long()
        real = listed[listed < pairs]
        expert = int(expert_ids[index])
        matrix = B[expert].double()
        if use_int8_w8a16:
            matrix = matrix * B_scale[expert].double()[:, None]
        result = a[real // top_k] @ matrix.t()
        if mul_routed_weight:
            result *= topk_weights.reshape(-1)[real, None].double()
        out[real] = result.to(out.dtype)


def _as_far_as(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """`rows` rows from where `tensor` begins: a kernel gets its address, not its length."""
    return tensor.as_strided((rows, tensor.shape[-1]), (tensor.stride(-2), 1))


IN_CUSTOM_OPS = (
    fused_add_rms_norm,
    moe_align_block_size,
    paged_attention_v1,
    paged_attention_v2,
    reshape_and_cache,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
    topk_softmax,
)


def install() -> None:
    """Put the kernels in the place of the compiled ones. Before the plugin is loaded."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    type(current_platform).get_device_name = classmethod(lambda cls, device_id=0: "a CPU")
    for function in IN_CUSTOM_OPS:
        _put(_custom_ops, function)
    fused_moe = import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    _put(import_module("vllm.attention.ops.paged_attn"), context_attention_fwd)
    _put(fused_moe, invoke_fused_moe_kernel)


def _put(module: Any, function: Any) -> None:
    name = function.__name__
    theirs, ours = (
        list(inspect.signature(f).parameters) for f in (getattr(module, name), function)
    )
    assert theirs == ours, f"{name}: the wheel has {theirs}, here is {ours}"

    def counted(*args: Any, **kwargs: Any) -> None:
        calls[name] += 1
        with _disable_current_modes():  # as a vendor's functions are, which torch does not dispatch
            function(*args, **kwargs)

    counted.__name__, counted.__module__ = name, module.__name__
    counted.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    setattr(module, name, counted)
