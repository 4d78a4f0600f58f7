"""PagedCache: who owns which block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcap.decode.cache import NULL_BLOCK, PagedCache
from graphcap.decode.shapes import PRESETS
from graphcap.errors import InputError

SHAPE = PRESETS["tiny"].with_layers(2)


def make(num_sequences: int = 3, max_context: int = 10, block_size: int = 4) -> PagedCache:
    return PagedCache(
        SHAPE,
        num_sequences=num_sequences,
        max_context=max_context,
        block_size=block_size,
        device="cpu",
        dtype=torch.bfloat16,
    )


def test_sizes() -> None:
    cache = make()
    assert cache.blocks_per_sequence == 3
    assert cache.max_context == 12  # 10, rounded up to whole blocks
    assert cache.num_blocks == 3 * 3 + 1  # and the null block
    expected = (10, 4, SHAPE.num_kv_heads, SHAPE.head_dim)
    assert [tuple(t.shape) for t in (*cache.keys, *cache.values)] == [expected] * 4
    assert {t.dtype for t in (*cache.keys, *cache.values)} == {torch.bfloat16}
    assert cache.nbytes == 4 * 10 * 4 * SHAPE.num_kv_heads * SHAPE.head_dim * 2
    assert len({t.data_ptr() for t in (*cache.keys, *cache.values)}) == 4


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (12, 3)])
def test_a_table_holds_as_many_blocks_as_the_tokens_need(tokens: int, blocks: int) -> None:
    table = make().allocate(tokens)
    assert table.dtype == torch.int32
    assert table.shape == (3,)
    assert (table[:blocks] != NULL_BLOCK).all()
    assert table[:blocks].unique().numel() == blocks
    assert (table[blocks:] == NULL_BLOCK).all()


@pytest.mark.parametrize("tokens", [-1, 0, 13, 1000])
def test_a_length_that_no_sequence_can_have_is_refused(tokens: int) -> None:
    cache = make()
    with pytest.raises(InputError, match=rf"of {tokens} tokens .* 1 to 12 .*raise max_context"):
        cache.allocate(tokens)
    assert [cache.allocate(12) for _ in range(3)]  # nothing was taken


def test_a_full_cache_refuses_and_takes_nothing() -> None:
    cache = make()
    tables = [cache.allocate(12), cache.allocate(12), cache.allocate(5)]
    with pytest.raises(InputError, match=r"2 cache blocks are needed and 1 are free; free"):
        cache.allocate(8)
    last = cache.allocate(4)  # the one block is still there
    owned = torch.cat([*tables, last])
    assert sorted(owned[owned != NULL_BLOCK].tolist()) == list(range(1, 10))


def test_freeing_twice_is_refused_and_frees_nothing() -> None:
    cache = make(num_sequences=1)
    first, second = cache.allocate(4), cache.allocate(4)
    cache.free(first)
    with pytest.raises(InputError, match=rf"blocks \[{first[0]}\] are free already"):
        cache.free(torch.tensor([second[0], first[0], NULL_BLOCK]))
    owned = torch.cat([cache.allocate(8), second])
    assert sorted(owned[owned != NULL_BLOCK].tolist()) == [1, 2, 3]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-3, 12), max_size=40))
def test_a_block_has_one_owner(moves: list[int]) -> None:
    """Positive: allocate so many tokens; otherwise free one of the sequences."""
    cache = make()
    owned: list[torch.Tensor] = []
    for move in moves:
        free = 9 - sum(int((table != NULL_BLOCK).sum()) for table in owned)
        if move > 0 and -(-move // 4) > free:
            with pytest.raises(InputError):
                cache.allocate(move)
        elif move > 0:
            owned.append(cache.allocate(move))
        elif owned:
            cache.free(owned.pop(move % len(owned)))
        blocks = [int(b) for table in owned for b in table if b != NULL_BLOCK]
        assert len(set(blocks)) == len(blocks)
        assert all(1 <= block < cache.num_blocks for block in blocks)
    for table in owned:
        cache.free(table)
    assert len([cache.allocate(12) for _ in range(3)]) == 3  # everything came back


def test_fill_random_spares_the_null_block_and_clear_does_not() -> None:
    cache, same, other = make(), make(), make()
    for tensor in (*cache.keys, *cache.values):
        tensor[NULL_BLOCK] = 7
    cache.fill_random(3)
    same.fill_random(3)
    other.fill_random(4)
    for one, two, three in zip(
        (*cache.keys, *cache.values),
        (*same.keys, *same.values),
        (*other.keys, *other.values),
        strict=True,
    ):
        assert (one[NULL_BLOCK] == 7).all()
        assert torch.equal(one[1:], two[1:])
        assert not torch.equal(one[1:], three[1:])
        assert 0.8 < one[1:].float().std() < 1.2
    assert not torch.equal(cache.keys[0][1:], cache.values[0][1:])
    cache.clear()
    assert not any(tensor.any() for tensor in (*cache.keys, *cache.values))
