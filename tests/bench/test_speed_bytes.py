"""The floor's bytes against a count over the tensors themselves."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from bench_modules import speed, speed_bytes, speed_ways

from graphcap.decode.cache import PagedCache
from graphcap.decode.decoder import EagerDecoder
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.decode.weights import ExpertWeights
from graphcap.operations import Operation


def counted(weights, rows, context, chosen):
    """(weights, cache) that one step reads: every tensor by its name, experts one by one."""
    layers = [layer for layer in weights.layers if isinstance(layer.mlp, ExpertWeights)]
    read = 0
    for name, tensor in weights.named_tensors():
        if name == "embedding":
            read += rows * tensor[0].nbytes
        elif not name.endswith((".mlp.gate_up", ".mlp.down")) or tensor.dim() == 2:
            read += tensor.nbytes
    for layer, ids in zip(layers, chosen, strict=True):
        for expert in {expert for row in ids.tolist() for expert in row}:
            read += layer.mlp.gate_up[expert].nbytes + layer.mlp.down[expert].nbytes
    shape, cache = weights.shape, 0
    for layer in range(shape.num_layers):
        if shape.is_linear(layer):
            delta = shape.delta
            cache += rows * delta.num_value_heads * delta.key_dim * delta.value_dim * 4
            cache += rows * delta.channels * (delta.conv_width - 1) * weights.dtype.itemsize
        else:
            head = shape.head_dim * weights.dtype.itemsize
            cache += rows * context * shape.num_kv_heads * head * 2
    return read, cache


def draw(shape, rows, seed, experts=None):
    """Distinct experts for each row, of all or of the first `experts`."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(shape.num_sparse_layers, rows, shape.num_experts, generator=generator)
    scores[..., experts:] = -1 if experts is not None else scores[..., experts:]
    return list(scores.topk(shape.top_k).indices)


@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "few"), [(1, None), (8, None), (8, 3)])
def test_bytes_are_those_of_the_tensors_that_the_step_reads(name, dtype, rows, few):
    shape = preset(name)
    weights = random_weights(shape, device="cpu", dtype=dtype, seed=0)
    chosen = draw(shape, rows, rows, few)
    read = speed_bytes.bytes_read(shape, dtype, rows, 20, chosen)
    assert (read.weights, read.cache) == counted(weights, rows, 20, chosen)
    distinct = [len(set(ids.flatten().tolist())) for ids in chosen]
    assert read.experts == sum(distinct) / len(distinct)
    if few:
        assert read.experts <= few < shape.top_k * rows
        assert read.weights < shape.bytes_read_per_step(dtype, rows)


def test_several_steps_are_averaged():
    shape = preset("tiny")
    one, two = draw(shape, 4, 1), draw(shape, 4, 2, 2)
    apart = [speed_bytes.bytes_read(shape, torch.float32, 4, 9, chosen) for chosen in (one, two)]
    both = speed_bytes.bytes_read(shape, torch.float32, 4, 9, one + two)
    assert both.weights == sum(read.weights for read in apart) / 2
    assert both.cache == apart[0].cache


def test_routing_of_half_a_step_is_refused():
    shape = preset("tiny")
    with pytest.raises(ValueError, match="expected ids of 3 sparse layers a step, found 2"):
        speed_bytes.bytes_read(shape, torch.float32, 4, 9, draw(shape, 4, 1)[:2])


def test_a_run_counts_the_experts_that_its_own_tokens_choose():
    """What bench/speed.py sees of the routing is what graphcap's kernels choose for the tokens timed."""
    words = "--shape tiny --device cpu --batches 8 --context 20"
    with torch.no_grad():
        run = speed.Run(speed.options_of(words.split()))
        run.row({"plain": run.decoder("plain", [8], 20)}, 8, 20)
    (row,) = run.result["rows"]

    chosen = []
    topk = run.kernels.experts.topk_softmax

    def noting(*args, **scratch):
        topk.function(*args, **scratch)
        chosen.append(args[3].clone())

    noted = Operation(topk.name, topk.implementation, noting, topk.scratch)
    kernels = replace(run.kernels, experts=replace(run.kernels.experts, topk_softmax=noted))
    shape = run.weights.shape
    cache = PagedCache(
        shape,
        num_sequences=8,
        max_context=20 + speed_ways.HEADROOM,
        device="cpu",
        dtype=torch.float32,
    )
    cache.fill_random(1)
    eager = EagerDecoder(run.weights, cache, kernels)
    eager.load(speed_ways.Load(cache, shape.vocab_size, 8, 20).batch)
    eager.run()
    chosen.clear()
    for _ in range(run.ways[8, 20][-1].timed):
        eager.run()
    read = speed_bytes.bytes_read(shape, torch.float32, 8, 20, chosen)
    assert row["read"] == asdict(read)
    assert read.experts < min(shape.num_experts, 8 * shape.top_k), "routing that tells something"
    floor = read.total / run.read_tb_s / 1e9
    assert row["floor_ms"] == pytest.approx(floor)
    for way in row["ways"].values():
        assert way["of_floor"] == pytest.approx(floor / way["ms"])
        assert way["tb_s"] == pytest.approx(run.read_tb_s * way["of_floor"])
        assert way["tokens_per_s"] == pytest.approx(8e3 / way["ms"])
