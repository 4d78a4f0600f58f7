"""bench/plain_torch.py, the peer and reference of the benchmarks, against the step on reference kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_modules import plain_torch

from graphcap.decode.cache import PagedCache
from graphcap.decode.decoder import EagerDecoder
from graphcap.decode.kernels import decode_kernels
from graphcap.decode.prompts import Prompts
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.moe.kernels import choose_backend

PROMPTS = [[5, 17, 300], [44, 2, 9], [7, 7, 1]]


def reference_logits(weights, steps):
    kernels = decode_kernels(choose_backend("reference", torch.device("cpu")))
    cache = PagedCache(
        weights.shape, num_sequences=3, max_context=64, device="cpu", dtype=weights.dtype
    )
    eager = EagerDecoder(weights, cache, kernels)
    laid = Prompts(PROMPTS, steps, cache, weights.shape.vocab_size)
    logits = []
    for batch in laid.batches():
        eager.load(batch)
        logits.append(eager.run()["logits"].clone())
    return logits + [eager.run()["logits"].clone() for _ in range(steps)]


@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid"])
@pytest.mark.parametrize("experts", plain_torch.EXPERTS)
@pytest.mark.parametrize("compute", [None, torch.float64])
def test_logits_are_those_of_the_reference_step(name, experts, compute):
    if experts == "grouped" and compute is not None:
        pytest.skip("grouped products are not made in float64")
    shape = preset(name)
    if shape.is_hybrid:
        assert shape.num_sparse_layers == shape.num_layers
    weights = random_weights(shape, device="cpu", dtype=torch.float32, seed=3)
    step = plain_torch.PlainStep(weights, 3, 64, compute=compute, experts=experts)
    with torch.no_grad():
        expected = reference_logits(weights, 6)
        for position, wanted in enumerate(expected):
            if position < 3:
                step.token_ids.copy_(torch.tensor([prompt[position] for prompt in PROMPTS]))
            torch.testing.assert_close(step().float(), wanted, rtol=2e-4, atol=2e-4)


def test_all_experts_of_all_sparse_layers_are_noted():
    shape = replace(preset("tiny"), top_k=3)
    weights = random_weights(shape, device="cpu", dtype=torch.float32, seed=1)
    step = plain_torch.PlainStep(weights, 2, 16)
    step.chosen = []
    with torch.no_grad():
        step()
    assert [tuple(ids.shape) for ids in step.chosen] == [(2, 3)] * shape.num_sparse_layers
    assert all(len(set(row)) == 3 for ids in step.chosen for row in ids.tolist())
