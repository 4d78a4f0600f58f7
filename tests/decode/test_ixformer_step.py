"""The decode step on ixformer's operations: padding, capacity, addresses, allocations, and its report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ixformer_standin
import pytest
import torch
from decoders import (
    KERNELS,
    batch_at,
    by_slot,
    draw_weights,
    make_cache,
    make_decoder,
    poison,
    tensors,
)
from ixformer_standin import GENERATIONS, MOE_OPERATIONS, Misuse, installed
from ixformer_standin.newer import paged_attention_of_ixformer
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap.decode.cache import NULL_BLOCK, PagedCache
from graphcap.decode.decoder import Decoder, EagerDecoder
from graphcap.decode.kernels import DecodeKernels, decode_kernels
from graphcap.errors import CaptureError, InputError
from graphcap.moe.kernels import Backend
from graphcap.operations import Operation

BUILDS: dict[str, tuple[str, dict[str, Any]]] = {
    "0.4": ("0.4", {}),
    "0.4 without MoE": ("0.4", {"without": MOE_OPERATIONS}),
    "newer": ("newer", {}),
    "newer, its own attention": (
        "newer",
        {"replaced": {"vllm_paged_attention": paged_attention_of_ixformer}},
    ),
    "newer, attention renamed": ("newer", {"renamed": {"vllm_paged_attention": "paged_attention"}}),
}
PROMPTS = [[5], [9, 8, 7, 6, 5, 4], [1, 2, 3], [120, 0, 64]]

builds = pytest.mark.parametrize("build", BUILDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def kernels_of(build: str, **changes: Any) -> DecodeKernels:
    generation, own = BUILDS[build]
    with installed(generation, **{**own, **changes}):
        return decode_kernels(Backend("ixformer", "tests"))


def batch_for(
    decoder: Decoder, tables: torch.Tensor, positions: list[int], tokens: list[int]
) -> dict[str, torch.Tensor]:
    batch = batch_at(tables, positions, tokens)
    batch["slot_mapping"] = batch["slot_mapping"].to(decoder.cache.format.slot_dtype)
    return batch


@builds
def test_tokens_are_those_of_the_reference_kernels(build: str) -> None:
    weights = draw_weights()
    expected = make_decoder(weights).decode(PROMPTS, 12).token_ids
    kernels = kernels_of(build)
    decoder = make_decoder(weights, kernels=kernels, sizes=(1, 2))
    poison(decoder.cache)
    assert decoder.decode(PROMPTS, 12).token_ids == expected
    eager = EagerDecoder(weights, make_cache(weights, kernels=kernels), kernels)
    poison(eager.cache)
    assert eager.decode(PROMPTS, 12).token_ids == expected


@builds
def test_the_step_writes_the_slots_of_the_next_token(build: str) -> None:
    """Over block boundaries, in the dtype that the cache write wants; one row is padding."""
    decoder = make_decoder(draw_weights(), kernels=kernels_of(build))
    decoder.cache.fill_random(1)
    positions = [0, 3, 6]
    tables = torch.stack([decoder.cache.allocate(24) for _ in positions])
    batch = batch_for(decoder, tables, positions, [5, 6, 7])
    wanted = torch.int32 if build.startswith("0.4") else torch.int64
    assert decoder.inputs["slot_mapping"].dtype == batch["slot_mapping"].dtype == wanted
    for index in range(12):
        output = decoder.manager.run(batch if index == 0 else None)
        positions = [position + 1 for position in positions]
        expected = batch_for(decoder, tables, positions, output["token_ids"].tolist())
        for name, tensor in expected.items():
            assert torch.equal(decoder.inputs[name][:3], tensor), (index, name)


@builds
@dtypes
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_only_slots_of_real_rows_are_written(rows: int, dtype: torch.dtype, build: str) -> None:
    """And, where padding is not known to be skipped, slot 0 of the null block, which nobody owns."""
    kernels = kernels_of(build)
    decoder = make_decoder(draw_weights(dtype), kernels=kernels)
    cache = decoder.cache
    cache.fill_random(2)
    tables = torch.stack([cache.allocate(24) for _ in range(rows)])
    batch = batch_for(decoder, tables, [3, 0, 17, 9][:rows], [9, 8, 7, 6][:rows])
    ones = torch.ones(4, 6).int()
    decoder.manager.run(batch_for(decoder, ones, [1, 1, 1, 1], [1, 2, 3, 4]))  # leaves pads
    before = [by_slot(cache, tensor).clone() for tensor in tensors(cache)]
    expected = set(batch["slot_mapping"].tolist())
    decoder.manager.run(batch)
    for old, tensor in zip(before, tensors(cache), strict=True):
        changed = (old != by_slot(cache, tensor)).flatten(0, 1).any(1).nonzero()[:, 0]
        where = set(changed.tolist())
        if kernels.bound is not None:
            where -= {NULL_BLOCK}
        assert where == expected


@builds
@dtypes
def test_what_pads_read_does_not_reach_real_rows(dtype: torch.dtype, build: str) -> None:
    """Even with NaN in the null block, the only one that pads read."""
    decoder = make_decoder(draw_weights(dtype), kernels=kernels_of(build))
    tables = torch.stack([decoder.cache.allocate(24) for _ in range(2)])
    results = []
    for value in (0.0, float("nan")):
        poison(decoder.cache)
        for tensor in tensors(decoder.cache):
            tensor[NULL_BLOCK] = value
        decoder.inputs.poison_pads(0)
        decoder.pool.poison()
        batch = batch_for(decoder, tables, [0, 0], [3, 4])
        outputs = [decoder.manager.run(batch)["logits"].clone()]
        outputs += [decoder.manager.run()["logits"].clone() for _ in range(8)]
        results.append(torch.stack(outputs))
    assert results[0].isfinite().all()
    assert torch.equal(*results)


@builds
@pytest.mark.parametrize("capacity", [12, 8], ids=["the table is full", "its blocks are full"])
def test_a_sequence_at_its_capacity_disturbs_nobody(capacity: int, build: str) -> None:
    """Attention is never asked for more than a row of the table holds."""
    results = []
    for with_full in (False, True):
        decoder = make_decoder(draw_weights(), max_context=12, kernels=kernels_of(build))
        cache = decoder.cache
        cache.fill_random(3)
        small, other = cache.allocate(capacity), cache.allocate(12)
        free = torch.ones(cache.num_blocks, dtype=torch.bool)
        free[NULL_BLOCK] = free[small.long()] = free[other.long()] = False
        assert free.any()
        untouched = [tensor[free].clone() for tensor in tensors(cache)]
        tables = torch.stack([small if with_full else other, other])
        positions, tokens = ([capacity - 1, 1], [3, 4]) if with_full else ([1, 1], [4, 4])
        batch = batch_for(decoder, tables, positions, tokens)
        steps = [decoder.manager.run(batch)["logits"][1].clone()]
        for _ in range(9):
            output = decoder.manager.run()
            steps.append(output["logits"][1].clone())
            assert output["logits"].isfinite().all()
        for then, tensor in zip(untouched, tensors(cache), strict=True):
            assert torch.equal(then, tensor[free])
        if with_full:
            assert decoder.inputs["slot_mapping"][0] == -1
            assert decoder.inputs["seq_lens"][0] == capacity + 1
        results.append(torch.stack(steps))
    torch.testing.assert_close(*results, rtol=0, atol=2e-5 * float(results[0].abs().max()))


class Allocations(TorchDispatchMode):
    """Notes operations that return new storage, unless the stand-in makes them inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if ixformer_standin.inside():
            return result
        self.seen += 1
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs or {}))}
        for tensor in _tensors(result):
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in given:
                self.found.append(str(func))
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@builds
@dtypes
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_a_step_on_the_frozen_pool_allocates_nothing(
    rows: int, dtype: torch.dtype, build: str
) -> None:
    decoder = make_decoder(draw_weights(dtype), kernels=kernels_of(build))
    tables = torch.stack([decoder.cache.allocate(24) for _ in range(rows)])
    decoder.manager.run(batch_for(decoder, tables, [0] * rows, [1] * rows))
    with Allocations() as control:
        torch.empty(3).add(1)
    assert len(control.found) == 2  # the measure works
    views = decoder.inputs.views(4)
    before = decoder.pool.allocations
    with torch.no_grad(), Allocations() as allocations:
        decoder.step(views)
    assert allocations.seen > 50
    assert allocations.found == []
    assert decoder.pool.allocations == before
    assert all(
        decoder.manager.recording(size).census().allocations == 0 for size in decoder.manager.ladder
    )


