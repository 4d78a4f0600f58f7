"""Decoder: greedy decoding of a batch of prompts, by replay or eagerly, over one set of weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from graphcap.buckets import BucketLadder
from graphcap.decode.cache import PagedCache
from graphcap.decode.examples import example_batches
from graphcap.decode.kernels import DecodeKernels
from graphcap.decode.prompts import Batch, Prompts
from graphcap.decode.step import DecodeStep, decode_slots
from graphcap.decode.weights import ModelWeights
from graphcap.inputs import NUM_ROWS, StaticInputs
from graphcap.manager import CaptureManager
from graphcap.moe.ranges import Ranges, nvtx_ranges
from graphcap.pool import BufferPool
from graphcap.ring import Ring, Stop
from graphcap.settings import Settings
from graphcap.written import Place


@dataclass(frozen=True)
class Decoded:
    """What was decoded, in the order of the prompts.

    Attributes:
        token_ids: for each prompt the tokens that follow it, end-of-sequence included where there is one.
        seconds_per_token: of the tokens after the first, device work included; None for one token.
            The median on a CPU, the mean on a device, where tokens overlap with the host.
    """

    token_ids: list[list[int]]
    seconds_per_token: float | None


class EagerDecoder:
    """Decodes by running the step's Python for every token, one allocation per intermediate.

    This is the lean eager baseline: nothing of an engine around it, the same kernels as the replay.
    """

    def __init__(
        self,
        weights: ModelWeights,
        cache: PagedCache,
        kernels: DecodeKernels,
        ranges: Ranges | None = None,
        schedule: str = "auto",
        tune_cache: Path | None = None,
    ) -> None:
        self.pool = BufferPool(weights.device)
        self.step = DecodeStep(
            weights, cache, kernels, self.pool, ranges, schedule, tune_cache=tune_cache
        )
        self.cache = cache
        self.slots: dict[str, torch.Tensor] = {}

    def load(self, batch: Batch) -> None:
        device = self.step.weights.device
        self.slots = {name: tensor.to(device, copy=True) for name, tensor in batch.items()}
        rows = batch["token_ids"].shape[0]
        self.slots[NUM_ROWS] = torch.tensor([rows], dtype=torch.int32, device=device)

    def run(self) -> Mapping[str, torch.Tensor]:
        """One step on the slots as they are; advances them."""
        with torch.no_grad(), self.pool.outside():
            return self.step(self.slots)

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> Decoded:
        laid = Prompts(prompts, tokens, self.cache, self.step.weights.shape.vocab_size)
        try:
            for batch in laid.batches():
                self.load(batch)
                first = self.run()["token_ids"]
            return _follow(laid, first, tokens, lambda count: self.run()["token_ids"][None])
        finally:
            laid.close()


class Decoder:
    """Decodes by replay: one launch a token, or a call for several.

    Owns a cache, the slots, the pool and a `CaptureManager`; the weights are shared. Call `capture`
    before `decode`.

    Args:
        weights: the model.
        kernels: the kernel backend.
        max_batch: sequences of the largest batch.
        max_context: tokens of the longest sequence, prompt and new tokens together.
        num_sequences: sequences that the cache holds; None: `max_batch`. More than that decode
            eagerly.
        ladder: None: what `settings.buckets` says.
        settings: None: read from the environment.
        schedule: how layers run, see `DecodeStep`.
        tokens_per_launch: tokens that one call of the manager decodes; see `CaptureManager.run_many`.
        eos: token ids that end a sequence; what would follow is left out. Where several tokens come by
            one call, decoding stops with the call in which the last sequence ends.

    Raises:
        InputError: `tokens_per_launch` is below 1.
    """

    def __init__(
        self,
        weights: ModelWeights,
        kernels: DecodeKernels,
        *,
        max_batch: int,
        max_context: int,
        num_sequences: int | None = None,
        block_size: int = 16,
        ladder: BucketLadder | None = None,
        settings: Settings | None = None,
        schedule: str = "auto",
        tokens_per_launch: int = 1,
        eos: Sequence[int] = (),
    ) -> None:
        self.tokens_per_launch = tokens_per_launch
        self.eos = tuple(eos)
        stop = Stop("token_ids", self.eos) if eos else None
        kept = {"token_ids": ((), torch.int32)}
        ring = None if tokens_per_launch == 1 else Ring(tokens_per_launch, kept, stop)
        self.weights = weights
        self.cache = PagedCache(
            weights.shape,
            num_sequences=num_sequences or max_batch,
            max_context=max_context,
            block_size=block_size,
            device=weights.device,
            dtype=weights.dtype,
            format=kernels.cache_format,
        )
        self.pool = BufferPool(weights.device)
        settings = Settings.from_env() if settings is None else settings
        self.step = DecodeStep(
            weights,
            self.cache,
            kernels,
            self.pool,
            nvtx_ranges(settings),
            schedule,
            tune_cache=settings.tune_cache,
        )
        self.inputs = StaticInputs(
            max_batch,
            decode_slots(
                self.cache.blocks_per_sequence,
                self.cache.format.slot_dtype,
                states=self.cache.states is not None,
            ),
            weights.device,
        )
        self.manager = CaptureManager(
            self.step,
            self.inputs,
            pool=self.pool,
            ladder=ladder,
            settings=settings,
            example=example_batches(self.cache, weights.shape.vocab_size),
            ring=ring,
            written=self._written,
            # Unlike a key or a value, a recurrent state changes again when it is written again.
            state=() if self.cache.states is None else self.cache.states.tensors,
        )

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> Decoded:
        """Greedy decoding.

        Raises:
            InputError: a prompt is empty, outside the vocabulary or too long for the cache.
        """
        laid = Prompts(prompts, tokens, self.cache, self.weights.shape.vocab_size)
        try:
            *before, last = laid.batches()
            for batch in before:
                self.manager.run(batch)
            if self.tokens_per_launch > 1:
                many = self.manager.run_many(1, last)
                return _follow(
                    laid,
                    many.outputs["token_ids"][0],
                    tokens,
                    lambda count: self.manager.run_many(count).outputs["token_ids"],
                    self.tokens_per_launch,
                    self.eos,
                    many.live,
                )
            first = self.manager.run(last)["token_ids"]
            advance = lambda count: self.manager.run()["token_ids"][None]  # noqa: E731
            return _follow(laid, first, tokens, advance, eos=self.eos)
        finally:
            laid.close()

    def _written(self, slots: Batch) -> list[Place]:
        """The cache blocks that the rows of a step write."""
        cache = self.cache
        blocks = slots["slot_mapping"].long() // cache.block_size
        index = torch.unique(blocks.clamp(0, cache.num_blocks - 1))
        return [
            Place(f"{what} of attention layer {layer}", tensor, index)
            for what, tensors in (("keys", cache.keys), ("values", cache.values))
            for layer, tensor in enumerate(tensors)
        ]

    def close(self) -> None:
        self.manager.close()


def _follow(
    laid: Prompts,
    first: torch.Tensor,
    tokens: int,
    advance: Callable[[int], torch.Tensor],
    at_once: int = 1,
    eos: tuple[int, ...] = (),
    live: torch.Tensor | None = None,
) -> Decoded:
    """The tokens after the first.

    Args:
        advance: the next so many tokens of all rows, at most `at_once`.
        live: the rows that have not ended, as of now whenever it is read; None: not known.
    """
    sampled = torch.empty(tokens, len(laid), dtype=torch.int32, device=first.device)
    sampled[0].copy_(first)
    _wait(first.device)
    done, times = 1, [time.perf_counter()]
    per_token: list[float] = []
    while done < tokens and (live is None or bool(live.any())):
        count = min(at_once, tokens - done)
        sampled[done : done + count].copy_(advance(count))
        times.append(time.perf_counter())
        per_token.append((times[-1] - times[-2]) / count)
        done += count
    _wait(first.device)
    elapsed = time.perf_counter() - times[0]
    token_ids = [_ended(ids, eos) for ids in laid.in_order(list(sampled[:done].cpu()))]
    if done == 1:
        return Decoded(token_ids, None)
    if first.device.type == "cpu":
        return Decoded(token_ids, statistics.median(per_token))
    return Decoded(token_ids, elapsed / (done - 1))


def _ended(token_ids: list[int], eos: tuple[int, ...]) -> list[int]:
    """Up to the first end-of-sequence."""
    ends = [index for index, token in enumerate(token_ids) if token in eos]
    return token_ids[: ends[0] + 1] if ends else token_ids


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
