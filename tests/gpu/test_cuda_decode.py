"""The decode step on a real device: kernels, recorders and transformers agree."""

import pytest
import torch

from graphcap import Settings
from graphcap.decode.cache import PagedCache
from graphcap.decode.checkpoint import load_checkpoint
from graphcap.decode.decoder import Decoder, EagerDecoder
from graphcap.decode.kernels import decode_kernels
from graphcap.decode.measure import activity
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.moe.kernels import choose_backend
from graphcap.operations import operation
from graphcap.recorders.tape import TapeRecorder

PROMPTS = [[5, 7, 9, 11], [3], [100, 20, 30, 40, 50, 60, 70, 80], [1, 2], [450, 3, 2], [9] * 5]


shapes = pytest.mark.parametrize("shape", ["tiny", "tiny-hybrid"])


def decoder_for(device, recorder, kernels, dtype=torch.float32, max_batch=8, shape="tiny"):
    weights = random_weights(preset(shape), device=device, dtype=dtype, seed=3)
    backend = choose_backend(kernels, device)
    settings = Settings(recorder=recorder)
    made = Decoder(
        weights, decode_kernels(backend), max_batch=max_batch, max_context=128, settings=settings
    )
    made.cache.fill_random(1)
    report = made.manager.capture()
    assert not report.failures, report.failures
    made.cache.clear()
    return made


@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("recorder", ["cuda", "tape"])
@shapes
def test_replay_equals_eager_for_every_batch(device, recorder, kernels, shape):
    decoder = decoder_for(device, recorder, kernels, shape=shape)
    eager = EagerDecoder(
        decoder.weights,
        PagedCache(
            decoder.weights.shape,
            num_sequences=8,
            max_context=128,
            device=device,
            dtype=torch.float32,
        ),
        decode_kernels(choose_backend(kernels, device)),
    )
    for rows in range(1, 9):
        prompts = [PROMPTS[i % len(PROMPTS)] + [i] for i in range(rows)]
        want = eager.decode(prompts, 32).token_ids
        assert decoder.decode(prompts, 32).token_ids == want
    assert decoder.manager.stats().fallbacks == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@shapes
def test_promise_1_one_launch_a_token_and_no_allocation(device, dtype, shape):
    decoder = decoder_for(device, "cuda", "triton", dtype, shape=shape)
    for rows in range(1, 9):
        decoder.decode([PROMPTS[i % len(PROMPTS)] for i in range(rows)], 4)
        seen = activity(decoder.manager.run, device)
        assert seen.calls == {"cudaGraphLaunch": 1}
        assert seen.allocations == 0
        bucket = decoder.manager.ladder.bucket_for(rows)
        assert seen.operations == decoder.manager.recording(bucket).census().total


@shapes
def test_triton_and_reference_agree(device, shape):
    by_triton = decoder_for(device, "cuda", "triton", shape=shape).decode(PROMPTS, 32)
    by_torch = decoder_for(device, "cuda", "reference", shape=shape).decode(PROMPTS, 32)
    assert by_triton.token_ids == by_torch.token_ids


def test_tape_on_the_device_allocates_nothing(device):
    decoder = decoder_for(device, "tape", "triton")
    decoder.decode(PROMPTS, 4)
    assert activity(decoder.manager.run, device).allocations == 0


def test_greedy_tokens_equal_transformers(device, tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(11)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        initializer_range=0.2,
    )
    model = Qwen3MoeForCausalLM(config).float().eval()
    model.save_pretrained(tmp_path)
    model = model.to(device)
    prompts = [[1, 2, 3, 4, 5], [250], [17, 99, 3]]
    want = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        want.append(out[0, len(prompt) :].tolist())
    assert len({t for tokens in want for t in tokens}) > 10
    weights = load_checkpoint(tmp_path, device=device, dtype=torch.float32)
    for kernels in ("triton", "reference"):
        decoder = Decoder(
            weights,
            decode_kernels(choose_backend(kernels, device)),
            max_batch=4,
            max_context=64,
            settings=Settings(recorder="cuda"),
        )
        assert not decoder.manager.capture().failures
        assert decoder.decode(prompts, 32).token_ids == want


def test_a_triton_launch_behind_the_tape_is_refused(device):
    from graphcap.errors import CaptureError
    from graphcap.moe.kernels.triton import silu_and_mul

    gate_up = torch.randn(4, 64, device=device)
    out = torch.empty(4, 32, device=device)

    def behind():
        silu_and_mul.function(gate_up, out)
        return {"out": out}

    behind()
    with pytest.raises(CaptureError, match="Triton kernel"):
        TapeRecorder(device).record(behind, 4)

    @operation("wrapped", "triton")
    def wrapped(a, b):
        silu_and_mul.function(a, b)

    def seen():
        wrapped(gate_up, out)
        return {"out": out}

    recording = TapeRecorder(device).record(seen, 4)
    want = out.clone()
    out.fill_(float("nan"))
    recording.replay()
    assert torch.equal(out, want)