@builds
def test_an_operation_is_one_entry_of_the_tape(build: str) -> None:
    decoder = make_decoder(draw_weights(), kernels=kernels_of(build), sizes=(1,))
    rows = {row.operation: row for row in decoder.manager.recording(4).census().rows}
    layers = 3
    assert rows["copies"].count == 2 * layers
    alone = {row.operation for row in decoder.manager.recording(1).census().rows}
    assert alone == set(rows) - {"copies"}
    assert rows["rms_norm"].count == 1 + 2 * layers
    assert rows["fused_add_rms_norm"].count == 2 * layers
    assert rows["attention"].count == rows["cache write"].count == layers
    assert rows["rotary_embedding"].count == layers
    for name in ("topk_softmax", "fused_moe w1", "fused_moe w2", "merge", "moe_align_block_size"):
        assert rows[name].count == 2  # one of three layers is dense
    assert rows["silu_and_mul"].count == layers
    by_operation = {choice.operation: choice.kernel for choice in decoder.manager.report.kernels}
    for name, row in rows.items():
        if name in by_operation and name != "projections":
            assert row.implementation == by_operation[name]
    assert rows["rms_norm"].implementation == "ixformer: rms_norm"


def test_the_report_lists_what_runs_where_and_why() -> None:
    decoder = make_decoder(draw_weights(), kernels=kernels_of("0.4 without MoE"))
    written = json.loads(json.dumps(decoder.manager.report.to_json()))["kernels"]
    by_operation = {row["operation"]: row for row in written}
    assert by_operation["attention"] == {
        "operation": "attention",
        "kernel": "ixformer: vllm_single_query_cached_kv_attention",
        "note": "",
    }
    assert by_operation["topk_softmax"] == {
        "operation": "topk_softmax",
        "kernel": "torch",
        "note": "ixformer.functions has no vllm_moe_topk_softmax",
    }
    assert by_operation["sampling"]["note"] == "ixformer has no such operation"


