"""The plain torch kernels of the decode step against float64, with everything unwritten poisoned."""

from __future__ import annotations

import math

import pytest
import torch

from graphcap.decode.cache import NULL_BLOCK
from graphcap.decode.kernels import reference as kernels
from graphcap.operations import Operation

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
"""The largest relative error of one rounding."""


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.full(shape, NAN, dtype=dtype)
    return torch.full(shape, 1 if dtype == torch.bool else 1_234_567_890, dtype=dtype)


def run(op: Operation, *args: object) -> None:
    """Call `op` as a pool would: with the scratch that it declares, poisoned."""
    plan = {} if op.scratch is None else op.scratch(*args)
    op(*args, **{name: poisoned(*shape, dtype=dtype) for name, (shape, dtype) in plan.items()})


def close(found: torch.Tensor, exact: torch.Tensor, roundings: float) -> None:
    """Within so many roundings of the largest exact value."""
    limit = roundings * EPSILON[found.dtype] * float(exact.abs().max())
    assert (found.double() - exact).abs().max() <= limit


def wide_view(x: torch.Tensor, before: int, after: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, ..., D) as a view into a buffer of rows with NaN on both sides; the buffer and the view."""
    rows, width = x.shape[0], x[0].numel()
    buffer = torch.full((rows, before + width + after), NAN, dtype=x.dtype)
    view = buffer[:, before : before + width].unflatten(1, x.shape[1:])
    view.copy_(x)
    return buffer, view


def assert_sides_untouched(buffer: torch.Tensor, before: int, after: int) -> None:
    assert buffer[:, :before].isnan().all()
    assert buffer[:, buffer.shape[1] - after :].isnan().all()


@dtypes
def test_embedding(dtype: torch.dtype) -> None:
    table, out = normal(11, 6, dtype=dtype), poisoned(5, 6, dtype=dtype)
    ids = torch.tensor([10, 0, 3, 3, 9], dtype=torch.int32)
    run(kernels.embedding, ids, table, out)
    assert torch.equal(out, table[ids.long()])


@dtypes
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("m", "a", "n"), [(1, 7, 5), (1, 96, 64), (2, 96, 64), (9, 96, 130)])
def test_linear(m: int, a: int, n: int, with_bias: bool, dtype: torch.dtype) -> None:
    x, weight = normal(m, a, dtype=dtype), normal(n, a, dtype=dtype, scale=a**-0.5)
    bias = normal(n, dtype=dtype, scale=3) if with_bias else None
    out = poisoned(m, n, dtype=dtype)
    address = out.data_ptr()
    run(kernels.linear, x, weight, bias, out)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    close(out, exact, 2 if dtype == torch.bfloat16 else 16)
    assert out.data_ptr() == address


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@dtypes
@pytest.mark.parametrize("shape", [(1, 8), (5, 33), (3, 2, 16)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])  # eps decides, is seen, is nothing
def test_rms_norm(shape: tuple[int, ...], scale: float, dtype: torch.dtype) -> None:
    x, weight = normal(*shape, dtype=dtype, scale=scale), normal(shape[-1], dtype=dtype)
    out = poisoned(*shape, dtype=dtype)
    before = x.clone()
    run(kernels.rms_norm, x, weight, out, 1e-2)
    close(out, exact_norm(x, weight, 1e-2), 4)
    assert torch.equal(x, before)


@dtypes
def test_rms_norm_in_place_in_a_fused_buffer(dtype: torch.dtype) -> None:
    x, weight = normal(4, 3, 16, dtype=dtype), normal(16, dtype=dtype)
    buffer, view = wide_view(x, 8, 24)
    run(kernels.rms_norm, view, weight, view, 1e-6)
    close(view, exact_norm(x, weight, 1e-6), 4)
    assert_sides_untouched(buffer, 8, 24)


def test_rms_norm_rounds_before_the_weight_as_transformers_does() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

    norm = Qwen3MoeRMSNorm(64, eps=1e-6).bfloat16()
    norm.weight.data.copy_(1 + normal(64) / 3)
    x, out = normal(50, 64, dtype=torch.bfloat16), poisoned(50, 64, dtype=torch.bfloat16)
    run(kernels.rms_norm, x, norm.weight.data, out, 1e-6)
    with torch.no_grad():
        assert torch.equal(out, norm(x))


@dtypes
def test_fused_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual = normal(5, 40, dtype=dtype), normal(5, 40, dtype=dtype, scale=4)
    weight = normal(40, dtype=dtype)
    total = (x.double() + residual.double()).to(dtype)
    run(kernels.fused_add_rms_norm, x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    close(x, exact_norm(total, weight, 1e-6), 4)


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 8), (3, 3, 2), (2, 1, 24)])
def test_rotary_embedding(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    half = dim // 2
    angles = torch.rand(20, half).double() * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(dtype)
    positions = torch.tensor([19, 0, 7, 7])
    q, k = normal(4, heads, dim, dtype=dtype), normal(4, kv_heads, dim, dtype=dtype)
    fused, views = wide_view(torch.cat([q, k], 1), 0, 2 * dim)
    q_view, k_view = views[:, :heads], views[:, heads:]
    run(kernels.rotary_embedding, positions, q_view, k_view, cos_sin)
    cos, sin = cos_sin[positions].double().split(half, -1)
    for view, x in ((q_view, q.double()), (k_view, k.double())):
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, sin)[:, None]
        close(view, torch.cat([turned.real, turned.imag], -1), 4)
    assert fused[:, -2 * dim :].isnan().all()


@dtypes
@pytest.mark.parametrize("slots", [[5, 14, 4], [7, -1, -1], [-1, -1, -1], [9]])
def test_cache_write(slots: list[int], dtype: torch.dtype) -> None:
    rows = len(slots)
    _, both = wide_view(normal(rows, 4, 6, dtype=dtype), 3, 5)
    k, v = both[:, :2], both[:, 2:]
    # Bytes at random: NaN and infinities included, which must be put back bit by bit.
    word = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    caches = [torch.randint(-(2**15), 2**15, (4, 4, 2, 6), dtype=word) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    keys, values = (cache.view(dtype) for cache in caches)
    for row, slot in enumerate(slots):
        if slot < 0:  # what a pad holds must not matter either
            both[row] = NAN
    run(kernels.cache_write, k, v, keys, values, torch.tensor(slots))
    for cache, old, new in zip(caches, before, (k, v), strict=True):
        expected = old.view(16, 2, 6)
        for row, slot in enumerate(slots):
            if slot >= 0:
                expected[slot] = new[row].contiguous().view(word)
        assert torch.equal(cache.view(16, 2, 6), expected)


@dtypes
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size", "lengths"),
    [
        (4, 2, 8, 4, [1, 4, 5, 12]),  # one token, a full block, one more, a full table
        (3, 3, 6, 2, [6, 1]),
        (4, 1, 16, 16, [33, 48, 17]),
    ],
)
def test_attention(
    heads: int, kv_heads: int, dim: int, size: int, lengths: list[int], dtype: torch.dtype
) -> None:
    """Each sequence with blocks of its own in a random order; everything beyond is NaN."""
    rows, width = len(lengths), -(-max(lengths) // size)
    keys = torch.full((rows * width + 1, size, kv_heads, dim), NAN, dtype=dtype)
    values = keys.clone()
    tables = torch.zeros(rows, width, dtype=torch.int32)
    order = (torch.randperm(rows * width) + 1).tolist()
    _, fused = wide_view(normal(rows, heads, dim, dtype=dtype), 2 * dim, dim)
    out = poisoned(rows, heads, dim, dtype=dtype)
    exact = torch.empty(rows, heads, dim, dtype=torch.float64)
    scale = dim**-0.5
    for row, length in enumerate(lengths):
        k, v = (normal(length, kv_heads, dim, dtype=dtype) for _ in range(2))
        for block in range(-(-length // size)):
            tables[row, block] = order.pop()
            part = slice(block * size, min(length, (block + 1) * size))
            count = part.stop - part.start
            keys[tables[row, block], :count] = k[part]
            values[tables[row, block], :count] = v[part]
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = k[:, shared].double() @ fused[row, head].double() * scale
            exact[row, head] = scores.softmax(0) @ v[:, shared].double()
    key_bits, value_bits = keys.clone(), values.clone()
    lengths_tensor = torch.tensor(lengths, dtype=torch.int32)
    run(kernels.attention, fused, keys, values, tables, lengths_tensor, out, scale)
    # bfloat16: scores are rounded twice, at magnitudes up to about 4, and probabilities once.
    close(out, exact, 8 if dtype == torch.bfloat16 else 32)
    for now, then in ((keys, key_bits), (values, value_bits)):
        assert torch.equal(now.nan_to_num(123), then.nan_to_num(123))


@dtypes
def test_attention_beyond_the_table_takes_all_of_it(dtype: torch.dtype) -> None:
    """A sequence that has filled its blocks has a length one beyond them."""
    keys, values = normal(3, 4, 1, 8, dtype=dtype), normal(3, 4, 1, 8, dtype=dtype)
    q, tables = normal(1, 2, 8, dtype=dtype), torch.tensor([[2, 1]], dtype=torch.int32)
    full, beyond = poisoned(1, 2, 8, dtype=dtype), poisoned(1, 2, 8, dtype=dtype)
    for length, out in ((8, full), (9, beyond)):
        lengths = torch.tensor([length], dtype=torch.int32)
        run(kernels.attention, q, keys, values, tables, lengths, out, 1.0)
    assert full.isfinite().all()
    assert torch.equal(full, beyond)


@dtypes
@pytest.mark.parametrize("vocab", [1, 7, 1000])
def test_argmax(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.stack([torch.randperm(vocab) for _ in range(6)]).float()
    # Every value once, but for bfloat16, which has not so many: there the lowest of equal ones.
    logits, out = logits.to(dtype), poisoned(6, dtype=torch.int32)
    run(kernels.argmax, logits, out)
    assert out.tolist() == [row.index(max(row)) for row in logits.tolist()]


@dtypes
@pytest.mark.parametrize("vocab", [3, 64, 5000])
def test_argmax_of_equal_logits_is_the_lowest(vocab: int, dtype: torch.dtype) -> None:
    rows = [sorted({torch.randint(vocab, ()).item() for _ in range(4)}) for _ in range(20)]
    logits = -torch.rand(20, vocab).to(dtype) - 0.1
    for row, best in enumerate(rows):
        logits[row, best] = 2.5
    logits[0], logits[1] = -math.inf, 0.0  # all equal
    rows[0], rows[1] = [0], [0]
    out = poisoned(20, dtype=torch.int32)
    run(kernels.argmax, logits, out)
    assert out.tolist() == [best[0] for best in rows]


@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
def test_advance(slot_dtype: torch.dtype) -> None:
    size, tables = 4, torch.arange(1, 22, dtype=torch.int32).view(7, 3)
    tables[6, 1:] = NULL_BLOCK
    # Inside a block, into the next one, out of the table, out of it already, a pad, a first token,
    # out of the blocks that are owned.
    positions = torch.tensor([5, 7, 11, 12, 0, 0, 3])
    slots = torch.tensor([21, 27, 39, -1, -1, 64, 79], dtype=slot_dtype)
    lengths, tokens = (positions + 1).int(), torch.arange(100, 107, dtype=torch.int32)
    sampled = torch.arange(50, 57, dtype=torch.int32)
    kept = sampled.clone(), tables.clone()
    run(kernels.advance, sampled, tokens, positions, lengths, slots, tables, size)
    assert tokens.tolist() == [50, 51, 52, 103, 104, 55, 56]
    assert positions.tolist() == [6, 8, 12, 12, 0, 1, 4]
    assert lengths.tolist() == [7, 9, 13, 13, 1, 2, 5]
    assert slots.tolist() == [2 * 4 + 2, 6 * 4, -1, -1, -1, 16 * 4 + 1, -1]
    assert torch.equal(sampled, kept[0])
    assert torch.equal(tables, kept[1])


def test_advance_does_not_overflow_where_slots_exceed_int32() -> None:
    """Block 2^27 of 16 tokens lies at 2^31: block ids are int32, slots are not."""
    tables = torch.tensor([[1, 2**27 + 3]], dtype=torch.int32)
    positions, slots = torch.tensor([15]), torch.tensor([31])
    tokens, lengths = torch.zeros(1, dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
    run(kernels.advance, tokens.clone(), tokens, positions, lengths, slots, tables, 16)
    assert slots.tolist() == [(2**27 + 3) * 16]
