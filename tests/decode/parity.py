"""What the parity tests share: decoders, traces of what they decode, and how they are compared.

Tolerances are relative to the largest logit of a step.

float32: the two differ in the order of their sums only, about 2e-6 where measured; 2e-5 leaves room
for another BLAS, and any error of substance is far above.

bfloat16: each rounding is up to 2^-9 = 0.2 %. Both round in the same places but for the merge of the
experts, which transformers weighs and adds in bfloat16 and graphcap in float32. Over three or four
layers that grew to 2.5 % where measured; 4 % is allowed. The models keep every choice between experts
far from a tie (asserted); where the best two *tokens* are nearly tied in transformers' own logits, the
sequence may go on differently and is compared up to there (`near_tie`; asserted to be rare).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from decoders import by_slot
from reference_models import TOKENS, VOCAB, Reference, chosen_experts, reference

from graphcap.buckets import BucketLadder
from graphcap.decode.cache import NULL_BLOCK, PagedCache
from graphcap.decode.decoder import Decoder, EagerDecoder
from graphcap.decode.kernels import decode_kernels
from graphcap.decode.prompts import Prompts
from graphcap.decode.state_cache import NULL_SLOT
from graphcap.decode.weights import ModelWeights
from graphcap.moe.kernels import Backend
from graphcap.settings import Settings

KERNELS = decode_kernels(Backend("reference", "tests"))
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
NEAR_TIE = 2e-2
"""bfloat16: a gap between the best two logits that the roundings above can close: each of the two may
deviate by more than half of it."""

LENGTHS = ((12, 1, 5, 3, 8), (1, 7), (2, 9, 4, 1, 11, 6, 3))
"""Prompts of the batches that one decoder decodes in turn."""

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def draw_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def make_decoder(weights: ModelWeights, max_batch: int = 7, sizes: Sequence[int] = (2,)) -> Decoder:
    decoder = Decoder(
        weights,
        KERNELS,
        max_batch=max_batch,
        max_context=12 + TOKENS,
        block_size=4,
        ladder=BucketLadder(sizes, max_batch),
        settings=Settings(strict=True),
    )
    assert not decoder.manager.capture().failures
    return decoder


def poison(cache: PagedCache) -> None:
    """NaN in every place that no sequence has written to: as no sequence has yet, everywhere."""
    for tensor in (*cache.keys, *cache.values):
        tensor[NULL_BLOCK + 1 :] = float("nan")
    if cache.states is not None:  # the null state of padding rows as well
        for tensor in (*cache.states.conv, *cache.states.recurrent):
            tensor.fill_(float("nan"))


def written(cache: PagedCache) -> int:
    """Cache slots without a NaN in the last layer."""
    return int((~by_slot(cache, cache.keys[-1]).isnan().any(2))[NULL_BLOCK + 1 :].sum())


def assert_null_state_untouched(cache: PagedCache) -> None:
    """Padding rows left the poison of the null state where it was."""
    if cache.states is not None:
        for tensor in (*cache.states.conv, *cache.states.recurrent):
            assert tensor[NULL_SLOT].isnan().all()


def traced(laid: Prompts, bring: Callable[[Any], Any], follow: Callable[[], Any]) -> Reference:
    """Tokens and logits of every step after the prompts, in the order of the prompts."""
    for batch in laid.batches():
        output = bring(batch)
    steps = [(output["token_ids"].clone(), output["logits"].float().clone())]
    for _ in range(TOKENS - 1):
        output = follow()
        steps.append((output["token_ids"].clone(), output["logits"].float().clone()))
    order = torch.tensor(laid.in_order([torch.arange(len(laid))]))[:, 0]
    tokens, logits = (torch.stack(parts, 1) for parts in zip(*steps, strict=True))
    return Reference(tokens[order], logits[order])


@dataclass
class Compared:
    """How much of the expected was compared, and the largest deviation."""

    dtype: torch.dtype
    tokens: int = 0
    total: int = 0
    worst: float = 0.0
    ties: list[float] = field(default_factory=list)

    def add(self, ours: Reference, expected: Reference) -> None:
        assert ours.tokens.shape == expected.tokens.shape
        for row in range(len(ours.tokens)):
            self._add_sequence(
                ours.tokens[row], ours.logits[row], expected.tokens[row], expected.logits[row]
            )

    def _add_sequence(
        self,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        expected_tokens: torch.Tensor,
        expected: torch.Tensor,
    ) -> None:
        self.total += len(tokens)
        for step in range(len(tokens)):
            size = expected[step].abs().max()
            deviation = float((logits[step] - expected[step]).abs().max() / size)
            assert deviation <= TOLERANCE[self.dtype], (step, deviation)
            self.worst = max(self.worst, deviation)
            if tokens[step] != expected_tokens[step]:
                best = expected[step].topk(2).values
                gap = float((best[0] - best[1]) / size)
                near_tie = self.dtype == torch.bfloat16 and gap <= NEAR_TIE
                assert near_tie, f"step {step}: another token, {gap:.3g} ahead"
                self.ties.append(gap)
                return  # what follows answers another text
            self.tokens += 1

    def assert_nearly_all(self) -> None:
        assert self.total > 0
        assert self.tokens >= 0.8 * self.total, (self.tokens, self.total, self.ties)


def assert_clear(
    seen: Mapping[int, tuple[list[torch.Tensor], list[torch.Tensor]]],
    expected: Reference,
    dtype: torch.dtype,
) -> None:
    """The model is one on which a wrong step would show."""
    assert seen
    for logits, ids in seen.values():
        scores = torch.cat(logits).sort(-1, descending=True).values
        chosen = torch.cat(ids)
        top_k, experts = chosen.shape[-1], scores.shape[-1]
        assert chosen.unique().numel() > experts / 2
        assert chosen.unique(dim=0).shape[0] >= experts  # not the same set for every token
        if dtype == torch.bfloat16:
            assert (scores[:, top_k - 1] - scores[:, top_k]).min() > 0.1
    distinct = [len(set(tokens)) for tokens in expected.tokens.tolist()]
    assert sum(distinct) > TOKENS / 3 * len(distinct)


def make_decoder_cache(weights: ModelWeights) -> PagedCache:
    return PagedCache(
        weights.shape,
        num_sequences=7,
        max_context=12 + TOKENS,
        block_size=4,
        device="cpu",
        dtype=weights.dtype,
        format=KERNELS.cache_format,
    )


def assert_decodes_as(theirs: Any, weights: ModelWeights) -> None:
    """Batch after batch by replay, once more, and eagerly: what `theirs`, of transformers, decodes."""
    dtype = weights.dtype
    batches = [draw_prompts(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    with chosen_experts(theirs) as seen:
        everything = reference(theirs, [prompt for batch in batches for prompt in batch])
    assert_clear(seen, everything, dtype)
    ends = torch.tensor([0, *map(len, batches)]).cumsum(0).tolist()
    expected = [
        Reference(everything.tokens[a:b], everything.logits[a:b]) for a, b in pairwise(ends)
    ]

    decoder, compared = make_decoder(weights), Compared(dtype)
    poison(decoder.cache)
    for prompts, wanted in zip(batches, expected, strict=True):
        laid = Prompts(prompts, TOKENS, decoder.cache, VOCAB)
        compared.add(traced(laid, decoder.manager.run, decoder.manager.run), wanted)
        laid.close()
    # The last token sampled is not written; later batches wrote over blocks of earlier ones.
    slots = decoder.cache.num_blocks * decoder.cache.block_size
    assert 0 < written(decoder.cache) < slots - decoder.cache.block_size
    assert_null_state_untouched(decoder.cache)

    poison(decoder.cache)
    again = decoder.decode(batches[1], TOKENS).token_ids
    eager = EagerDecoder(weights, make_decoder_cache(weights), KERNELS)
    poison(eager.cache)
    laid = Prompts(batches[1], TOKENS, eager.cache, VOCAB)

    def bring(batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        eager.load(batch)
        return eager.run()

    ours = traced(laid, bring, eager.run)
    laid.close()
    compared.add(ours, expected[1])
    assert eager.decode(batches[1], TOKENS).token_ids == ours.tokens.tolist()
    compared.add(Reference(torch.tensor(again), ours.logits), expected[1])
    compared.assert_nearly_all()


@dataclass
class Served:
    """A sequence that is being served, and what the host knows of it."""

    number: int
    prompt: list[int]
    table: torch.Tensor
    state: int = NULL_SLOT
    position: int = 0
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def next_token(self) -> int:
        known = [*self.prompt, *self.tokens]
        return known[self.position]


def serve(decoder: Decoder, prompts: list[list[int]], every: int) -> Reference:
    """Serve prompts as an engine does: one joins every so many steps or when another has left, a
    sequence leaves when it is done, and whoever joins or leaves changes the order of the rows."""
    size, generator = decoder.cache.block_size, torch.Generator().manual_seed(1)
    waiting = list(enumerate(prompts))
    running: list[Served] = []
    done: dict[int, Served] = {}
    owners: dict[int, set[int]] = {}
    state_owners: dict[int, set[int]] = {}
    states = decoder.cache.states
    empty_runs = joined = 0
    for time_step in range(1000):
        changed = False
        if waiting and time_step % every == 0 and len(running) < decoder.inputs.max_batch:
            number, prompt = waiting.pop(0)
            table = decoder.cache.allocate(len(prompt) + TOKENS)
            for block in table.tolist():
                owners.setdefault(block, set()).add(number)
            state = NULL_SLOT if states is None else states.allocate()
            state_owners.setdefault(state, set()).add(number)
            running.append(Served(number, prompt, table, state))
            changed, joined = True, joined + 1
        for sequence in [s for s in running if len(s.tokens) == TOKENS]:
            running.remove(sequence)
            decoder.cache.free(sequence.table)
            if states is not None:
                states.free(sequence.state)
            done[sequence.number] = sequence
            changed = True
        if not running and not waiting:
            break
        if not running:
            continue
        if changed:
            order = torch.randperm(len(running), generator=generator).tolist()
            running = [running[i] for i in order]
            positions = torch.tensor([s.position for s in running])
            tables = torch.stack([s.table for s in running])
            own = tables.gather(1, (positions // size)[:, None])[:, 0].long()
            batch = {
                "token_ids": torch.tensor([s.next_token for s in running], dtype=torch.int32),
                "positions": positions,
                "seq_lens": (positions + 1).int(),
                "slot_mapping": (own * size + positions % size).to(decoder.cache.format.slot_dtype),
                "block_tables": tables,
            }
            if decoder.cache.states is not None:
                batch["state_slots"] = torch.tensor([s.state for s in running])
        elif any(s.position < len(s.prompt) for s in running):
            batch = {"token_ids": torch.tensor([s.next_token for s in running], dtype=torch.int32)}
        else:
            batch = {}
            empty_runs += 1
        output = decoder.manager.run(batch)
        sampled, logits = output["token_ids"].tolist(), output["logits"].float().clone()
        for row, sequence in enumerate(running):
            sequence.position += 1
            if sequence.position >= len(sequence.prompt):
                sequence.tokens.append(sampled[row])
                sequence.logits.append(logits[row])
    assert joined == len(prompts) == len(done)
    assert empty_runs > TOKENS
    assert max(len(who) for block, who in owners.items() if block != NULL_BLOCK) > 1  # reused
    assert states is None or max(map(len, state_owners.values())) > 1
    ordered = [done[number] for number in range(len(prompts))]
    return Reference(
        torch.tensor([s.tokens for s in ordered]),
        torch.stack([torch.stack(s.logits) for s in ordered]),
    )
