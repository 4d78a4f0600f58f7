"""The decode step of hybrids: states of sequences, padding, verification, allocations, kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from decoders import KERNELS, batch_at, poison
from torch.profiler import ProfilerActivity, profile

from graphcap.buckets import BucketLadder
from graphcap.decode.cache import PagedCache
from graphcap.decode.decoder import Decoder, EagerDecoder
from graphcap.decode.delta_shape import DeltaShape
from graphcap.decode.examples import example_batches
from graphcap.decode.kernels import DecodeKernels, decode_kernels
from graphcap.decode.prompts import Prompts
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import ModelShape, preset
from graphcap.decode.state_cache import NULL_SLOT, StateCache
from graphcap.decode.step import DecodeStep, decode_slots
from graphcap.errors import InputError, VerificationError
from graphcap.inputs import StaticInputs
from graphcap.manager import CaptureManager
from graphcap.moe.kernels import Backend
from graphcap.pool import BufferPool
from graphcap.settings import Settings

SHAPE = ModelShape(
    name="small-hybrid",
    num_layers=4,
    hidden_size=32,
    vocab_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=6,
    top_k=2,
    moe_intermediate_size=24,
    intermediate_size=40,
    mlp_only_layers=(2,),
    max_position_embeddings=64,
    model_type="qwen3_next",
    linear_layers=(0, 2, 3),
    delta=DeltaShape(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=10, conv_width=4),
    rotary_dim=4,
    shared_intermediate_size=20,
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def make_decoder(
    dtype: torch.dtype = torch.float32, kernels: DecodeKernels = KERNELS, **settings: Any
) -> Decoder:
    decoder = Decoder(
        random_weights(SHAPE, device="cpu", dtype=dtype, seed=5),
        kernels,
        max_batch=4,
        max_context=24,
        block_size=4,
        ladder=BucketLadder((1,), 4),
        settings=Settings(strict=True, **settings),
    )
    decoder.cache.fill_random(1)
    assert not decoder.manager.capture().failures
    return decoder


def states_of(decoder: Decoder) -> StateCache:
    assert decoder.cache.states is not None
    return decoder.cache.states


def tensors(states: StateCache) -> list[torch.Tensor]:
    return [*states.conv, *states.recurrent]


def start(decoder: Decoder, tokens: list[int], slots: list[int]) -> dict[str, torch.Tensor]:
    tables = torch.stack([decoder.cache.allocate(24) for _ in tokens])
    batch = batch_at(tables, [0] * len(tokens), tokens)
    return {**batch, "state_slots": torch.tensor(slots)}


@dtypes
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_only_the_states_of_real_rows_are_written(rows: int, dtype: torch.dtype) -> None:
    decoder = make_decoder(dtype)
    states = states_of(decoder)
    decoder.manager.run(start(decoder, [1, 2, 3, 4], [1, 2, 3, 4]))  # leaves what pads would read
    for tensor in tensors(states):
        tensor.fill_(float("nan"))
    before = [tensor.clone() for tensor in tensors(states)]
    slots = [3, 1, 4, 2][:rows]
    tables = torch.ones(rows, 6).int() * torch.arange(1, rows + 1).int()[:, None]
    batch = {
        **batch_at(tables, [0] * rows, [9, 8, 7, 6][:rows]),
        "state_slots": torch.tensor(slots),
    }
    output = decoder.manager.run(batch)
    assert output["logits"].isfinite().all()
    for then, now in zip(before, tensors(states), strict=True):
        assert now[slots].isfinite().all()
        others = [slot for slot in range(5) if slot not in slots]
        assert then[others].isnan().all()
        assert now[others].isnan().all()


@dtypes
def test_a_sequence_starts_from_zeros_whatever_its_slot_holds(dtype: torch.dtype) -> None:
    decoder = make_decoder(dtype)
    batch = start(decoder, [3, 4], [2, 4])
    results = []
    for value in (0.0, 5.0, float("nan")):
        poison(decoder.cache)
        for tensor in tensors(states_of(decoder)):
            tensor.fill_(value)
        outputs = [decoder.manager.run(batch)["logits"].clone()]
        outputs += [decoder.manager.run()["logits"].clone() for _ in range(8)]
        results.append(torch.stack(outputs))
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_states_matter() -> None:
    """What a sequence has read before its last token decides what it says."""
    decoder = make_decoder()
    first = decoder.decode([[1, 2, 3, 9]], 1)
    states = states_of(decoder)
    outputs = []
    batch = start(decoder, [7], [1])
    for value in (0.0, 1.0):
        decoder.cache.fill_random(2)
        for tensor in tensors(states):
            tensor.fill_(value)
        moved = {**batch, "positions": torch.tensor([3]), "seq_lens": torch.tensor([4]).int()}
        outputs.append(decoder.manager.run(moved)["logits"].clone())
    assert not torch.allclose(*outputs, atol=1e-2)
    assert len(first.token_ids[0]) == 1


def test_a_sequence_at_its_capacity_changes_no_state() -> None:
    decoder = make_decoder()
    batch = start(decoder, [5, 6], [1, 2])
    positions = torch.tensor([23, 0])
    table = batch["block_tables"]
    batch["positions"], batch["seq_lens"] = positions, (positions + 1).int()
    batch["slot_mapping"] = table[[0, 1], positions // 4].long() * 4 + positions % 4
    decoder.cache.fill_random(3)
    decoder.manager.run(batch)
    assert decoder.inputs["slot_mapping"][0] == -1
    before = [tensor[1].clone() for tensor in tensors(states_of(decoder))]
    moving = [tensor[2].clone() for tensor in tensors(states_of(decoder))]
    for _ in range(3):
        decoder.manager.run()
    for was, tensor in zip(before, tensors(states_of(decoder)), strict=True):
        assert torch.equal(was, tensor[1])
    for was, tensor in zip(moving, tensors(states_of(decoder)), strict=True):
        assert not torch.equal(was, tensor[2])


def test_capture_leaves_the_states_as_they_were() -> None:
    decoder = Decoder(
        random_weights(SHAPE, device="cpu", dtype=torch.float32, seed=5),
        KERNELS,
        max_batch=2,
        max_context=8,
        settings=Settings(strict=True),
    )
    decoder.cache.fill_random(4)
    before = [tensor.clone() for tensor in tensors(states_of(decoder))]
    decoder.manager.capture()
    for was, tensor in zip(before, tensors(states_of(decoder)), strict=True):
        assert torch.equal(was, tensor)


def test_verification_of_live_replays_keeps_what_the_replay_did() -> None:
    """``GRAPHCAP_VERIFY=1`` runs every step twice; the states must be those of running it once."""
    plain, checked = make_decoder(), make_decoder(verify_every=1)
    prompts = [[1, 2, 3], [4, 5], [6]]
    assert checked.decode(prompts, 8).token_ids == plain.decode(prompts, 8).token_ids
    assert checked.manager.stats().verified > 8
    for one, two in zip(tensors(states_of(checked)), tensors(states_of(plain)), strict=True):
        assert torch.equal(one, two)


def test_verification_without_the_states_fails() -> None:
    """A manager that is not told of the states finds that the step depends on more than its slots."""
    weights = random_weights(SHAPE, device="cpu", dtype=torch.float32, seed=5)
    cache = PagedCache(
        SHAPE, num_sequences=2, max_context=16, block_size=4, device="cpu", dtype=torch.float32
    )
    pool = BufferPool("cpu")
    step = DecodeStep(weights, cache, KERNELS, pool)
    slots = decode_slots(cache.blocks_per_sequence, states=True)
    manager = CaptureManager(
        step,
        StaticInputs(2, slots, "cpu"),
        pool=pool,
        ladder=BucketLadder((), 2),
        settings=Settings(strict=True),
        example=example_batches(cache, SHAPE.vocab_size),
    )
    cache.fill_random(1)
    with pytest.raises(VerificationError, match="differs from the eager step"):
        manager.capture()


def test_slots_of_a_model_without_states_are_as_they_were() -> None:
    assert "state_slots" not in decode_slots(3)
    slot = decode_slots(3, states=True)["state_slots"]
    assert slot.dtype == torch.int64
    assert slot.pad.value == NULL_SLOT


def test_examples_give_each_row_a_state_of_its_own() -> None:
    cache = make_decoder().cache
    example = example_batches(cache, SHAPE.vocab_size)
    seen = set()
    for seed in range(20):
        slots = example(3, torch.Generator().manual_seed(seed))["state_slots"].tolist()
        assert len(set(slots)) == 3
        seen.update(slots)
    assert seen == {1, 2, 3, 4}


def test_kernels_without_gated_delta_nets_are_refused() -> None:
    weights = random_weights(SHAPE, device="meta", dtype=torch.float32, seed=0)
    cache = PagedCache(SHAPE, num_sequences=1, max_context=8, device="meta", dtype=torch.float32)
    with pytest.raises(
        InputError, match=r"small-hybrid.*qwen3_next.*GRAPHCAP_KERNELS=triton or ref"
    ):
        DecodeStep(weights, cache, replace(KERNELS, hybrid=None), BufferPool("meta"))


def allocated(call: Callable[[], object]) -> list[int]:
    """Bytes of each request to and return to the host allocator, as the profiler sees them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = profiled.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]"]


