"""Attention in CUDA C++ against float64 and Triton's, with everything unwritten poisoned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from cpp_checks import BF16, HALF, NAN, STEP, compiles, error  # noqa: F401 - compiles is a fixture

pytest.importorskip("triton", minversion="3.2")

from graphcap.buckets import BucketLadder
from graphcap.decode.cache import PagedCache
from graphcap.decode.decoder import Decoder, EagerDecoder
from graphcap.decode.kernels import (
    cuda_attend,
    cuda_linear,
    decode_kernels,
    triton_fused_attention,
)
from graphcap.decode.kernels.cuda_attend import CudaAttend
from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.plan_files import TunedBucket
from graphcap.decode.prompts import Prompts
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.moe.kernels import choose_backend
from graphcap.settings import Settings
from graphcap.tuning.tune import plan_file

EPS = 1e-6
LOG2_E = 1.4426950408889634


class Sizes(NamedTuple):
    heads: int = 16
    kv_heads: int = 2
    d: int = 128
    rotary: int = 128
    page: int = 16
    width: int = 20
    dtype: torch.dtype = BF16


class Call:
    """Attention of one new token, the last of `length`, on fresh inputs. The cache is NaN wherever no earlier
    token is, the place of the new one included, and so is the memory between its heads."""

    def __init__(
        self,
        device: torch.device,
        sizes: Sizes,
        length: int,
        slot_dtype: torch.dtype = torch.int64,
        spacing: int = 0,
    ) -> None:
        heads, kv_heads, d, rotary, page, width, dtype = sizes
        self.sizes, self.length, self.device, self.scale = sizes, length, device, d**-0.5

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        self.qkv = 2 * draw(1, (heads + 2 * kv_heads) * d)
        self.q_norm, self.k_norm = draw(d), draw(d)
        angles = torch.rand(width * page + 1, rotary // 2, device=device) * 6.28
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(dtype)
        blocks = width + 2
        self.tables = (torch.randperm(blocks - 1, device=device)[:width] + 1).int()[None]
        at = torch.arange(length, device=device)
        places = self.tables[0].long()[at // page] * page + at % page
        self.tables[0, -(-length // page) :] = 2**30
        self.tokens = [draw(length - 1, kv_heads, d) for _ in range(2)]
        self.caches = []
        for tokens in self.tokens:
            cache = torch.full((blocks, page, kv_heads, d + spacing), NAN, device=device).to(dtype)
            cache.flatten(0, 1)[places[:-1], :, :d] = tokens
            self.caches.append(cache[..., :d])
        self.slots = places[-1:].to(slot_dtype)
        self.positions = torch.tensor([length - 1], device=device)
        self.seq_lens = torch.tensor([length], device=device, dtype=torch.int32)

    def pad(self) -> None:
        self.qkv.fill_(NAN)
        self.slots.fill_(-1)
        self.positions.fill_(2**40)
        self.tables.fill_(2**30)

    def arguments(self, caches: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        norms = (self.q_norm, self.k_norm, self.cos_sin)
        at = (self.positions, self.slots, self.tables, self.seq_lens)
        return (self.qkv, *norms, *at, *caches)

    def run(self, tile: CudaAttend, pdl: bool = True) -> None:
        """Leaves `out` with a row too many, `partial`, `lse` and the caches as they are `after`."""
        heads, d, dtype = self.sizes.heads, self.sizes.d, self.sizes.dtype
        self.after = [copied(cache) for cache in self.caches]
        self.out = torch.full((2, heads, d), NAN, device=self.device, dtype=dtype)
        plan = cuda_attend.scratch_of(tile, self.out[:1])
        scratch = {
            name: torch.full(shape, NAN, device=self.device, dtype=kind)
            for name, (shape, kind) in plan.items()
        }
        given = (*self.arguments(self.after), self.out[:1], EPS, self.scale)
        cuda_attend.attend(*given, **scratch, tile=tile, pdl=pdl)
        none = torch.full((1, heads, 0), NAN, device=self.device)
        self.partial, self.lse = scratch.get("partial", none), scratch.get("lse", none)

    def by_triton(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`out`, and the caches afterwards, by its own tile."""
        caches = [copied(cache) for cache in self.caches]
        out = torch.empty_like(self.out[:1])
        given = (*self.arguments(caches), out, EPS, self.scale)
        scratch = {
            name: torch.full(shape, NAN, device=self.device, dtype=kind)
            for name, (shape, kind) in triton_fused_attention.attend.scratch(*given).items()
        }
        triton_fused_attention.attend(*given, **scratch)
        return out, caches

    def turned(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(heads, D), normed and rotated in float64, rounded to the dtype where kernels round."""
        dtype, half = self.sizes.dtype, self.sizes.rotary // 2
        x = x.double()
        x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)).to(dtype).double()
        x = (x * weight.double()).to(dtype).double()
        cos, sin = self.cos_sin[self.length - 1].double().chunk(2)
        left, right, rest = x.split([half, half, self.sizes.d - 2 * half], -1)
        x = torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)
        return x.to(dtype).double()

    def check(self, tile: CudaAttend) -> None:
        heads, kv_heads, d, _, _, _, dtype = self.sizes
        q, k, v = self.qkv.view(-1, d).split([heads, kv_heads, kv_heads])
        slot = int(self.slots)
        new_key, new_value = (cache.flatten(0, 1)[slot] for cache in self.after)
        assert error(new_key, self.turned(k, self.k_norm)) < 2 * STEP[dtype]
        assert torch.equal(new_value, v)
        for before, after in zip(self.caches, self.after, strict=True):
            expected = copied(before)
            expected.flatten(0, 1)[slot] = after.flatten(0, 1)[slot]
            torch.testing.assert_close(after, expected, rtol=0, atol=0, equal_nan=True)
        keys, values = (
            torch.cat([tokens, new[None]]).double().repeat_interleave(heads // kv_heads, 1)
            for tokens, new in zip(self.tokens, (new_key, new_value), strict=True)
        )
        scores = torch.einsum("hd,thd->ht", self.turned(q, self.q_norm), keys) * self.scale
        cached = self.length - 1
        share = max(cdiv(cdiv(cached, tile.splits), tile.tokens), 1) * tile.tokens
        for part in range(0 if tile.cluster else 1 + tile.splits):
            begin, end = (cached, cached + 1) if part == 0 else ((part - 1) * share, cached)
            end = min(begin + share, end)
            partial, lse = self.partial[0, :, part], self.lse[0, :, part]
            if begin >= end:
                assert partial.isnan().all(), part
                assert lse.isnan().all(), part
                continue
            some = scores[:, begin:end]
            expected = torch.einsum("ht,thd->hd", some.softmax(-1), values[begin:end])
            assert error(partial, expected) < 2 * STEP[dtype], part
            log2 = some.logsumexp(-1) * LOG2_E
            largest = max(1.0, float(log2.abs().max()))
            assert float((lse - log2).abs().max()) < 8 * STEP[dtype] * largest, part
        expected = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
        assert error(self.out[0], expected) < 2 * STEP[dtype]
        assert self.out[1:].isnan().all()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def copied(cache: torch.Tensor) -> torch.Tensor:
    """The same with the same strides."""
    made = torch.empty_strided(cache.shape, cache.stride(), device=cache.device, dtype=cache.dtype)
    return made.copy_(cache)


SMALL = [1, 2, 16, 17, 33]
SEED = Sizes()
CASES = [
    (SEED, CudaAttend(5, 64, 4), [*SMALL, 64, 65, 66, 129, 255, 256, 257, 319, 320]),
    (SEED, CudaAttend(2, 64, 4), [1, 64, 65, 129, 130, 193, 257, 258, 320]),
    (SEED, CudaAttend(3, 128, 8), [*SMALL, 128, 129, 257, 320]),
    (SEED, CudaAttend(2, 128, 4), [1, 129, 257, 258, 320]),
    (SEED, CudaAttend(10, 32, 2), [*SMALL, 65, 319, 320]),
    (SEED, CudaAttend(3, 64, 2), [1, 65, 193, 194, 320]),
    (SEED, CudaAttend(1, 256, 8), [1, 257, 258, 320]),
    (SEED, CudaAttend(4, 16, 1), [*SMALL, 65, 66, 320]),
    (SEED._replace(width=257), CudaAttend(65, 64, 4), [1, 2049, 4095, 4096, 4100]),
    (SEED._replace(width=257), CudaAttend(33, 128, 8), [129, 4097, 4100]),
    (SEED._replace(width=257), CudaAttend(5, 64, 4), [4096, 4100]),
    (SEED._replace(d=256, rotary=64), CudaAttend(5, 64, 4), [*SMALL, 65, 257, 320]),
    (SEED._replace(d=256, rotary=256, heads=2), CudaAttend(2, 128, 8), [1, 129, 257, 320]),
    (SEED._replace(d=64, rotary=64, heads=8), CudaAttend(2, 64, 4), [*SMALL, 129, 130, 320]),
    (Sizes(8, 2, 64, 32, dtype=HALF), CudaAttend(3, 48, 1), [*SMALL, 145, 146, 320]),
    (Sizes(12, 1, 128, 112, page=10, width=32, dtype=HALF), CudaAttend(4, 32, 1), [1, 129, 320]),
    (Sizes(16, 1, 256, 96, page=7, width=46), CudaAttend(2, 32, 2), [1, 65, 66, 322]),
    (Sizes(4, 4, 128, 16, page=48, width=7), CudaAttend(2, 64, 4), [1, 129, 130, 336]),
]


def in_clusters() -> Iterator[tuple[Sizes, CudaAttend, list[int]]]:
    for sizes, tile, lengths in CASES:
        if tile.splits < cuda_attend.MOST_CLUSTER:
            yield sizes, tile._replace(cluster=1), lengths
    yield SEED, CudaAttend(7, 32, 2, 1), [*SMALL, 193, 224, 225, 226, 320]
    yield Sizes(16, 1, 128, 128), CudaAttend(7, 16, 1, 1), [1, 2, 113, 320]
    yield Sizes(9, 3, 64, 64, dtype=HALF), CudaAttend(6, 64, 4, 1), [1, 2, 113, 320]


@pytest.mark.parametrize(("sizes", "tile", "lengths"), [*CASES, *in_clusters()])
def test_parts_and_result(device, sizes: Sizes, tile: CudaAttend, lengths: list[int]) -> None:
    assert cuda_attend.why_not(sizes.d, sizes.rotary, *sizes[:2], sizes.dtype, device, tile) == ""
    for length in lengths:
        call = Call(device, sizes, length)
        call.run(tile)
        call.check(tile)


@pytest.mark.parametrize("cluster", [0, 1])
@pytest.mark.parametrize("pdl", [True, False])
def test_slots_of_32_bits_heads_apart_in_memory_and_the_same_bits_again(
    device, pdl, cluster: int
) -> None:
    tile = CudaAttend(5, 64, 4, cluster)
    for length in (1, 66, 320):
        call = Call(device, SEED, length, torch.int32, spacing=8)
        call.run(tile, pdl)
        call.check(tile)
        first = (call.out, call.partial, call.lse, *call.after)
        call.caches = call.after  # what it wrote changes nothing: it is not read
        call.run(tile, pdl)
        again = (call.out, call.partial, call.lse, *call.after)
        for one, other in zip(first, again, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_its_own_tile_takes_the_scratch_that_it_asks_for(device) -> None:
    for sizes in (SEED, Sizes(8, 8, 64, 64, dtype=HALF)):
        call = Call(device, sizes, 300)
        call.run(cuda_attend.cuda_attend_tile(320, sizes.kv_heads))
        out = torch.full_like(call.out[:1], NAN)
        given = (*call.arguments([copied(each) for each in call.caches]), out, EPS, call.scale)
        plan = cuda_attend.attend.scratch(*given)
        scratch = {n: torch.full(s, NAN, device=device, dtype=t) for n, (s, t) in plan.items()}
        cuda_attend.attend(*given, **scratch)
        assert torch.equal(out, call.out[:1])


@pytest.mark.parametrize(
    "sizes",
    [SEED, SEED._replace(d=256, rotary=64), Sizes(8, 2, 64, 64, dtype=HALF), Sizes(2, 2, 128, 64)],
)
def test_triton_computes_the_same(device, sizes: Sizes) -> None:
    """Values in the cache are equal bit for bit; a key may be rounded the other way where the sum of its
    squares, which is taken in another order, puts it there."""
    differing, written = 0, 0
    for length in (1, 2, 64, 65, 130, 320):
        call = Call(device, sizes, length)
        call.run(CudaAttend(5, 64, 4))
        theirs, caches = call.by_triton()
        assert error(call.out[:1], theirs) < 2 * STEP[sizes.dtype]
        torch.testing.assert_close(call.after[1], caches[1], rtol=0, atol=0, equal_nan=True)
        slot = int(call.slots)
        ours, key = (cache.flatten(0, 1)[slot] for cache in (call.after[0], caches[0]))
        assert error(ours, key) < 4 * STEP[sizes.dtype]
        differing += int((ours != key).sum())
        written += key.numel()
    assert differing < 0.01 * written


@pytest.mark.parametrize("cluster", [0, 1])
@pytest.mark.parametrize("pdl", [True, False])
def test_padding_reads_and_writes_nothing(device, pdl, cluster: int) -> None:
    for sizes, length in ((SEED, 1), (SEED, 200), (Sizes(12, 1, page=10), 77)):
        call = Call(device, sizes, length)
        call.pad()
        call.run(CudaAttend(3, 64, 4, cluster), pdl)
        assert (call.out[0] == 0).all()
        assert call.out[1:].isnan().all()
        assert call.partial.isnan().all()
        assert call.lse.isnan().all()
        for before, after in zip(call.caches, call.after, strict=True):
            torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "tile", [CudaAttend(5, 64, 4), CudaAttend(2, 32, 2), CudaAttend(5, 64, 4, 1)]
)
def test_in_a_graph_between_its_neighbours_it_gives_the_bits_of_an_eager_run(device, tile) -> None:
    """What the kernel before writes is poisoned before each run: a load that did not wait would show."""
    call = Call(device, SEED, 320)
    hidden, (heads, kv_heads, d) = 2048, SEED[:3]
    x = torch.randn(1, hidden, device=device).to(BF16)
    norm = torch.randn(hidden, device=device).to(BF16)
    outputs = (heads + 2 * kv_heads) * d
    weight = (torch.randn(outputs, hidden, device=device) * hidden**-0.5).to(BF16)
    back = (torch.randn(hidden, heads * d, device=device) * hidden**-0.5).to(BF16)
    residual = torch.zeros(1, hidden, device=device, dtype=BF16)
    attended = torch.empty(1, heads, d, device=device, dtype=BF16)
    plan = cuda_attend.scratch_of(tile, attended)
    scratch = {n: torch.empty(s, device=device, dtype=t) for n, (s, t) in plan.items()}
    arguments = (*call.arguments(call.caches), attended, EPS, call.scale)

    def chain() -> None:
        cuda_linear.norm_qkv(x, None, norm, EPS, weight, None, call.qkv, None)
        cuda_attend.attend(*arguments, **scratch, tile=tile)
        cuda_linear.output_residual(attended.view(1, -1), back, None, residual)

    pages = call.tables[0].clone()

    def start(length: int) -> None:
        for tensor in (call.qkv, attended, *scratch.values()):
            tensor.fill_(NAN)
        residual.fill_(0)
        at = length - 1
        call.positions.fill_(at)
        call.seq_lens.fill_(length)
        call.slots.fill_(int(pages[at // SEED.page]) * SEED.page + at % SEED.page)
        for cache in call.caches:  # of this token, as it may be there from the run before
            cache.flatten(0, 1)[int(call.slots)] = NAN

    start(320)
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for length in [1, 2, 31, 32, 33, *range(63, 67), *range(127, 131), 193, 257, 319, 320]:
        x.normal_()
        found = []
        for run in (chain, graph.replay):
            start(length)
            run()
            kept = (call.qkv, attended, residual, *scratch.values(), *call.caches)
            found.append([tensor.clone() for tensor in kept])
        for eager, replayed in zip(*found, strict=True):
            torch.testing.assert_close(replayed, eager, rtol=0, atol=0, equal_nan=True)
        assert not found[0][2].isnan().any()


CONTEXT, TOKENS = 128, 100
SHAPE = replace(preset("tiny"), head_dim=64, mlp_only_layers=()).with_layers(2)
NEAR_TIE = 0.1  # of the largest logit, as in test_tune


def decoded(weights, kernels, schedule: str, tune_cache, prompt: list[int]) -> list[int]:
    decoder = Decoder(
        weights,
        kernels,
        max_batch=1,
        max_context=CONTEXT,
        ladder=BucketLadder([1]),
        settings=Settings(recorder="cuda", strict=True, tune_cache=tune_cache),
        schedule=schedule,
    )
    decoder.cache.fill_random(1)
    assert not decoder.manager.capture().failures
    decoder.cache.clear()
    plan = decoder.step.bucket_choice(1).plan
    assert plan.in_cuda == (("attend",) if schedule == "auto" else ())
    (tokens,) = decoder.decode([prompt], TOKENS).token_ids
    decoder.close()
    return tokens


@pytest.mark.parametrize("cluster", [0, 1])
@pytest.mark.parametrize("without_pdl", [frozenset(), frozenset({"attend"})])
def test_a_decoder_gives_the_tokens_of_the_plain_schedule(
    device, tmp_path, without_pdl, cluster: int
) -> None:
    """Over lengths at which a split takes one iteration, two and three, up to a near-tie."""
    weights = random_weights(SHAPE, device=device, dtype=HALF, seed=3)
    kernels = decode_kernels(choose_backend("triton", device))
    plan = LayerPlan("fused", {"attend": CudaAttend(3, 16, 1, cluster)}, without_pdl=without_pdl)
    file = plan_file(tmp_path / "none", SHAPE, HALF, device, None)
    bucket = TunedBucket(1, CONTEXT, plan, 1.5, 2.0, 1.75, 2, 4)
    file.with_buckets([bucket]).write(tmp_path / file.key.file_name)
    prompt = [5, 7, 9, 11]
    ours, theirs = (
        decoded(weights, kernels, schedule, tmp_path, prompt) for schedule in ("auto", "plain")
    )
    assert len(ours) == len(theirs) == TOKENS
    differ = [at for at in range(TOKENS) if ours[at] != theirs[at]]
    if not differ:
        return
    cache = PagedCache(SHAPE, num_sequences=1, max_context=CONTEXT, device=device, dtype=HALF)
    eager = EagerDecoder(weights, cache, kernels, schedule="plain")
    for batch in Prompts([prompt + theirs[: differ[0]]], 1, cache, SHAPE.vocab_size).batches():
        eager.load(batch)
        logits = eager.run()["logits"][0].float()
    lead = (logits.max() - logits[ours[differ[0]]]) / logits.abs().max()
    assert lead < NEAR_TIE, f"token {differ[0]}: {ours[differ[0]]} and not {theirs[differ[0]]}"
