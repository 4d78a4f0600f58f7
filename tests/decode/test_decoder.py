"""Decoder and EagerDecoder: what they accept, what they give back, and the order of results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoders import (
    KERNELS,
    draw_weights,
    free_blocks,
    make_cache,
    make_decoder,
    poison,
    tensors,
)

from graphcap.decode.decoder import Decoder, EagerDecoder
from graphcap.decode.prompts import Prompts
from graphcap.errors import FallbackError, InputError, StateError
from graphcap.operations import Operation

PROMPTS = [[5], [9, 8, 7, 6, 5, 4], [1, 2, 3], [120, 0, 64], [33, 32]]

both = pytest.mark.parametrize("how", ["replayed", "eager"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(how: str, **options: Any) -> Decoder | EagerDecoder:
    weights = draw_weights()
    decoder: Decoder | EagerDecoder
    if how == "replayed":
        decoder = make_decoder(weights, **options)
    else:
        decoder = EagerDecoder(weights, make_cache(weights), options.get("kernels", KERNELS))
    poison(decoder.cache)
    return decoder


@both
def test_results_are_in_the_order_of_the_prompts(how: str) -> None:
    decoder = make(how)
    alone = [decoder.decode([prompt], 9).token_ids[0] for prompt in PROMPTS[:4]]
    assert len({tuple(tokens) for tokens in alone}) == 4
    assert decoder.decode(PROMPTS[:4], 9).token_ids == alone
    assert decoder.decode(PROMPTS[3::-1], 9).token_ids == alone[::-1]
    assert decoder.decode([PROMPTS[2]] * 3, 9).token_ids == [alone[2]] * 3


@both
def test_fewer_tokens_are_a_prefix(how: str) -> None:
    decoder = make(how)
    many = decoder.decode(PROMPTS[:3], 9)
    assert many.seconds_per_token is not None
    assert many.seconds_per_token > 0
    one = decoder.decode(PROMPTS[:3], 1)
    assert one.seconds_per_token is None
    assert one.token_ids == [tokens[:1] for tokens in many.token_ids]
    assert all(0 <= t < 128 and len(tokens) == 9 for tokens in many.token_ids for t in tokens)


@both
def test_blocks_come_back(how: str) -> None:
    decoder = make(how)
    everything = free_blocks(decoder.cache)
    assert everything == 4 * 6
    for _ in range(3):
        decoder.decode(PROMPTS[:4], 18)  # 6 + 18 = 24: the longest fills its blocks
        assert free_blocks(decoder.cache) == everything


def failing_after(steps: int) -> tuple[Any, list[int]]:
    """Kernels whose sampling raises after so many steps, and its calls so far."""
    calls: list[int] = []
    argmax = KERNELS.argmax

    def sample(*args: Any, **scratch: Any) -> None:
        calls.append(1)
        if len(calls) > steps:
            raise RuntimeError("the device is gone")
        argmax.function(*args, **scratch)

    spy = Operation(argmax.name, argmax.implementation, sample, argmax.scratch)
    return replace(KERNELS, argmax=spy), calls


@both
@pytest.mark.parametrize("after", [0, 2, 8])  # in the first prompt token, in the prompts, later
def test_blocks_come_back_after_an_error(how: str, after: int) -> None:
    kernels, calls = failing_after(10**6)
    decoder = make(how, kernels=kernels)
    everything = free_blocks(decoder.cache)
    calls.extend([1] * (10**6 - len(calls) - after))
    with pytest.raises(RuntimeError, match="the device is gone"):
        decoder.decode(PROMPTS[:4], 9)
    assert free_blocks(decoder.cache) == everything
    calls.clear()
    expected = make(how).decode(PROMPTS[:4], 9)
    assert decoder.decode(PROMPTS[:4], 9).token_ids == expected.token_ids


BAD = {
    "no prompt": ([], 4, "at least one prompt"),
    "an empty prompt": ([[1], []], 4, "at least one token id"),
    "a token too large": ([[1], [2, 128]], 4, r"128 is outside the vocabulary \(0 to 127\)"),
    "a negative token": ([[1], [-1, 2]], 4, r"-1 is outside the vocabulary \(0 to 127\)"),
    "no token asked for": ([[1]], 0, "at least 1 new token a prompt, found 0"),
    "fewer than no token": ([[1, 2, 3]], -1, "at least 1 new token a prompt, found -1"),
    "too long": ([[1], [1] * 20], 5, r"25 tokens .* 1 to 24 .*raise max_context"),
    "too many": ([[1] * 20] * 5, 4, r"6 cache blocks are needed and 0 are free"),
}


@both
@pytest.mark.parametrize(("prompts", "tokens", "message"), BAD.values(), ids=BAD)
def test_bad_prompts_are_refused_before_anything_is_launched(
    how: str, prompts: list[list[int]], tokens: int, message: str
) -> None:
    kernels, calls = failing_after(10**6)
    decoder = make(how, kernels=kernels)
    everything, steps = free_blocks(decoder.cache), len(calls)
    with pytest.raises(InputError, match=message):
        decoder.decode(prompts, tokens)
    assert len(calls) == steps
    assert all(tensor[1:].isnan().all() for tensor in tensors(decoder.cache))
    assert free_blocks(decoder.cache) == everything
    if isinstance(decoder, Decoder):
        assert decoder.manager.stats().steps == 0


@both
def test_the_longest_context_fits_exactly(how: str) -> None:
    decoder = make(how)
    assert len(decoder.decode([[1] * 20], 4).token_ids[0]) == 4
    with pytest.raises(InputError, match="25 tokens"):
        decoder.decode([[1] * 20], 5)


def test_prompts_join_at_their_ends() -> None:
    """The longest first; every batch is one token further, the last one ends all prompts."""
    weights = draw_weights()
    cache = make_cache(weights)
    laid = Prompts([[7], [1, 2, 3], [4, 5]], 2, cache, 128)
    batches = list(laid.batches())
    assert [batch["token_ids"].tolist() for batch in batches] == [[1], [2, 4], [3, 5, 7]]
    assert [batch["positions"].tolist() for batch in batches] == [[0], [1, 0], [2, 1, 0]]
    for batch in batches:
        rows = len(batch["token_ids"])
        assert torch.equal(batch["seq_lens"], (batch["positions"] + 1).int())
        assert torch.equal(batch["block_tables"], laid.tables[:rows])
        slots = laid.tables[:rows, 0] * 4 + batch["positions"]
        assert torch.equal(batch["slot_mapping"], slots)
    assert laid.in_order([torch.tensor([10, 20, 30]), torch.tensor([11, 21, 31])]) == [
        [30, 31],
        [10, 11],
        [20, 21],
    ]


def test_a_batch_above_the_maximum_runs_eagerly_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoder = make_decoder(draw_weights(), max_batch=3, sizes=(1,), strict=False)
    poison(decoder.cache)
    alone = [decoder.decode([prompt], 6).token_ids[0] for prompt in PROMPTS]
    before = decoder.manager.stats()
    assert not before.fallbacks
    assert decoder.decode(PROMPTS, 6).token_ids == alone
    stats = decoder.manager.stats()
    # Lengths 6, 3, 3, 2, 1: three batches of one row, one of three, then four and five, then five.
    assert stats.fallbacks == {"above_max_batch": 2 + 5}
    assert stats.replays == before.replays + 4
    assert stats.steps == before.steps + 6 + 5
    assert sum("above_max_batch" in record.message for record in caplog.records) == 1
    # And the next one that fits is replayed.
    assert decoder.decode(PROMPTS[:3], 6).token_ids == alone[:3]
    assert decoder.manager.stats().fallbacks == {"above_max_batch": 7}
    assert free_blocks(decoder.cache) == 3 * 6


def test_a_batch_above_the_maximum_is_an_error_where_fallbacks_are() -> None:
    decoder = make_decoder(draw_weights(), max_batch=3)
    everything = free_blocks(decoder.cache)
    with pytest.raises(FallbackError, match="maximum 3"):
        decoder.decode(PROMPTS, 6)
    assert free_blocks(decoder.cache) == everything


def test_decoding_needs_a_capture_and_an_open_decoder() -> None:
    weights = draw_weights()
    decoder = Decoder(weights, KERNELS, max_batch=2, max_context=24)
    everything = free_blocks(decoder.cache)
    with pytest.raises(StateError, match="call capture"):
        decoder.decode([[1]], 2)
    decoder.manager.capture()
    assert len(decoder.decode([[1]], 2).token_ids[0]) == 2
    decoder.close()
    decoder.close()
    with pytest.raises(StateError, match="closed"):
        decoder.decode([[1]], 2)
    assert free_blocks(decoder.cache) == everything


def test_decoders_share_weights_and_nothing_else() -> None:
    weights = draw_weights()
    one, two = make_decoder(weights), make_decoder(weights)
    eager = EagerDecoder(weights, make_cache(weights), KERNELS)
    expected = one.decode(PROMPTS[:4], 9).token_ids
    assert two.decode(PROMPTS[1:2], 3).token_ids == [expected[1][:3]]
    assert one.decode(PROMPTS[:4], 9).token_ids == expected
    assert eager.decode(PROMPTS[:4], 9).token_ids == expected
    assert one.step.weights is two.step.weights is eager.step.weights is weights
    addresses = {t.data_ptr() for d in (one, two, eager) for t in tensors(d.cache)}
    assert len(addresses) == 3 * 2 * 3


def test_capture_has_nothing_to_complain_about() -> None:
    """Every tensor that the step reads is reached by name, and verification varies every slot."""
    report = make_decoder(draw_weights(), sizes=(1, 2)).manager.report
    assert report.notes == ()
    assert report.failures == {}
    assert [bucket.largest_difference for bucket in report.buckets] == [0.0] * 3