def test_other_backends_are_reported_too() -> None:
    report = make_decoder(draw_weights()).manager.report
    assert {choice.operation for choice in report.kernels} >= {"attention", "topk_softmax", "merge"}
    assert all(choice.note == "" for choice in report.kernels)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_cache_of_another_format_is_refused(generation: str) -> None:
    weights = draw_weights()
    kernels = kernels_of(generation)
    with pytest.raises(InputError, match=r"make it with PagedCache\(\.\.\., format=kernels\.cache"):
        EagerDecoder(weights, make_cache(weights), kernels)
    with pytest.raises(InputError, match=r"layout='tokens'"):
        EagerDecoder(weights, make_cache(weights, kernels=kernels), KERNELS)


def test_heads_that_the_packed_layout_cannot_hold_are_refused() -> None:
    shape = replace(draw_weights().shape, head_dim=20)
    with pytest.raises(InputError, match=r"multiple of 8 torch\.bfloat16 elements, found 20"):
        PagedCache(
            shape,
            num_sequences=1,
            max_context=8,
            device="cpu",
            dtype=torch.bfloat16,
            format=kernels_of("0.4").cache_format,
        )


def test_a_cache_with_more_tokens_than_slots_can_number_is_refused() -> None:
    kernels = kernels_of("0.4")
    assert kernels.cache_format.shapes(2**27 - 1, 16, 1, 16, torch.bfloat16)
    with pytest.raises(InputError, match=r"int32 number 2147483647 tokens .* 2147483648"):
        kernels.cache_format.shapes(2**27, 16, 1, 16, torch.bfloat16)


def test_what_an_operation_rejects_is_named_while_it_is_warmed_up() -> None:
    """The stand-in's way to say that a caller is wrong reaches the caller."""
    kernels = kernels_of("0.4")
    wrong = Operation(
        "rms_norm",
        "swapped",
        lambda x, weight, out, eps: ixformer_standin.module_of("0.4").rms_norm(x, weight, eps, out),
    )
    with pytest.raises((CaptureError, Misuse), match="eps: expected float, found Tensor"):
        make_decoder(draw_weights(), kernels=replace(kernels, rms_norm=wrong))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_step_works_where_capture_is_refused(generation: str) -> None:
    """On the tape, which begins no capture."""
    weights = draw_weights()
    expected = make_decoder(weights).decode(PROMPTS, 6).token_ids
    with ixformer_standin.capture_not_supported():
        with pytest.raises(RuntimeError, match="ixErrorNotSupported"):
            torch.cuda.CUDAGraph.capture_begin(None)
        decoder = make_decoder(weights, kernels=kernels_of(generation))
        assert decoder.manager.recorder.name == "tape"
        assert decoder.decode(PROMPTS, 6).token_ids == expected
    assert "refuse" not in repr(torch.cuda.CUDAGraph.capture_begin)
