"""The output projection that joins attention's splits: against float64, and against attention that joins them
itself; what lies where there is no split is NaN."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", minversion="3.2")

from graphcap.buckets import BucketLadder
from graphcap.cuda import source
from graphcap.decode.cache import PagedCache
from graphcap.decode.decoder import Decoder, EagerDecoder
from graphcap.decode.kernels import cuda_linear, decode_kernels
from graphcap.decode.kernels.cuda_attend import CudaAttend
from graphcap.decode.kernels.cuda_linear import CudaJoinRows, CudaRows
from graphcap.decode.kernels.triton_fused_attention import (
    AttendTile,
    attend,
    attend_parts,
    scratch_of,
)
from graphcap.decode.plan_files import TunedBucket
from graphcap.decode.prompts import Prompts
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.moe.kernels import choose_backend
from graphcap.settings import Settings

BF16, HALF = torch.bfloat16, torch.float16
NAN = float("nan")
EPS, PAGE = 1e-6, 16
STEP = {BF16: 2.0**-8, HALF: 2.0**-11}
"""Of a rounding, relative to the value."""


@pytest.fixture(autouse=True)
def _compiles(device: torch.device) -> None:
    why = source.obstacle(device)
    if why:
        pytest.skip(why)
    torch.manual_seed(torch.initial_seed() % 2**31)


class Case(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    outputs: int
    dtype: torch.dtype
    attend: AttendTile
    rows: int
    bias: bool = False
    pdl: bool = True
    slot: torch.dtype = torch.int64


CASES = [
    Case(16, 2, 128, 2048, BF16, AttendTile(5, 64, 8), 16),
    Case(16, 2, 128, 2048, BF16, AttendTile(8, 32, 4), 8, pdl=False),
    Case(32, 4, 128, 2048, HALF, AttendTile(3, 64, 4), 16, bias=True, slot=torch.int32),
    Case(8, 1, 64, 777, BF16, AttendTile(1, 16, 1), 5, bias=True, slot=torch.int32),
    Case(4, 4, 64, 129, HALF, AttendTile(8, 16, 4), 20),
    Case(16, 2, 256, 1030, BF16, AttendTile(8, 16, 4), 20, bias=True),
    Case(8, 2, 256, 2048, HALF, AttendTile(4, 32, 8), 10),
]


class Token:
    """One token's attention and output projection, both ways, over tensors that are refilled in place."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        heads, kv_heads, dim, outputs, dtype, tile = case[:6]
        # All splits full, and the next token of each: a second iteration.
        self.longest = tile.splits * tile.tokens + 2 * tile.tokens + 2
        blocks = -(-self.longest // PAGE)
        self.capacity = blocks * PAGE

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        angles = torch.rand(self.capacity, dim // 2, device=device) * 6.28
        self.positions = torch.zeros(1, dtype=torch.int64, device=device)
        self.slots = torch.zeros(1, dtype=case.slot, device=device)
        self.lengths = torch.ones(1, dtype=torch.int32, device=device)
        self.tables = (torch.randperm(blocks, device=device) + 1).int()[None]
        self.caches = [draw(blocks + 1, PAGE, kv_heads, dim) for _ in range(2)]
        self.qkv = draw(1, (heads + 2 * kv_heads) * dim)
        norms = [draw(dim), draw(dim)]
        table = torch.cat([angles.cos(), angles.sin()], 1).to(dtype)
        where = (self.positions, self.slots, self.tables, self.lengths)
        self.given = (self.qkv, *norms, table, *where, *self.caches)
        self.weight = (torch.randn(outputs, heads * dim, device=device) * 0.05).to(dtype)
        self.bias = draw(outputs) if case.bias else None
        self.residual, self.theirs = draw(1, outputs), draw(1, outputs)
        self.attended = torch.empty(1, heads, dim, dtype=dtype, device=device)
        self.parts, self.scratch = (
            {
                name: torch.full(shape, NAN, dtype=kind, device=device)
                for name, (shape, kind) in scratch_of(tile, self.attended).items()
            }
            for _ in range(2)
        )

    def fill(self, length: int, *, pad: bool = False) -> None:
        """A new token at the end of `length`; what was written before becomes NaN."""
        self.positions.fill_(min(length, self.capacity) - 1)
        self.lengths.fill_(length)
        last = min(length, self.capacity) - 1
        slot = self.tables[0, last // PAGE] * PAGE + last % PAGE
        self.slots.copy_(torch.full_like(slot, -1) if pad else slot)
        self.qkv.normal_().mul_(2)
        self.residual.normal_()
        self.theirs.copy_(self.residual)
        for buffer in (*self.parts.values(), *self.scratch.values(), self.attended):
            buffer.fill_(NAN)

    def joined(self) -> None:
        tile, scale = self.case.attend, self.case.dim**-0.5
        parts = (self.parts["partial"], self.parts["lse"])
        attend_parts(*self.given, *parts, EPS, scale, tile=tile, pdl=self.case.pdl)
        cuda_linear.output_residual_joined(
            *parts,
            self.slots,
            self.lengths,
            self.capacity,
            self.weight,
            self.bias,
            self.residual,
            tile.tokens,
            CudaJoinRows(self.case.rows),
            self.case.pdl,
        )

    def apart(self) -> None:
        tile, scale = self.case.attend, self.case.dim**-0.5
        attend(*self.given, self.attended, EPS, scale, **self.scratch, tile=tile)
        cuda_linear.output_residual(
            self.attended.view(1, -1),
            self.weight,
            self.bias,
            self.theirs,
            CudaRows(self.case.rows),
        )

    def expected(self, before: torch.Tensor, length: int) -> torch.Tensor:
        """residual (1, outputs) in float64, from the parts; rounded as `output_residual` says."""
        splits, tokens = self.case.attend[:2]
        cached = min(length, self.capacity) - 1
        share = max(1, math.ceil(cached / splits / tokens)) * tokens
        there = 1 + math.ceil(cached / share)
        lse = self.parts["lse"][0, :, :there].double()
        values = self.parts["partial"][0, :, :there].double()
        assert lse.isfinite().all()
        assert values.isfinite().all()
        assert self.parts["lse"][0, :, there:].isnan().all()
        assert self.parts["partial"][0, :, there:].isnan().all()
        shares = torch.softmax(lse * math.log(2.0), 1)
        x = torch.einsum("hs,hsd->hd", shares, values).to(self.case.dtype).double()
        product = self.weight.double() @ x.flatten()
        if self.bias is not None:
            product = product + self.bias.double()
        return product.to(self.case.dtype).double()[None] + before.double()


def error(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The largest difference, as a share of the largest value."""
    return (found.double() - expected.double()).abs().max() / expected.double().abs().max()


@pytest.mark.parametrize("case", CASES)
def test_every_length(device: torch.device, case: Case) -> None:
    """From a token alone to more than all splits hold at first; one of the seven beyond the table."""
    token = Token(case, device)
    worst = torch.zeros(3, device=device, dtype=torch.float64)
    lengths = [*range(1, token.longest + 1), token.capacity, token.capacity + 3]
    for length in lengths:
        token.fill(length)
        before = token.residual.clone()
        token.joined()
        token.apart()
        errors = [error(token.residual, token.theirs)]
        errors.append(error(token.residual, token.expected(before, length)))
        errors.append((token.residual != token.theirs).double().mean())
        # A NaN is the larger one.
        worst = torch.maximum(worst, torch.stack(errors))
    # The same sums, of values joined in another order: one that is rounded the other way moves few outputs,
    # and each by one rounding of the product and one of the sum.
    assert worst[0] < 4 * STEP[case.dtype]
    assert worst[1] < 4 * STEP[case.dtype]
    assert worst[2] < 0.25
    for name, ours in token.parts.items():  # what attend leaves, whoever joins it
        theirs = token.scratch[name]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_again_and_nothing_for_padding(device: torch.device, case: Case) -> None:
    token = Token(case, device)
    token.fill(token.longest // 2)
    before = token.residual.clone()
    token.joined()
    first = token.residual.clone()
    assert not torch.equal(first, before)
    for _ in range(10):
        token.residual.copy_(before)
        token.joined()
        assert torch.equal(token.residual, first)

    token.fill(1, pad=True)
    token.qkv.fill_(NAN)
    before = token.residual.clone()
    token.joined()
    expected = before if token.bias is None else before + token.bias
    assert torch.equal(token.residual, expected)
    assert token.parts["partial"].isnan().all()


@pytest.mark.parametrize("case", CASES[:3])
def test_in_a_graph_with_new_inputs(device: torch.device, case: Case) -> None:
    """A chain of them, as layers are: each reads the residual that the one before has written."""
    token = Token(case, device)
    layers = 4

    def run() -> None:
        for _ in range(layers):
            token.joined()

    token.fill(3)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for length in (1, 2, 40, token.longest, token.longest // 2, 17):
        for pad in (False, True):
            token.fill(length, pad=pad)
            before = token.residual.clone()
            torch.cuda.synchronize()
            run()
            eager = token.residual.clone()
            for buffer in token.parts.values():
                buffer.fill_(NAN)
            token.residual.copy_(before)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(token.residual, eager)
            assert token.residual.isfinite().all()


# -- a whole step --------------------------------------------------------------------------------

CONTEXT = 256
PROMPT, NEW = 90, 60  # crosses the border between splits
NEAR_TIE = 0.1  # of the largest logit: what the tuner itself takes for another order of sums


def joined_plan(weights):
    from graphcap.decode.cuda_kernels import cuda_plan
    from graphcap.tuning.space import starts

    cuda = cuda_plan(weights.shape, weights.dtype, weights.device)
    assert cuda is not None
    plan = starts(1, cuda)[-1]
    assert plan.joins
    return plan


def test_a_joined_step_gives_the_logits_of_the_plain_schedule(device: torch.device) -> None:
    from graphcap.tuning.space import knobs
    from graphcap.tuning.trials import Trials

    shape = replace(preset("seed-64").with_layers(2), vocab_size=1024)
    weights = random_weights(shape, device=device, dtype=BF16, seed=7)
    plan = joined_plan(weights)
    trials = Trials(weights, decode_kernels(choose_backend("triton", device)), 1, CONTEXT)
    assert trials.run(plan, turns=1, calls=4).difference < 0.05
    with torch.no_grad():
        first = trials.first_logits(plan).clone()
        assert torch.equal(first, trials.first_logits(plan))
        unjoined = trials.first_logits(
            plan.with_tile("output_residual", CudaRows(plan.tiles["output_residual"].rows))
        )
        assert error(first, unjoined) < 0.05
    changes = dict(knobs(plan, shape, 1, CONTEXT, trials.cuda))["joined"]
    for change in changes[::4]:
        assert change(plan).joins
        assert trials.run(change(plan), turns=1, calls=2).difference < 0.05


def plain_logits(weights, kernels, tokens: list[int]) -> torch.Tensor:
    """Of the token after `tokens`, by the plain schedule."""
    cache = PagedCache(
        weights.shape,
        num_sequences=1,
        max_context=CONTEXT,
        device=weights.device,
        dtype=weights.dtype,
    )
    eager = EagerDecoder(weights, cache, kernels, schedule="plain")
    for batch in Prompts([tokens], 1, cache, weights.shape.vocab_size).batches():
        eager.load(batch)
        logits = eager.run()["logits"]
    return logits[0].float()


@pytest.mark.parametrize(
    ("tile", "kernel", "implementation"),
    [
        (AttendTile(5, 64, 8), "_attend_kernel", "triton: fused_attention, not joined"),
        (CudaAttend(5, 64, 4), "attend", "cuda: attend"),
    ],
)
def test_a_decoder_by_a_joined_plan_decodes_the_same_tokens(
    device: torch.device, tmp_path, tile, kernel: str, implementation: str
) -> None:
    from graphcap.tuning.tune import plan_file

    shape = replace(preset("seed-64").with_layers(2), vocab_size=1024)
    weights = random_weights(shape, device=device, dtype=HALF, seed=3)
    kernels = decode_kernels(choose_backend("triton", device))
    plan = joined_plan(weights).with_tile("attend", tile)
    file = plan_file(tmp_path / "none", shape, HALF, device, None)
    file.with_buckets([TunedBucket(1, CONTEXT, plan, 1.5, 2.0, 1.75, 2, 9)]).write(
        tmp_path / file.key.file_name
    )
    prompt = torch.randint(1024, (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    tokens, nodes = {}, {}
    for schedule in ("auto", "plain"):
        decoder = Decoder(
            weights,
            kernels,
            max_batch=1,
            max_context=CONTEXT,
            ladder=BucketLadder([1]),
            settings=Settings(recorder="cuda", strict=True, tune_cache=tmp_path),
            schedule=schedule,
        )
        decoder.cache.fill_random(1)
        assert not decoder.manager.capture().failures
        decoder.cache.clear()
        if schedule == "auto":
            choice = decoder.step.bucket_choice(1)
            assert (choice.source, choice.plan) == ("cache", plan)
            assert choice.plan.joins
            census = decoder.manager.recording(1).census()
            nodes = {row.operation: (row.implementation, row.nodes) for row in census.rows}
            names = {kernel.name for kernel in census.kernels}
            assert kernel in names
            assert "_attend_join_kernel" not in names
        tokens[schedule] = decoder.decode([prompt], NEW).token_ids[0]
        decoder.close()
    assert nodes["attend"] == (implementation, 2)
    assert nodes["output_residual"] == ("cuda: joined linear", 2)
    ours, theirs = tokens["auto"], tokens["plain"]
    assert len(ours) == len(theirs) == NEW
    differ = [at for at in range(NEW) if ours[at] != theirs[at]]
    if differ:  # from the first on they are other sequences
        at = differ[0]
        logits = plain_logits(weights, kernels, prompt + theirs[:at])
        lead = (logits.max() - logits[ours[at]]) / logits.abs().max()
        assert lead < NEAR_TIE, f"token {at}: {ours[at]} and not {theirs[at]}"
