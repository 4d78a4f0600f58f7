"""One token of the ``tiny`` shape: eager, tape and graph, per batch."""

import pytest
import torch
from conftest import CONTEXT, device_milliseconds, prompts, recorders

from graphcap.decode.cache import PagedCache
from graphcap.decode.decoder import EagerDecoder, Prompts

BATCHES = [1, 2, 3, 5, 8]


def finished(call, device):
    def run():
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("way", ["eager", *recorders()])
def test_token(benchmark, decoders, weights, kernels, device, way, batch):
    benchmark.group = f"one token, batch {batch}"
    if way == "eager":
        cache = PagedCache(
            weights.shape,
            num_sequences=batch,
            max_context=CONTEXT,
            device=device,
            dtype=weights.dtype,
        )
        eager = EagerDecoder(weights, cache, kernels)
        load, call = eager.load, eager.run
        step = eager.run
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

    try:
        start()
        call()
        benchmark.pedantic(finished(call, device), setup=start, rounds=40, warmup_rounds=3)
        benchmark.extra_info["device_ms"] = device_milliseconds(call, device)
    finally:
        laid.close()
