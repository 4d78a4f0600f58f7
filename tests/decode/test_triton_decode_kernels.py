"""The Triton kernels of the decode step against float64, with everything unwritten poisoned."""

from __future__ import annotations

import pytest
import torch
from triton_support import (
    DEVICE,
    DTYPES,
    INTEGER_POISON,
    assert_close,
    generator,
    normal,
    poisoned,
    run,
    sizes,
)

pytest.importorskip("triton", minversion="3.0")

from graphcap.decode.kernels import triton as kernels
from graphcap.decode.kernels.triton_attention import MAX_SPLITS, split_count
from graphcap.decode.kernels.triton_sampling import TILE, argmax_splits

NAN = float("nan")


def fused_qkv(
    m: int, heads: int, kv_heads: int, d: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A fused buffer with NaN at its end, and its q, k and v views."""
    width = (heads + 2 * kv_heads) * d
    fused = torch.cat([normal(3, m, width, dtype=dtype), poisoned(m, 8, dtype=dtype)], 1)
    q, k, v, _ = fused.split([heads * d, kv_heads * d, kv_heads * d, 8], 1)
    return fused, q.view(m, heads, d), k.view(m, kv_heads, d), v.view(m, kv_heads, d)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "v", "h"), sizes([(1, 3, 8), (5, 17, 1032)], [(1, 151936, 2048), (32, 151936, 2048)])
)
def test_embedding(m: int, v: int, h: int, dtype: torch.dtype) -> None:
    table = normal(1, v, h, dtype=dtype)
    ids = torch.randint(0, v, (m,), generator=generator(m), dtype=torch.int32).to(DEVICE)
    ids[0] = v - 1
    out = poisoned(m, h, dtype=dtype)
    run(kernels.embedding, ids, table, out)
    assert torch.equal(out, table[ids.long()])


def test_embedding_of_an_unknown_token_is_zero() -> None:
    out = poisoned(2, 8, dtype=torch.float32)
    ids = torch.tensor([-1, 4], dtype=torch.int32, device=DEVICE)
    run(kernels.embedding, ids, normal(1, 4, 8), out)
    assert (out == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("m", "a", "n"), sizes([(1, 8, 24), (5, 40, 16)], [(1, 2048, 5120), (32, 2048, 5120)])
)
def test_linear(m: int, a: int, n: int, with_bias: bool, dtype: torch.dtype) -> None:
    x = normal(1, m, a, dtype=dtype)
    weight = normal(2, n, a, dtype=dtype, scale=a**-0.5)
    bias = normal(3, n, dtype=dtype) if with_bias else None
    out = poisoned(m, n, dtype=dtype)
    address = out.data_ptr()
    run(kernels.linear, x, weight, bias, out)
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected = expected + bias.double()
    assert_close(out, expected, dtype)
    assert out.data_ptr() == address


def reference_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "d"), sizes([(1, 8), (3, 72), (2, 1000)], [(1, 2048), (32, 2048), (512, 2048)])
)
def test_rms_norm(m: int, d: int, dtype: torch.dtype) -> None:
    x = normal(1, m, d, dtype=dtype, scale=3.0)
    weight = normal(2, d, dtype=dtype)
    out = poisoned(m, d, dtype=dtype)
    run(kernels.rms_norm, x, weight, out, 1e-6)
    assert_close(out, reference_norm(x, weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "heads", "d"), sizes([(3, 5, 10), (2, 9, 256), (1, 1, 6)], [(1, 16, 128), (32, 32, 128)])
)
def test_rms_norm_of_heads_in_place(m: int, heads: int, d: int, dtype: torch.dtype) -> None:
    fused, q, k, _ = fused_qkv(m, heads, 1, d, dtype)
    before = fused.clone()
    weight = normal(2, d, dtype=dtype)
    expected = reference_norm(q, weight, 1e-5)
    run(kernels.rms_norm, q, weight, q, 1e-5)
    assert_close(q, expected, dtype)
    assert torch.equal(fused[:, heads * d : -8], before[:, heads * d : -8])
    out = poisoned(m, 1, d, dtype=dtype)
    run(kernels.rms_norm, k, weight, out, 1e-5)
    assert_close(out, reference_norm(k, weight, 1e-5), dtype)


def test_rms_norm_of_zeros_is_zero() -> None:
    out = poisoned(1, 8, dtype=torch.float32)
    run(kernels.rms_norm, torch.zeros(1, 8, device=DEVICE), normal(1, 8), out, 1e-6)
    assert (out == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "d"), sizes([(1, 8), (4, 200)], [(1, 2048), (32, 2048)]))
def test_fused_add_rms_norm(m: int, d: int, dtype: torch.dtype) -> None:
    x, residual = normal(1, m, d, dtype=dtype), normal(2, m, d, dtype=dtype)
    weight = normal(3, d, dtype=dtype)
    total = x.double() + residual.double()
    run(kernels.fused_add_rms_norm, x, residual, weight, 1e-6)
    assert_close(residual, total, dtype)
    assert_close(x, reference_norm(residual, weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "heads", "kv_heads", "d"),
    sizes([(1, 1, 1, 2), (3, 5, 2, 12), (2, 20, 3, 128)], [(1, 16, 2, 128), (32, 32, 4, 256)]),
)
def test_rotary_embedding(m: int, heads: int, kv_heads: int, d: int, dtype: torch.dtype) -> None:
    limit = 50
    angles = torch.rand(limit, d // 2, generator=generator(9)) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(DEVICE)
    positions = torch.randint(0, limit, (m,), generator=generator(8)).to(DEVICE)
    positions[0] = limit - 1
    fused, q, k, _ = fused_qkv(m, heads, kv_heads, d, dtype)
    before = fused.clone()

    def rotated(x: torch.Tensor) -> torch.Tensor:
        cos, sin = cos_sin.double()[positions][:, None].chunk(2, -1)
        left, right = x.double().chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    expected_q, expected_k = rotated(q), rotated(k)
    run(kernels.rotary_embedding, positions, q, k, cos_sin)
    assert_close(q, expected_q, dtype)
    assert_close(k, expected_k, dtype)
    values = slice((heads + kv_heads) * d, -8)
    assert torch.equal(fused[:, values], before[:, values])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("m", "heads", "d", "page"), sizes([(4, 1, 6, 3), (5, 9, 136, 16)], [(32, 4, 128, 16)])
)
def test_cache_write(
    m: int, heads: int, d: int, page: int, interleaved: bool, dtype: torch.dtype
) -> None:
    _, _, k, v = fused_qkv(m, 2 * heads, heads, d, dtype)
    if interleaved:  # keys and values of a block side by side
        both = poisoned(m, 2, page, heads, d, dtype=dtype)
        keys, values = both[:, 0], both[:, 1]
    else:
        keys, values = (poisoned(m, page, heads, d, dtype=dtype) for _ in range(2))
    slots = torch.randperm(m * page, generator=generator(4))[:m].to(DEVICE)
    slots[1] = -1
    slots[0] = m * page - 1 if (slots[2:] != m * page - 1).all() else slots[0]
    run(kernels.cache_write, k, v, keys, values, slots)
    expected = poisoned(m * page, heads, d, dtype=dtype), poisoned(m * page, heads, d, dtype=dtype)
    kept = slots >= 0
    expected[0][slots[kept]] = k[kept]
    expected[1][slots[kept]] = v[kept]
    for actual, wanted in zip((keys, values), expected, strict=True):
        actual = actual.reshape(m * page, heads, d)
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


def paged_cache(
    lengths: list[int], table_width: int, page: int, kv_heads: int, d: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches (NaN wherever no token is), tables, and the contiguous keys and values (M, T, Hk, D)."""
    m, capacity = len(lengths), table_width * page
    blocks = m * table_width + 1
    keys, values = (normal(seed, m, capacity, kv_heads, d, dtype=dtype) for seed in (5, 6))
    caches = tuple(poisoned(blocks * page, kv_heads, d, dtype=dtype) for _ in range(2))
    order = (torch.randperm(blocks - 1, generator=generator(7)) + 1).view(m, table_width)
    tables = torch.zeros(m, table_width, dtype=torch.int32)
    for row, length in enumerate(lengths):
        used = -(-length // page)
        tables[row, :used] = order[row, :used].int()
        at = torch.arange(length)
        slots = (tables[row].long()[at // page] * page + at % page).to(DEVICE)
        caches[0][slots] = keys[row, :length]
        caches[1][slots] = values[row, :length]
    paged = [cache.view(blocks, page, kv_heads, d) for cache in caches]
    return paged[0], paged[1], tables.to(DEVICE), keys, values


def reference_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    group = q.shape[1] // keys.shape[2]
    rows = []
    for row, length in enumerate(lengths):
        key = keys[row, :length].double().repeat_interleave(group, 1)
        value = values[row, :length].double().repeat_interleave(group, 1)
        scores = torch.einsum("hd,thd->ht", q[row].double(), key) * scale
        rows.append(torch.einsum("ht,thd->hd", torch.softmax(scores, -1), value))
    return torch.stack(rows)


ATTENTION_CASES = [
    # lengths, table width, block size, heads, kv heads, head dimension
    ([1], 1, 4, 1, 1, 6),
    ([1, 7, 12], 3, 4, 6, 2, 10),
    ([65, 64, 1, 100], 7, 16, 4, 4, 16),
    ([1, 300, 512], 32, 16, 8, 2, 40),
    ([130], 60, 16, 5, 1, 128),
    ([33, 288], 18, 16, 40, 2, 24),
]
REAL_ATTENTION = [
    ([256], 256, 16, 16, 2, 128),
    ([1, 2, 4095, 4096, 17, 1000, 128, 129], 256, 16, 16, 2, 256),
    ([100 * n + 1 for n in range(32)], 256, 16, 32, 4, 128),
    ([40000], 2560, 16, 16, 2, 256),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", sizes(ATTENTION_CASES, REAL_ATTENTION))
def test_attention(case: tuple[list[int], int, int, int, int, int], dtype: torch.dtype) -> None:
    lengths, table_width, page, heads, kv_heads, d = case
    m, scale = len(lengths), d**-0.5
    _, q, _, _ = fused_qkv(m, heads, kv_heads, d, dtype)
    key_cache, value_cache, tables, keys, values = paged_cache(
        lengths, table_width, page, kv_heads, d, dtype
    )
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    expected = reference_attention(q, keys, values, lengths, scale)
    arguments = (q, key_cache, value_cache, tables, seq_lens)
    out = poisoned(m, heads, d, dtype=dtype)
    run(kernels.attention, *arguments, out, scale)
    assert_close(out, expected, dtype)
    # The other way: without scratch buffers, in one launch.
    out = poisoned(m, heads, d, dtype=dtype)
    kernels.attention(*arguments, out, scale)
    assert_close(out, expected, dtype)


def test_attention_of_nothing_is_zero() -> None:
    """A length of 0 breaks the contract, yet must not put NaN into a padding row."""
    key_cache, value_cache, tables, _, _ = paged_cache([0, 0], 20, 16, 1, 8, torch.float32)
    out = poisoned(2, 2, 8, dtype=torch.float32)
    lengths = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    run(kernels.attention, normal(1, 2, 2, 8), key_cache, value_cache, tables, lengths, out, 1.0)
    assert (out == 0).all()


def test_split_count() -> None:
    assert split_count(1, 2, 256, 132) == 1
    assert split_count(1, 2, 4096, 132) == 32
    assert split_count(1, 2, 1 << 20, 132) == MAX_SPLITS
    assert split_count(8, 2, 4096, 132) == 16
    assert split_count(512, 4, 1 << 20, 132) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "v"),
    sizes([(1, 1), (3, 100), (2, 4 * TILE), (3, 4 * TILE + 7)], [(m, 151936) for m in (1, 8, 32)]),
)
def test_argmax(m: int, v: int, dtype: torch.dtype) -> None:
    logits = torch.cat([normal(v, m, v, dtype=dtype), poisoned(m, 8, dtype=dtype)], 1)[:, :v]
    logits[0, v - 1] = 100.0
    logits[m - 1, 0] = 200.0
    out = poisoned(m, dtype=torch.int32)
    run(kernels.argmax, logits, out)
    first = torch.where(
        logits == logits.amax(-1, keepdim=True), torch.arange(v, device=DEVICE), v
    ).amin(-1)
    assert torch.equal(out.long(), first)


@pytest.mark.parametrize("v", [50, 6 * TILE + 5])
def test_argmax_breaks_ties_by_the_lower_index(v: int) -> None:
    logits = torch.zeros(6, v, device=DEVICE)
    logits[1, [v - 1, v // 2, 7]] = 1.0
    logits[2] = -float("inf")
    logits[3] = NAN
    logits[4, 3:] = NAN
    logits[4, 2] = 1.0
    logits[5, 0] = -0.0
    out = poisoned(6, dtype=torch.int32)
    run(kernels.argmax, logits, out)
    assert out.tolist() == [0, 7, 0, 0, 2, 0]
    out = poisoned(6, dtype=torch.int32)
    kernels.argmax(logits, out)
    assert out.tolist() == [0, 7, 0, 0, 2, 0]


def test_argmax_splits() -> None:
    assert argmax_splits(1, 4 * TILE, 132) == 1
    assert argmax_splits(1, 151936, 132) == 149
    assert argmax_splits(512, 151936, 132) == 1
    for rows in (1, 3, 8, 32):
        for vocabulary in (4 * TILE + 1, 50257, 151936):
            splits = argmax_splits(rows, vocabulary, 132)
            share = (vocabulary + splits - 1) // splits
            chunk = (share + TILE - 1) // TILE * TILE
            assert (splits - 1) * chunk < vocabulary <= splits * chunk


@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("m", [1, 5, 130])
def test_advance(m: int, slot_dtype: torch.dtype) -> None:
    page, width = 4, 3
    # Some entries are the null block 0, which no sequence owns.
    tables = torch.randint(1, 99, (m, width), generator=generator(m), dtype=torch.int32)
    tables[::3, width // 2 :] = 0
    tables = tables.to(DEVICE)
    positions = torch.randint(0, page * width, (m,), generator=generator(m + 1)).to(DEVICE)
    positions[0] = page * width - 1  # its table is full after this step
    slots = tables.gather(1, positions[:, None] // page)[:, 0].long() * page + positions % page
    slots = slots.to(slot_dtype)
    slots[1::3] = -1
    lengths = (positions + 1).int()
    sampled = torch.arange(1000, 1000 + m, dtype=torch.int32, device=DEVICE)
    sampled[1::3] = INTEGER_POISON
    tokens = torch.arange(m, dtype=torch.int32, device=DEVICE)
    before = [t.clone() for t in (tokens, positions, lengths, slots)]
    run(kernels.advance, sampled, tokens, positions, lengths, slots, tables, page)
    for row in range(m):
        token, position, length, slot = (int(t[row]) for t in before)
        if slot >= 0:
            position += 1
            fits = position // page < width
            owned = fits and int(tables[row, position // page]) != 0
            slot = int(tables[row, position // page]) * page + position % page if owned else -1
            token, length = 1000 + row, length + 1
        after = tuple(int(t[row]) for t in (tokens, positions, lengths, slots))
        assert after == (token, position, length, slot)
