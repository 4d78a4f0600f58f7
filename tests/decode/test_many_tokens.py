"""Decoding several tokens by one call: the same tokens as one by one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from decoders import KERNELS, draw_weights, free_blocks, poison
from loop_fakes import LoopingRecorder

from graphcap.buckets import BucketLadder
from graphcap.decode.decoder import Decoder
from graphcap.errors import InputError
from graphcap.settings import Settings

PROMPTS = [[5], [9, 8, 7, 6, 5, 4], [1, 2, 3], [120, 0, 64], [33, 32]]
TOKENS = 17


def made(at_once: int, **options: Any) -> Decoder:
    decoder = Decoder(
        draw_weights(),
        KERNELS,
        max_batch=4,
        max_context=24,
        num_sequences=5,
        block_size=4,
        ladder=BucketLadder((1, 2), 4),
        settings=options.pop("settings", Settings()),
        tokens_per_launch=at_once,
        **options,
    )
    assert not decoder.manager.capture().failures
    poison(decoder.cache)
    return decoder


@functools.cache
def one_by_one() -> list[list[int]]:
    with_one = made(1)
    return [with_one.decode([prompt], TOKENS).token_ids[0] for prompt in PROMPTS]


@pytest.mark.parametrize("at_once", [2, 3, 8, TOKENS, 40])
@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_the_same_tokens_whatever_the_number_of_tokens_a_call(at_once: int, count: int) -> None:
    decoder = made(at_once)
    for tokens in (TOKENS, 1, 2):
        before = decoder.manager.stats().steps
        decoded = decoder.decode(PROMPTS[:count], tokens)
        assert decoded.token_ids == [ids[:tokens] for ids in one_by_one()[:count]]
        assert (decoded.seconds_per_token is None) == (tokens == 1)
        longest = max(map(len, PROMPTS[:count]))
        assert decoder.manager.stats().steps - before == longest + tokens - 1
    assert free_blocks(decoder.cache) == 5 * 6


@pytest.mark.parametrize("looped", [False, True], ids=["replays", "loop"])
@pytest.mark.parametrize("at_once", [2, 5, TOKENS])
def test_sequences_end_at_end_of_sequence(
    at_once: int, looped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if looped:
        monkeypatch.setattr("graphcap.life.select_recorder", lambda *_: LoopingRecorder())
    for ends in (
        (one_by_one()[0][0],),  # with the first token
        (one_by_one()[1][4], one_by_one()[2][9]),
        tuple({ids[6] for ids in one_by_one()}),  # all, at different places
        (127,),
    ):
        expected = []
        for ids in one_by_one()[:4]:
            end = next((i + 1 for i, token in enumerate(ids) if token in ends), TOKENS)
            expected.append(ids[:end])
        single = made(1, eos=ends).decode(PROMPTS[:4], TOKENS)
        assert single.token_ids == expected
        decoder = made(at_once, eos=ends)
        before = decoder.manager.stats().steps
        assert decoder.decode(PROMPTS[:4], TOKENS).token_ids == expected
        # Ended with the call in which the last sequence ended.
        steps = decoder.manager.stats().steps - before - 6
        most = max(map(len, expected)) - 1
        assert steps == min(TOKENS - 1, -(-most // at_once) * at_once)
        assert free_blocks(decoder.cache) == 5 * 6


def test_sampled_verification_holds_while_many_tokens_are_decoded() -> None:
    decoder = made(5, settings=Settings(verify_every=3))
    assert decoder.decode(PROMPTS[:4], TOKENS).token_ids == one_by_one()[:4]
    stats = decoder.manager.stats()
    assert stats.verified == stats.replays // 3 > 5


def test_one_token_a_call_needs_no_ring_and_fewer_than_one_is_refused() -> None:
    assert "ring" not in [row.operation for row in made(1).manager.report.census.rows]
    with pytest.raises(InputError, match="at least 1, found 0"):
        made(0)
