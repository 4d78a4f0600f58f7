"""StateCache: who owns which recurrent state."""

from __future__ import annotations

import pytest
import torch

from graphcap.decode.cache import PagedCache
from graphcap.decode.prompts import Prompts
from graphcap.decode.shapes import preset
from graphcap.decode.state_cache import NULL_SLOT, StateCache
from graphcap.errors import InputError

SHAPE = preset("tiny-hybrid")


def make(num_sequences: int = 3, max_context: int = 12) -> PagedCache:
    return PagedCache(
        SHAPE,
        num_sequences=num_sequences,
        max_context=max_context,
        block_size=4,
        device="cpu",
        dtype=torch.bfloat16,
    )


def states_of(cache: PagedCache) -> StateCache:
    assert cache.states is not None
    return cache.states


def test_layout() -> None:
    cache = make()
    states = states_of(cache)
    assert len(cache.keys) == len(cache.values) == 1  # of four layers one has attention
    assert len(states.conv) == len(states.recurrent) == 3
    assert all(conv.shape == (4, 2 * 2 * 16 + 4 * 32, 3) for conv in states.conv)
    assert all(conv.dtype == torch.bfloat16 for conv in states.conv)
    assert all(state.shape == (4, 4, 16, 32) for state in states.recurrent)
    assert all(state.dtype == torch.float32 for state in states.recurrent)
    assert SHAPE.delta is not None
    assert states.nbytes == 4 * 3 * SHAPE.delta.state_bytes(torch.bfloat16)
    assert cache.nbytes == states.nbytes + cache.keys[0].nbytes + cache.values[0].nbytes


def test_a_model_without_delta_nets_has_no_states() -> None:
    shape = preset("tiny")
    cache = PagedCache(shape, num_sequences=1, max_context=4, device="cpu", dtype=torch.float32)
    assert cache.states is None
    assert len(cache.keys) == shape.num_layers


def test_every_slot_once_and_none_too_many() -> None:
    states = states_of(make())
    slots = [states.allocate() for _ in range(3)]
    assert sorted(slots) == [1, 2, 3]
    with pytest.raises(
        InputError, match="all 3 recurrent states are in use; free a sequence first"
    ):
        states.allocate()
    states.free(slots[1])
    assert states.allocate() == slots[1]
    states.free(slots[0])
    with pytest.raises(InputError, match=f"state slot {slots[0]} is free already"):
        states.free(slots[0])
    for wrong in (NULL_SLOT, 4, -1):
        with pytest.raises(InputError, match=f"state slots are 1 to 3, found {wrong}"):
            states.free(wrong)


def test_fill_random_spares_the_null_slot_and_clear_does_not() -> None:
    cache, same, other = make(), make(), make()
    tensors = [[*states_of(one).conv, *states_of(one).recurrent] for one in (cache, same, other)]
    for tensor in tensors[0]:
        tensor[NULL_SLOT] = 7
    for one, seed in ((cache, 3), (same, 3), (other, 4)):
        one.fill_random(seed)
    for one, two, three in zip(*tensors, strict=True):
        assert (one[NULL_SLOT] == 7).all()
        assert torch.equal(one[1:], two[1:])
        assert not torch.equal(one[1:], three[1:])
        assert 0.8 < one[1:].float().std() < 1.2
    for view, tensor in zip(states_of(cache).tensors, tensors[0], strict=True):
        assert view.data_ptr() == tensor[1:].data_ptr()
        assert view.shape == tensor[1:].shape
    cache.clear()
    assert not any(tensor.any() for tensor in tensors[0])


def test_prompts_take_states_and_give_them_back() -> None:
    cache = make()
    states = states_of(cache)
    laid = Prompts([[1], [2, 3, 4]], 2, cache, 512)
    batches = [batch["state_slots"] for batch in laid.batches()]
    assert [len(slots) for slots in batches] == [1, 1, 2]
    assert batches[0].dtype == torch.int64
    assert batches[0][0] == batches[1][0] == batches[2][0] != batches[2][1]
    with pytest.raises(InputError, match="recurrent states are in use"):
        # Blocks for both are there, a second state is not: what was taken comes back.
        Prompts([[1], [2]], 1, cache, 512)
    third = states.allocate()
    laid.close()
    assert len({third, states.allocate(), states.allocate()}) == 3
