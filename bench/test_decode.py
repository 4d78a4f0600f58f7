"""One token of the ``tiny`` shape: eager, tape and graph, per batch."""

import statistics
import time

import pytest
import torch
from conftest import CONTEXT, MAX_BATCH, device_milliseconds, prompts, recorders

from graphcap.decode.cache import PagedCache
from graphcap.decode.decoder import EagerDecoder
from graphcap.decode.prompts import Prompts

BATCHES = [1, 2, 3, 5, 8]


def finished(call, device):
    def run():
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


def prepared(way, batch, decoders, weights, kernels, device):
    """(a call of one step, a call that puts it at the first token after the prompts, its prompts)"""
    if way == "eager":
        cache = PagedCache(
            weights.shape,
            num_sequences=batch,
            max_context=CONTEXT,
            device=device,
            dtype=weights.dtype,
            format=kernels.cache_format,
        )
        eager = EagerDecoder(weights, cache, kernels)
        load, call, step = eager.load, eager.run, eager.run
    else:
        decoder = decoders[way]
        cache, call = decoder.cache, decoder.manager.run
        load, step = decoder.manager.run, None
    laid = Prompts(prompts(batch), 2, cache, weights.shape.vocab_size)

    def start():
        # Every round begins at the same place, so all ways attend to the same lengths.
        for given in laid.batches():
            load(given)
            if step is not None:
                step()

    start()
    call()
    return finished(call, device), start, laid


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("way", ["eager", *recorders()])
def test_token(benchmark, decoders, weights, kernels, device, way, batch):
    benchmark.group = f"one token, batch {batch}"
    call, start, laid = prepared(way, batch, decoders, weights, kernels, device)
    try:
        benchmark.pedantic(call, setup=start, rounds=40, warmup_rounds=3)
        benchmark.extra_info["device_ms"] = device_milliseconds(call, device)
    finally:
        laid.close()


@pytest.mark.parametrize("batch", range(1, MAX_BATCH + 1))
@pytest.mark.parametrize("recorder", recorders())
def test_replay_against_eager_in_turn(
    benchmark, decoders, weights, kernels, device, recorder, batch
):
    """A machine changes its pace; a pair measured in turn shares it. The medians of the pairs are in
    ``extra_info``; what the benchmark itself times is the replay."""
    benchmark.group = f"replay and eager in turn, {recorder}"
    replay, replay_start, replay_laid = prepared(
        recorder, batch, decoders, weights, kernels, device
    )
    eager, eager_start, eager_laid = prepared("eager", batch, decoders, weights, kernels, device)

    def milliseconds(call):
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3

    pairs = []

    def in_turn():
        eager_start()
        by_eager = milliseconds(eager)
        replay_start()
        pairs.append((by_eager, milliseconds(replay)))
        replay_start()

    try:
        benchmark.pedantic(replay, setup=in_turn, rounds=40, warmup_rounds=3)
        benchmark.extra_info["eager_ms"] = statistics.median(e for e, _ in pairs)
        benchmark.extra_info["replay_ms"] = statistics.median(r for _, r in pairs)
        benchmark.extra_info["eager_over_replay"] = statistics.median(e / r for e, r in pairs)
    finally:
        replay_laid.close()
        eager_laid.close()
