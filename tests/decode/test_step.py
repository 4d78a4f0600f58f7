"""The decode step: it brings itself to the next token, and padding reaches nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoders import KERNELS, batch_at, draw_weights, make_cache, make_decoder, poison, tensors
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding
from transformers_version import rope

from graphcap.decode.cache import NULL_BLOCK
from graphcap.decode.decoder import EagerDecoder
from graphcap.decode.kernels import DecodeKernels
from graphcap.decode.rotary import rotary_table
from graphcap.operations import Operation

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("how", ["replayed", "eager"])
def test_the_step_writes_the_slots_of_the_next_token(how: str) -> None:
    """Over block boundaries, against the host's arithmetic; one row is padding."""
    weights = draw_weights()
    positions = [0, 3, 6]
    if how == "replayed":
        decoder = make_decoder(weights)
        cache = decoder.cache
    else:
        eager = EagerDecoder(weights, make_cache(weights), KERNELS)
        cache = eager.cache
    cache.fill_random(1)
    tables = torch.stack([cache.allocate(24) for _ in positions])
    batch = batch_at(tables, positions, [5, 6, 7])
    if how == "eager":
        eager.load(batch)
    for index in range(12):
        if how == "replayed":
            output = decoder.manager.run(batch if index == 0 else None)
            slots = {name: decoder.inputs[name][:3] for name in batch}
        else:
            output = eager.run()
            slots = {name: eager.slots[name] for name in batch}
        positions = [position + 1 for position in positions]
        expected = batch_at(tables, positions, output["token_ids"].tolist())
        for name, tensor in expected.items():
            assert torch.equal(slots[name], tensor), (index, name)
    assert max(positions) == 18


def test_consecutive_tokens_are_one_replay_each_and_nothing_else() -> None:
    decoder = make_decoder(draw_weights(), sizes=(2,))
    tables = torch.stack([decoder.cache.allocate(24) for _ in range(3)])
    decoder.manager.run(batch_at(tables, [0, 0, 0], [1, 2, 3]))
    before = decoder.manager.stats()
    assert before.input_launches > 0
    replays: list[int] = []
    for size in (2, 4):
        recording = decoder.manager.recording(size)

        def counted(replay: Callable[[], None] = recording.replay, size: int = size) -> None:
            replays.append(size)
            replay()

        recording.replay = counted  # type: ignore[method-assign]
    for _ in range(20):
        decoder.manager.run()
    after = decoder.manager.stats()
    assert replays == [4] * 20
    assert after.replays == before.replays + 20
    assert after.steps == before.steps + 20
    assert after.input_launches == before.input_launches
    assert not after.fallbacks


@dtypes
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_only_the_slots_of_real_rows_are_written(rows: int, dtype: torch.dtype) -> None:
    decoder = make_decoder(draw_weights(dtype))
    cache = decoder.cache
    cache.fill_random(2)
    for tensor in tensors(cache):
        tensor[NULL_BLOCK].normal_()
    tables = torch.stack([cache.allocate(24) for _ in range(rows)])
    batch = batch_at(tables, [3, 0, 17, 9][:rows], [9, 8, 7, 6][:rows])
    decoder.manager.run(batch_at(torch.ones(4, 6).int(), [1, 1, 1, 1], [1, 2, 3, 4]))  # leaves pads
    before = [tensor.flatten(0, 1).clone() for tensor in tensors(cache)]
    expected = set(batch["slot_mapping"].tolist())
    decoder.manager.run(batch)
    for old, now in zip(before, tensors(cache), strict=True):
        changed = (old != now.flatten(0, 1)).flatten(1).any(1).nonzero()[:, 0]
        assert set(changed.tolist()) == expected


@dtypes
def test_what_pads_read_does_not_reach_real_rows(dtype: torch.dtype) -> None:
    """Even with NaN in the null block, the only one that pads read."""
    decoder = make_decoder(draw_weights(dtype))
    tables = torch.stack([decoder.cache.allocate(24) for _ in range(2)])
    results = []
    for value in (0.0, float("nan")):
        poison(decoder.cache)
        for tensor in tensors(decoder.cache):
            tensor[NULL_BLOCK] = value
        outputs = [decoder.manager.run(batch_at(tables, [0, 0], [3, 4]))["logits"].clone()]
        outputs += [decoder.manager.run()["logits"].clone() for _ in range(8)]
        results.append(torch.stack(outputs))
    assert results[0].isfinite().all()
    assert torch.equal(*results)


