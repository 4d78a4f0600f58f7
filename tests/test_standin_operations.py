"""The stand-in for ixformer: right by float64 references, and unforgiving to its callers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ixformer_standin import GENERATIONS, MOE_OPERATIONS, Misuse, inside, installed, module_of

SIGNATURES = {
    "0.4": {
        "silu_and_mul": "(input, output=None)",
        "rms_norm": "(input, weight, output=None, eps=1e-06)",
        "fused_add_rms_norm": "(input, residual, weight, eps=1e-05, scale=1.0)",
        "vllm_rotary_embedding_neox": "(positions, query, key, head_size, cos_sin_cache, is_neox)",
        "vllm_cache_ops_reshape_and_cache": "(key, value, key_cache, value_cache, slot_mapping)",
    },
    "newer": {
        "rms_norm": "(input, weight, eps=1e-05, output=None)",
        "residual_rms_norm": "(input, weight, eps=1e-05, residual_alpha=1.0, residual=None, "
        "residual_bias=None, output=None, residual_output=None, is_post=False)",
        "vllm_moe_align_block_size": "(topk_ids, num_experts, block_size, sorted_ids, expert_ids, "
        "num_tokens_post_pad)",
        "vllm_invoke_fused_moe_kernel": "(A, B, C, topk_weight, topk_ids, sorted_token_ids, "
        "expert_ids, num_tokens_post_padded, mul_routed_weight, top_k, block_size_m, "
        "persistent=False, w_scale=None, a_scale=None)",
        "moe_output_reduce_sum": "(input, topk_weight=None, output=None, mask=None, "
        "extra_residual=None, scaling_factor=1.0)",
    },
}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_signatures_are_the_known_ones(generation: str) -> None:
    module = module_of(generation)
    for name, text in SIGNATURES[generation].items():
        bare = inspect.signature(getattr(module, name))
        plain = [p.replace(annotation=p.empty) for p in bare.parameters.values()]
        assert str(inspect.Signature(plain)) == text


@pytest.mark.parametrize("generation", GENERATIONS)
def test_it_is_imported_inside_and_gone_after(generation: str) -> None:
    with installed(generation, without=MOE_OPERATIONS, renamed={"rms_norm": "norm_rms"}) as module:
        import ixformer

        assert ixformer.__path__ == []
        assert not hasattr(module, MOE_OPERATIONS[0])
        assert not hasattr(module, "rms_norm")
        assert callable(module.norm_rms)
    with pytest.raises(ImportError):
        import ixformer


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5 * scale)


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("generation", GENERATIONS)
def test_norms(generation: str) -> None:
    module, eps = module_of(generation), 1e-3
    x, residual, weight, out = drawn(1, 5, 16), drawn(2, 5, 16), drawn(3, 16), nan(5, 16)
    expected = exact_norm(x, weight, eps)
    total = x.double() + residual.double()
    if generation == "0.4":
        module.rms_norm(x, weight, out, eps)
        module.fused_add_rms_norm(x, residual, weight, eps)
    else:
        module.rms_norm(x, weight, eps, out)
        module.residual_rms_norm(x, weight, eps, 1.0, residual, None, x, residual)
    close(out, expected)
    close(residual, total)
    close(x, exact_norm(total, weight, eps))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_rotation_is_multiplication_by_a_complex_number(generation: str) -> None:
    name = {"0.4": "vllm_rotary_embedding_neox", "newer": "vllm_rotary_embedding"}[generation]
    positions = torch.tensor([0, 7, 3])
    angles = drawn(4, 9, 4).double()
    table = torch.cat([angles.cos(), angles.sin()], 1).float()
    query, key = drawn(5, 3, 16), drawn(6, 3, 8)
    expected = []
    for x in (query, key):
        halves = x.double().view(3, -1, 2, 4)
        turned = torch.complex(halves[:, :, 0], halves[:, :, 1]) * torch.polar(
            torch.ones(3, 1, 4).double(), angles[positions][:, None]
        )
        expected.append(torch.cat([turned.real, turned.imag], -1).flatten(1))
    getattr(module_of(generation), name)(positions, query, key, 8, table, True)
    close(query, expected[0])
    close(key, expected[1])


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("dim", [8, 24])
def test_attention_reads_what_the_write_wrote(generation: str, dim: int) -> None:
    """Tokens written one by one in blocks of any order; the rest of the cache is NaN."""
    module = module_of(generation)
    first = generation == "0.4"
    heads, kv_heads, size, lengths = 6, 2, 4, [1, 4, 9]
    blocks = 10
    if first:
        caches = nan(blocks, kv_heads, dim // 4, size, 4), nan(blocks, kv_heads, dim, size)
    else:
        caches = nan(blocks, kv_heads, size, dim), nan(blocks, kv_heads, size, dim)
    tables = torch.tensor([[3, 0, 0], [7, 0, 0], [2, 9, 5]], dtype=torch.int32)
    keys, values = drawn(7, 3, 9, kv_heads, dim), drawn(8, 3, 9, kv_heads, dim)
    for row, length in enumerate(lengths):
        for at in range(length):
            slot = int(tables[row, at // size]) * size + at % size
            slots = torch.tensor([slot], dtype=torch.int32 if first else torch.int64)
            write = [keys[row, at : at + 1], values[row, at : at + 1], *caches, slots]
            if first:
                module.vllm_cache_ops_reshape_and_cache(*write)
            else:
                module.reshape_and_cache_flash(*write, "auto", 1.0, 1.0)
    query, out = drawn(9, 3, heads, dim), nan(3, heads, dim)
    rest = (0.3, tables, torch.tensor(lengths, dtype=torch.int32), size, 12, None)
    if first:
        mapping = torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32)
        module.vllm_single_query_cached_kv_attention(out, query, *caches, mapping, *rest)
    else:
        module.vllm_paged_attention(out, query, *caches, kv_heads, *rest, 0.0, True, -1, -1, True)
    for row, length in enumerate(lengths):
        for head in range(heads):
            k, v = (t[row, :length, head // 3].double() for t in (keys, values))
            share = torch.softmax(k @ query[row, head].double() * 0.3, 0)
            close(out[row, head], share @ v)


def aligned(ids: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, ...]:
    pairs = ids.numel()
    sorted_ids = torch.full((pairs + experts * (block - 1),), pairs, dtype=torch.int32)
    expert_ids = torch.full((pairs + experts,), -77, dtype=torch.int32)
    count = torch.full((1,), -77, dtype=torch.int32)
    module_of("newer").vllm_moe_align_block_size(ids, experts, block, sorted_ids, expert_ids, count)
    return sorted_ids, expert_ids, count


@pytest.mark.parametrize("block", [32, 64])
def test_alignment_groups_each_pair_once(block: int) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, (40, 3), generator=generator, dtype=torch.int32)
    sorted_ids, expert_ids, count = aligned(ids, 7, block)
    used = int(count)
    assert used % block == 0
    pairs = sorted_ids[:used]
    assert sorted(pairs[pairs < 120].tolist()) == list(range(120))
    for place, pair in enumerate(pairs.tolist()):
        if pair < 120:
            assert int(expert_ids[place // block]) == int(ids.flatten()[pair])
    assert (expert_ids[used // block :] == -77).all()


@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_fused_gemm(multiplies: bool, generation: str) -> None:
    call = module_of(generation).vllm_invoke_fused_moe_kernel
    ids = torch.tensor([[1, 3], [3, 0], [3, 1]], dtype=torch.int32)
    weights = drawn(2, 3, 2)
    lists = aligned(ids, 4, 32)
    matrix = drawn(3, 4, 6, 5)
    for rows, top_k in ((3, 2), (6, 1)):
        a, out = drawn(rows, rows, 5), nan(3, 2, 6)
        call(a, matrix, out, weights, ids, *lists, multiplies, top_k, 32)
        for pair in range(6):
            expected = matrix[ids.flatten()[pair].long()].double() @ a[pair // top_k].double()
            if multiplies:
                expected = expected * weights.flatten()[pair].double()
            close(out.view(6, 6)[pair], expected)


def test_topk_merge_and_silu() -> None:
    module = module_of("newer")
    logits = drawn(4, 4, 9)
    weights, ids, places = nan(4, 3), *(torch.empty(4, 3, dtype=torch.int32) for _ in range(2))
    module.vllm_moe_topk_softmax(weights, ids, places, logits)
    best = torch.softmax(logits.double(), -1).topk(3)
    close(weights, best.values)
    assert torch.equal(ids.long(), best.indices)
    assert sorted(places.flatten().tolist()) == list(range(12))

    pairs, residual, out = drawn(5, 4, 3, 6), drawn(6, 4, 6), nan(4, 6)
    module.moe_output_reduce_sum(pairs, weights, out, None, residual, 1.0)
    close(out, (pairs.double() * weights.double()[:, :, None]).sum(1) + residual.double())

    gate_up, out = drawn(7, 4, 10), nan(4, 5)
    module.silu_and_mul(gate_up, out)
    gate, up = gate_up.double().chunk(2, -1)
    close(out, gate / (1 + (-gate).exp()) * up)


X, W, OUT = torch.zeros(3, 8), torch.zeros(8), torch.zeros(3, 8)
IDS = torch.zeros(3, 2, dtype=torch.int32)
WRONG: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "0.4: eps and output swapped": ("eps: expected float", lambda m: m.rms_norm(X, W, 1e-6, OUT)),
    "0.4: no output": ("output: expected a tensor", lambda m: m.rms_norm(X, W, eps=1e-6)),
    "0.4: silu without output": ("output: expected a tensor", lambda m: m.silu_and_mul(X)),
    "0.4: silu, out first": (
        "output: expected shape",
        lambda m: m.silu_and_mul(torch.zeros(3, 4), X),
    ),
    "0.4: a view with gaps": (
        "input: expected a contiguous",
        lambda m: m.rms_norm(torch.zeros(3, 2, 16)[:, :, :8], W, torch.zeros(3, 2, 8), 1e-6),
    ),
    "0.4: residual and weight swapped": (
        "weight: expected shape",
        lambda m: m.fused_add_rms_norm(X, W, OUT, 1e-6),
    ),
    "0.4: int64 slots": (
        "slot_mapping: expected torch.int32",
        lambda m: m.vllm_cache_ops_reshape_and_cache(
            torch.zeros(1, 1, 4),
            torch.zeros(1, 1, 4),
            torch.zeros(2, 1, 1, 4, 4),
            torch.zeros(2, 1, 4, 4),
            torch.zeros(1, dtype=torch.int64),
        ),
    ),
    "0.4: a number of heads for the mapping": (
        "head_mapping: expected a tensor",
        lambda m: m.vllm_single_query_cached_kv_attention(
            torch.zeros(1, 2, 4),
            torch.zeros(1, 2, 4),
            torch.zeros(2, 1, 1, 4, 4),
            torch.zeros(2, 1, 4, 4),
            1,
            1.0,
            torch.zeros(1, 2, dtype=torch.int32),
            torch.ones(1, dtype=torch.int32),
            4,
            8,
            None,
        ),
    ),
    "newer: output and eps swapped": ("eps: expected float", lambda m: m.rms_norm(X, W, OUT, 1e-6)),
    "newer: no outs": (
        "output: expected a tensor",
        lambda m: m.residual_rms_norm(X, W, 1e-6, 1.0, OUT),
    ),
    "newer: gating in bfloat16": (
        "gating_output: expected torch.float32",
        lambda m: m.vllm_moe_topk_softmax(torch.zeros(3, 2), IDS, IDS, X.bfloat16()),
    ),
    "newer: ids before weights": (
        "topk_weights: expected torch.float32",
        lambda m: m.vllm_moe_topk_softmax(IDS, torch.zeros(3, 2), IDS, X),
    ),
    "newer: a short list": (
        "sorted_ids: expected shape",
        lambda m: m.vllm_moe_align_block_size(IDS, 4, 32, IDS.flatten(), IDS.flatten(), IDS[0]),
    ),
    "newer: merge without output": (
        "output: expected a tensor",
        lambda m: m.moe_output_reduce_sum(torch.zeros(3, 2, 4), torch.zeros(3, 2)),
    ),
    "newer: allocates a scratch": ("allocates a scratch", lambda m: m.moe_topk_softmax(X, 2)),
    "newer: not for a graph": (
        "use_cuda_graph: expected True",
        lambda m: m.vllm_paged_attention(
            torch.zeros(1, 2, 4),
            torch.zeros(1, 2, 4),
            torch.zeros(2, 1, 4, 4),
            torch.zeros(2, 1, 4, 4),
            1,
            1.0,
            torch.zeros(1, 2, dtype=torch.int32),
            torch.ones(1, dtype=torch.int32),
            4,
            8,
        ),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_raises(case: str) -> None:
    message, call = WRONG[case]
    with pytest.raises(Misuse, match=message):
        call(module_of(case.split(":")[0]))
    assert not inside()


def test_the_gemm_refuses_lists_that_were_not_prepared() -> None:
    """The alignment leaves the padding between pairs to its caller."""
    ids = torch.tensor([[1, 3]], dtype=torch.int32)
    sorted_ids, expert_ids, count = aligned(ids, 4, 32)
    sorted_ids[sorted_ids == 2] = -1
    with pytest.raises(Misuse, match="sorted_token_ids"):
        module_of("newer").vllm_invoke_fused_moe_kernel(
            drawn(1, 1, 5),
            drawn(2, 4, 6, 5),
            nan(1, 2, 6),
            drawn(3, 1, 2),
            ids,
            sorted_ids,
            expert_ids,
            count,
            False,
            2,
            32,
        )
