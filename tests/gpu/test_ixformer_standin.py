"""The decode step on ixformer's operations, by its stand-in, inside a real CUDA graph.

What the graph holds are the stand-in's torch kernels, not CoreX's; what is shown is that nothing which
graphcap puts around an operation synchronises, allocates or moves, for both generations.
"""

from __future__ import annotations

from typing import Any

import ixformer_standin
import pytest
import torch
from ixformer_standin import MOE_OPERATIONS, installed

from graphcap import Settings
from graphcap.decode.cache import NULL_BLOCK, PagedCache
from graphcap.decode.decoder import Decoder, EagerDecoder
from graphcap.decode.kernels import DecodeKernels, decode_kernels
from graphcap.decode.measure import activity
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.errors import BackendError
from graphcap.moe.experts import RoutedExperts
from graphcap.moe.kernels import Backend, choose_backend, expert_kernels
from graphcap.pool import BufferPool
from graphcap.recorders import probe, select
from graphcap.recorders.select import select_recorder

BUILDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "0.4": ("0.4", {}, "reference"),
    "0.4 without MoE, Triton": ("0.4", {"without": MOE_OPERATIONS}, "triton"),
    "0.4 without MoE, reference": ("0.4", {"without": MOE_OPERATIONS}, "reference"),
    "newer": ("newer", {}, "triton"),
    "newer, merge missing": ("newer", {"without": ["moe_output_reduce_sum"]}, "reference"),
    "newer, top-k renamed": ("newer", {"renamed": {"vllm_moe_topk_softmax": "topk_v2"}}, "triton"),
}
PROMPTS = [[5, 7, 9, 11], [3], [100, 20, 30, 40, 50, 60, 70, 80], [1, 2], [450, 3, 2], [9] * 5]

builds = pytest.mark.parametrize("build", BUILDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def backend_of(build: str) -> Backend:
    return Backend("ixformer", "tests", BUILDS[build][2])


def kernels_of(build: str) -> DecodeKernels:
    generation, changes, _ = BUILDS[build]
    if BUILDS[build][2] == "triton":
        pytest.importorskip("triton")
    with installed(generation, **changes):
        return decode_kernels(backend_of(build))


def decoder_for(
    device: torch.device,
    recorder: str,
    kernels: DecodeKernels,
    dtype: torch.dtype = torch.float32,
    max_batch: int = 6,
) -> Decoder:
    weights = random_weights(preset("tiny"), device=device, dtype=dtype, seed=3)
    decoder = Decoder(
        weights,
        kernels,
        max_batch=max_batch,
        max_context=128,
        settings=Settings(recorder=recorder, strict=True),
    )
    decoder.cache.fill_random(1)
    report = decoder.manager.capture()
    assert not report.failures, report.failures
    assert report.recorder == recorder
    assert any(choice.kernel.startswith("ixformer: ") for choice in report.kernels)
    for tensor in (*decoder.cache.keys, *decoder.cache.values):
        tensor[NULL_BLOCK + 1 :] = float("nan")
    return decoder


@builds
@pytest.mark.parametrize("recorder", ["cuda", "tape"])
def test_tokens_are_those_of_the_reference_kernels(
    device: torch.device, recorder: str, build: str
) -> None:
    """For every batch, by replay of a real graph and of a tape, with NaN wherever nothing is written."""
    kernels = kernels_of(build)
    decoder = decoder_for(device, recorder, kernels)
    reference = decode_kernels(Backend("reference", "tests"))
    for rows in range(1, 7):
        prompts = [[*PROMPTS[i], rows] for i in range(rows)]
        wanted = []
        for used in (reference, kernels):
            cache = PagedCache(
                decoder.weights.shape,
                num_sequences=rows,
                max_context=128,
                device=device,
                dtype=torch.float32,
                format=used.cache_format,
            )
            wanted.append(EagerDecoder(decoder.weights, cache, used).decode(prompts, 16).token_ids)
        decoder.pool.poison()
        decoder.inputs.poison_pads(0)
        found = decoder.decode(prompts, 16).token_ids
        assert found == wanted[0], "reference"
        assert found == wanted[1], "eager"
    assert decoder.manager.stats().fallbacks == {}


@builds
@dtypes
def test_one_launch_a_token_and_no_allocation(
    device: torch.device, dtype: torch.dtype, build: str
) -> None:
    decoder = decoder_for(device, "cuda", kernels_of(build), dtype)
    for rows in (1, 3, 6):
        decoder.decode(PROMPTS[:rows], 4)
        seen = activity(decoder.manager.run, device)
        assert seen.calls == {"cudaGraphLaunch": 1}
        assert seen.allocations == 0


@builds
def test_logits_of_pads_and_real_rows_do_not_mix(device: torch.device, build: str) -> None:
    """NaN in the null block, which pads read, changes no bit of a real row."""
    decoder = decoder_for(device, "cuda", kernels_of(build), max_batch=4)
    results = []
    for value in (0.0, float("nan")):
        for tensor in (*decoder.cache.keys, *decoder.cache.values):
            tensor.fill_(float("nan"))
            tensor[NULL_BLOCK] = value
        decoder.pool.poison()
        tables = torch.arange(1, 1 + 3 * decoder.cache.blocks_per_sequence).view(3, -1).int()
        batch = {
            "token_ids": torch.tensor([3, 4, 5], dtype=torch.int32),
            "positions": torch.zeros(3, dtype=torch.int64),
            "seq_lens": torch.ones(3, dtype=torch.int32),
            "slot_mapping": (tables[:, 0] * decoder.cache.block_size).to(
                decoder.cache.format.slot_dtype
            ),
            "block_tables": tables,
        }
        steps = [decoder.manager.run(batch)["logits"].clone()]
        steps += [decoder.manager.run()["logits"].clone() for _ in range(20)]
        results.append(torch.stack(steps))
    assert results[0].isfinite().all()
    # Not bit by bit: atomics or split sums may change the order of an expert's sums.
    scale = float(results[0].abs().max())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=2e-5 * scale)