def spying(seen: list[tuple[torch.Tensor, torch.Tensor, int]]) -> DecodeKernels:
    """Kernels that note what the alignment of each layer is given and gives."""
    align = KERNELS.experts.align

    def noted(ids: torch.Tensor, sorted_ids: torch.Tensor, *rest: Any, **scratch: Any) -> None:
        align.function(ids, sorted_ids, *rest, **scratch)
        seen.append((ids.clone(), sorted_ids.clone(), int(rest[1])))

    spy = Operation(align.name, align.implementation, noted, align.scratch)
    return replace(KERNELS, experts=replace(KERNELS.experts, align=spy))


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_pads_reach_no_expert(rows: int) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    decoder = make_decoder(draw_weights(), kernels=spying(seen))
    tables = torch.stack([decoder.cache.allocate(24) for _ in range(rows)])
    decoder.inputs.poison_pads(0)
    seen.clear()
    for index in range(3):
        decoder.manager.run(batch_at(tables, [0] * rows, [7] * rows) if index == 0 else None)
    assert len(seen) == 3 * 2  # two of three layers have experts
    for ids, sorted_ids, used in seen:
        assert ids.shape == (4, 2)
        assert ((ids[:rows] >= 0) & (ids[:rows] < 6)).all()
        assert (ids[rows:] == -1).all()
        pairs = sorted_ids[:used]
        assert sorted(pairs[pairs < 8].tolist()) == list(range(rows * 2))


@pytest.mark.parametrize("full", ["the table", "its blocks"])
def test_a_sequence_at_its_capacity_disturbs_nobody(full: str) -> None:
    """It runs on beyond the end of its table, or of the blocks that it was given."""
    decoder = make_decoder(draw_weights(), max_context=12)
    cache = decoder.cache
    results = []
    for with_full in (False, True):
        poison(cache)
        capacity = 12 if full == "the table" else 8
        small, other = cache.allocate(capacity), cache.allocate(12)
        for tensor in tensors(cache):  # what the full one has written so far
            tensor[small[small != NULL_BLOCK].long()] = 0.5
            tensor[other[0].long(), 0] = 0.25
        if with_full:
            batch = batch_at(torch.stack([small, other]), [capacity - 1, 1], [3, 4])
        else:
            batch = batch_at(torch.stack([other, other]), [1, 1], [4, 4])
        output = decoder.manager.run(batch)
        steps = [output["logits"][1].clone()]
        last = int(output["token_ids"][0])
        after_one = [tensor[small.long()].clone() for tensor in tensors(cache)]
        for _ in range(9):
            steps.append(decoder.manager.run()["logits"][1].clone())
        if with_full:
            owned = small != NULL_BLOCK
            for then, tensor in zip(after_one, tensors(cache), strict=True):
                assert torch.equal(then[owned], tensor[small.long()][owned])
                free = torch.ones(cache.num_blocks, dtype=torch.bool)
                free[NULL_BLOCK] = free[small.long()] = free[other.long()] = False
                assert free.any()
                assert tensor[free].isnan().all()
            # It stands still, one beyond its last token.
            assert decoder.inputs["positions"][0] == capacity
            assert decoder.inputs["seq_lens"][0] == capacity + 1
            assert decoder.inputs["slot_mapping"][0] == -1
            assert decoder.inputs["token_ids"][0] == last
            for tensor in tensors(cache):
                assert not tensor[NULL_BLOCK].any()
        assert decoder.inputs["positions"][1] == 11
        results.append(torch.stack(steps))
        cache.free(small)
        cache.free(other)
    # Not bit by bit: how many rows an expert is given changes the order of its sums.
    assert results[0].isfinite().all()
    torch.testing.assert_close(*results, rtol=0, atol=2e-5 * float(results[0].abs().max()))


@pytest.mark.parametrize("how", ["replayed", "eager"])
def test_everybody_at_capacity_for_long(how: str) -> None:
    """No row is real any more: nothing is written, nothing is read out of range."""
    weights = draw_weights()
    decoder = make_decoder(weights, max_context=8)
    cache = decoder.cache
    cache.fill_random(3)
    tables = torch.stack([cache.allocate(8) for _ in range(4)])
    batch = batch_at(tables, [7, 7, 7, 6], [1, 2, 3, 4])
    if how == "replayed":
        first, follow = decoder.manager.run, decoder.manager.run
    else:
        eager = EagerDecoder(weights, cache, KERNELS)

        def first(batch: Any) -> Any:
            eager.load(batch)
            return eager.run()

        follow = eager.run
    first(batch)
    follow()
    before = [tensor.clone() for tensor in tensors(cache)]
    slots = decoder.inputs if how == "replayed" else eager.slots
    standing = {name: slots[name].clone() for name in batch}
    for _ in range(5):
        output = follow()
        assert output["logits"].isfinite().all()
    assert standing["positions"].tolist() == [8] * 4
    assert standing["slot_mapping"].tolist() == [-1] * 4
    for name, tensor in standing.items():
        assert torch.equal(slots[name], tensor), name
    for then, tensor in zip(before, tensors(cache), strict=True):
        assert torch.equal(then, tensor)