def test_a_replay_allocates_nothing() -> None:
    decoder = make_decoder()
    assert allocated(lambda: torch.empty(100)) == [400, -400]  # the measure works
    for size in (1, 4):
        recording = decoder.manager.recording(size)
        assert recording.census().allocations == 0
        recording.replay()
        assert allocated(recording.replay) == []


def test_every_operation_is_named() -> None:
    decoder = make_decoder()
    choices = {choice.operation for choice in decoder.step.kernel_choices}
    counted = {row.operation: row.count for row in decoder.manager.recording(4).census().rows}
    ours = {"conv update": 3, "delta rule": 3, "gated_rms_norm": 3, "output gate": 1}
    assert {name: counted[name] for name in ours} == ours
    assert counted["shared expert gate"] == 3  # layer 2 is dense
    assert {*ours, "shared expert gate"} <= choices


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@dtypes
def test_triton_decodes_what_plain_torch_decodes(dtype: torch.dtype) -> None:
    pytest.importorskip("triton", minversion="3.0")
    weights = random_weights(SHAPE, device="cpu", dtype=dtype, seed=2)
    traces = []
    for kernels in (KERNELS, decode_kernels(Backend("triton", "tests"))):
        cache = PagedCache(SHAPE, num_sequences=2, max_context=4, device="cpu", dtype=dtype)
        poison(cache)
        eager = EagerDecoder(weights, cache, kernels)
        laid = Prompts([[5, 6], [8]], 1, cache, SHAPE.vocab_size)
        for batch in laid.batches():
            eager.load(batch)
            logits = eager.run()["logits"].float()
        traces.append(logits)
    # Eight sublayers; bfloat16 is rounded towards zero by Triton's interpreter.
    limit = 1e-4 if dtype == torch.float32 else 8e-2
    assert (traces[0] - traces[1]).abs().max() <= limit * traces[0].abs().max()


@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_stay_healthy(tied: bool) -> None:
    """Logits of about the size that is drawn for, tokens that vary, states that stay bounded."""
    shape = replace(preset("tiny-hybrid"), tie_word_embeddings=tied, num_layers=12)
    shape = replace(shape, linear_layers=tuple(i for i in range(12) if i % 4 != 3))
    weights = random_weights(shape, device="cpu", dtype=torch.float32, seed=1)
    cache = PagedCache(shape, num_sequences=2, max_context=48, device="cpu", dtype=torch.float32)
    eager = EagerDecoder(weights, cache, KERNELS)
    decoded = eager.decode([[1, 2, 3], [200]], 40).token_ids
    assert 1.5 < eager.run()["logits"].std() < 5
    assert all(len(set(tokens)) > 20 for tokens in decoded)
    assert cache.states is not None
    for state in cache.states.recurrent:
        assert 1e-3 < state[1:].abs().max() < 20
