"""Whole decode steps of one bucket in graphs, by plan after plan, and how they are timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from graphcap.decode.cache import PagedCache
from graphcap.decode.cuda_kernels import cuda_plan
from graphcap.decode.kernels import DecodeKernels
from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.step import DecodeStep
from graphcap.decode.weights import ModelWeights
from graphcap.pool import BufferPool
from graphcap.tuning.space import HEADROOM


class Trial(NamedTuple):
    """Milliseconds of a step, and the largest difference of its logits to those of the plain schedule as a
    share of the largest logit."""

    ms: float
    difference: float


def shortened(weights: ModelWeights, layers: int) -> ModelWeights:
    """The first `layers` layers of a model, the same tensors: a step that is as fast per layer, if what
    it reads is far more than the caches hold."""
    layers = min(layers, len(weights.layers))
    return replace(weights, shape=weights.shape.with_layers(layers), layers=weights.layers[:layers])


def median_ms(
    call: Callable[[], Any],
    before: Callable[[], Any] = lambda: None,
    turns: int = 5,
    calls: int = 8,
) -> float:
    """Median over `turns`, after one that is not counted, of the mean of `calls`; `before` is not timed."""
    times = []
    for turn in range(turns + 1):
        before()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(calls):
            call()
        last.record()
        last.synchronize()
        if turn:
            times.append(first.elapsed_time(last) / calls)
    return statistics.median(times)


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


class Trials:
    """Steps of `rows` sequences that stand at `context` tokens, all from the same start.

    Attributes:
        known: plans that were found before, to begin with.
    """

    known: tuple[LayerPlan, ...] = ()

    def __init__(
        self, weights: ModelWeights, kernels: DecodeKernels, rows: int, context: int
    ) -> None:
        self.weights, self.kernels = weights, kernels
        self.rows, self.context = rows, context
        self.cuda = cuda_plan(weights.shape, weights.dtype, weights.device, context + HEADROOM)
        device = weights.device
        self._cache = PagedCache(
            weights.shape,
            num_sequences=rows,
            max_context=context + HEADROOM,
            device=device,
            dtype=weights.dtype,
        )
        self._cache.fill_random(1)
        generator = torch.Generator().manual_seed(rows)
        tables = torch.stack([self._cache.allocate(context + HEADROOM) for _ in range(rows)])
        positions = torch.full((rows,), context - 1)
        size = self._cache.block_size
        blocks = tables.gather(1, (positions // size)[:, None])[:, 0].long()
        vocabulary = weights.shape.vocab_size
        start = {
            "token_ids": torch.randint(vocabulary, (rows,), generator=generator).int(),
            "positions": positions,
            "seq_lens": (positions + 1).int(),
            "slot_mapping": blocks * size + positions % size,
            "block_tables": tables,
        }
        self._start = {name: tensor.to(device) for name, tensor in start.items()}
        self._slots = {name: tensor.clone() for name, tensor in self._start.items()}
        self._expected: torch.Tensor | None = None

    def reset(self) -> None:
        for name, tensor in self._start.items():
            self._slots[name].copy_(tensor)

    def step(self, plan: LayerPlan) -> tuple[BufferPool, Callable[[], torch.Tensor]]:
        """A step by `plan` on a pool of its own, and what it needs to stay alive."""
        pool = BufferPool(self.weights.device)
        plain = plan.layers == "plain"
        step = DecodeStep(
            self.weights,
            self._cache,
            self.kernels,
            pool,
            schedule="plain" if plain else "fused",
            plans=None if plain else lambda _: plan,
        )
        return pool, lambda: step(self._slots)["logits"]

    def first_logits(self, plan: LayerPlan) -> torch.Tensor:
        """Of one eager step; compiles what is not compiled."""
        with torch.no_grad():
            self.reset()
            return self.step(plan)[1]().float()

    def run(self, plan: LayerPlan, turns: int = 5, calls: int = 8) -> Trial:
        with torch.no_grad():
            if self._expected is None:
                self._expected = self.first_logits(LayerPlan("plain"))
            self.reset()
            pool, step = self.step(plan)
            logits = step().float()
            largest = self._expected.abs().max()
            difference = float((logits - self._expected).abs().max() / largest)
            pool.freeze()
            graph = captured(step)
        return Trial(median_ms(graph.replay, self.reset, turns, calls), difference)

    def distinct_experts(self) -> float:
        """Experts of a layer that the first step by the plain schedule chooses, the mean over layers: a
        step must read the weights of so many."""
        seen: list[int] = []
        experts = self.kernels.experts
        original = experts.topk_softmax

        def note(logits: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            original.function(logits, *args, **kwargs)
            seen.append(int((args[2].unique() >= 0).sum()))

        noted = type(original)(original.name, original.implementation, note, original.scratch)
        kernels = replace(self.kernels, experts=replace(experts, topk_softmax=noted, pairs=None))
        pool = BufferPool(self.weights.device)
        step = DecodeStep(self.weights, self._cache, kernels, pool, schedule="plain")
        self.reset()
        with torch.no_grad():
            step(self._slots)
        return statistics.fmean(seen)