def allocated(call: Callable[[], object]) -> list[int]:
    """Bytes of each request to and return to the host allocator, as the profiler sees them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = profiled.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]"]


MATRIX_PRODUCTS = {
    operation.name
    for operation in (
        KERNELS.linear,
        KERNELS.attention,
        KERNELS.experts.router_gemm,
        KERNELS.experts.expert_gemm,
    )
}


@dtypes
def test_a_replay_allocates_nothing(dtype: torch.dtype) -> None:
    """For every batch. In bfloat16 oneDNN, which a CPU may use for matrix products, takes a workspace
    from the host allocator inside the product; it is given back before the product returns, and no
    other operation of the step allocates."""
    decoder = make_decoder(draw_weights(dtype), max_batch=6, sizes=(1, 2, 3, 4, 5))
    assert allocated(lambda: torch.empty(100)) == [400, -400]  # the measure works
    for batch in range(1, 7):
        recording = decoder.manager.recording(batch)
        assert recording.census().allocations == 0
        recording.replay()
        if dtype == torch.float32:
            assert allocated(recording.replay) == []
        else:
            assert sum(allocated(recording.replay)) == 0


class _Renamed(Operation):
    """Stays itself under another row of the census, so that its name here is the kernel's."""

    def named(self, name: str) -> Operation:
        return self


def test_only_matrix_products_in_bfloat16_allocate() -> None:
    """See above: every other operation of an eager step is profiled alone."""
    found: dict[str, int] = {}

    def watched(operation: Operation) -> Operation:
        name = operation.name

        def measured(*args: Any, **kwargs: Any) -> None:
            requests = allocated(lambda: operation.function(*args, **kwargs))
            assert sum(requests) == 0, name
            found[name] = found.get(name, 0) + len(requests)

        return _Renamed(name, operation.implementation, measured, operation.scratch)

    operations: set[str] = set()

    def watch(group: Any) -> Any:
        parts = {name: value for name, value in vars(group).items() if isinstance(value, Operation)}
        operations.update(operation.name for operation in parts.values())
        return replace(group, **{name: watched(value) for name, value in parts.items()})

    kernels = replace(watch(KERNELS), experts=watch(KERNELS.experts))
    weights = draw_weights(torch.bfloat16)
    eager = EagerDecoder(weights, make_cache(weights), kernels)
    tables = torch.stack([eager.cache.allocate(24) for _ in range(4)])
    eager.load(batch_at(tables, [0, 0, 0, 0], [1, 2, 3, 4]))
    eager.run()
    others = {name for name in found if name not in MATRIX_PRODUCTS}
    assert len(others) == len(operations) - len(MATRIX_PRODUCTS)  # every operation has been seen
    assert {name: found[name] for name in others} == dict.fromkeys(others, 0)


@dtypes
@pytest.mark.parametrize(("dim", "theta"), [(2, 10.0), (16, 1e4), (128, 1e6)])
def test_rotary_table_is_transformers(dim: int, theta: float, dtype: torch.dtype) -> None:
    config = Qwen3MoeConfig(head_dim=dim, **rope(theta))
    positions = torch.arange(5000)
    theirs = Qwen3MoeRotaryEmbedding(config)(torch.empty(1, dtype=dtype), positions[None])
    ours = rotary_table(dim, theta, 5000, device="cpu", dtype=dtype)
    assert ours.dtype == dtype
    assert ours.shape == (5000, dim)
    for part, whole in zip(ours.split(dim // 2, 1), theirs, strict=True):
        assert torch.equal(part, whole[0, :, : dim // 2])
    # And both are right: angles of 5000 rounded to float32 are off by up to 2e-4.
    exact = positions.double()[:, None] * theta ** -(torch.arange(0, dim, 2).double() / dim)
    limit = 1e-3 if dtype == torch.float32 else 5e-3
    assert (ours.double() - torch.cat([exact.cos(), exact.sin()], 1)).abs().max() < limit