@builds
@pytest.mark.parametrize("rows", [1, 5, 17, 66])
def test_experts_in_a_graph_equal_float64(device: torch.device, rows: int, build: str) -> None:
    """Replayed on values other than the captured ones, the pool filled with NaN before."""
    generation, changes, stand_in = BUILDS[build]
    if stand_in == "triton":
        pytest.importorskip("triton")
    with installed(generation, **changes):
        kernels = expert_kernels(backend_of(build))
    generator = torch.Generator(device).manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    experts, size, inner, top_k = 8, 32, 16, 2
    router, hidden = normal(experts, size), normal(rows, size)
    gate_up, down = normal(experts, 2 * inner, size) / 4, normal(experts, size, inner) / 4
    pool = BufferPool(device)
    layer = RoutedExperts(kernels, pool, router, gate_up, down, top_k=top_k, renormalize=True)
    row_ids = torch.arange(rows, device=device)
    if rows > 1:
        row_ids[rows // 2] = -1
    out = torch.full_like(hidden, float("nan"))

    def step() -> None:
        with pool.step():
            layer(hidden, row_ids, out)

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.no_grad(), torch.cuda.stream(side):
        step()
        pool.freeze()
        step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        step()
    hidden.copy_(normal(rows, size))
    pool.poison()
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize(device)

    logits = (hidden @ router.t()).double()
    best = torch.softmax(logits, -1).topk(top_k)
    share = best.values / best.values.sum(-1, keepdim=True)
    expected = torch.zeros(rows, size, dtype=torch.float64, device=device)
    for row in range(rows):
        if int(row_ids[row]) < 0:
            continue
        for k in range(top_k):
            expert = int(best.indices[row, k])
            gate, up = (gate_up[expert].double() @ hidden[row].double()).split(inner)
            act = gate * torch.sigmoid(gate) * up
            expected[row] += share[row, k] * (down[expert].double() @ act)
    scale = float(expected.abs().max())
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4 * scale)


def test_a_card_that_refuses_capture_gets_the_tape(
    device: torch.device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the driver's text, and a step that works."""
    kernels = kernels_of("newer, merge missing")
    wanted = decoder_for(device, "cuda", kernels).decode(PROMPTS, 8).token_ids
    monkeypatch.setattr(probe, "_found", {})  # as in a process that has not asked yet
    select._warn_once.cache_clear()
    with ixformer_standin.capture_not_supported():
        assert select_recorder("auto", device).name == "tape"
        assert "ixErrorNotSupported" in caplog.text
        with pytest.raises(BackendError, match="ixErrorNotSupported"):
            select_recorder("cuda", device)
        assert decoder_for(device, "tape", kernels).decode(PROMPTS, 8).token_ids == wanted


def test_auto_chooses_ixformer_where_it_can_be_imported(device: torch.device) -> None:
    with installed("newer"):
        assert choose_backend("auto", device).name == "ixformer"
    assert choose_backend("auto", device).name != "ixformer"
