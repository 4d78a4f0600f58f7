"""A whole decode step in a graph, with tiles of one's choice, and how it is timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from decode_step import DEVICE

from graphcap.decode.cache import PagedCache
from graphcap.decode.kernels import DecodeKernels, FusedLayerKernels
from graphcap.decode.kernels.triton_fused_attention import AttendTile, scratch_of
from graphcap.decode.step import DecodeStep
from graphcap.decode.weights import ModelWeights
from graphcap.operations import Operation
from graphcap.pool import BufferPool

Tiles = dict[str, Any]
"""Name of a kernel -> its tile; a name that is missing takes the default."""

HEADROOM = 64
"""Tokens that a sequence may grow between two resets of the slots."""


def median_ms(call: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
    """Median over nine turns of the mean of 20 calls; `before` is not timed."""
    times = []
    for turn in range(10):
        before()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(20):
            call()
        last.record()
        last.synchronize()
        if turn:
            times.append(first.elapsed_time(last) / 20)
    return statistics.median(times)


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def with_tiles(fused: FusedLayerKernels, tiles: Tiles) -> FusedLayerKernels:
    """The fused kernels with other tiles than the default ones."""
    changed = {}
    for name, tile in tiles.items():
        old: Operation = getattr(fused, name)
        scratch = old.scratch
        if isinstance(tile, AttendTile):

            def scratch(*args: Any, tile: AttendTile = tile) -> Any:
                return scratch_of(tile, args[10])

        changed[name] = Operation(
            old.name, old.implementation, partial(old.function, tile=tile), scratch
        )
    return replace(fused, **changed)


class Replayed:
    """A whole step in a graph: `rows` sequences that stand at `context` tokens."""

    def __init__(
        self,
        weights: ModelWeights,
        kernels: DecodeKernels,
        schedule: str,
        rows: int,
        context: int,
        tiles: Tiles | None = None,
    ) -> None:
        if tiles and kernels.fused is not None:
            kernels = replace(kernels, fused=with_tiles(kernels.fused, tiles))
        cache = PagedCache(
            weights.shape,
            num_sequences=rows,
            max_context=context + HEADROOM,
            device=DEVICE,
            dtype=weights.dtype,
        )
        cache.fill_random(1)
        generator = torch.Generator().manual_seed(rows)
        tables = torch.stack([cache.allocate(context + HEADROOM) for _ in range(rows)])
        positions = torch.full((rows,), context - 1)
        blocks = tables.gather(1, (positions // cache.block_size)[:, None])[:, 0].long()
        start = {
            "token_ids": torch.randint(
                weights.shape.vocab_size, (rows,), generator=generator
            ).int(),
            "positions": positions,
            "seq_lens": (positions + 1).int(),
            "slot_mapping": blocks * cache.block_size + positions % cache.block_size,
            "block_tables": tables,
        }
        self._start = {name: tensor.to(DEVICE) for name, tensor in start.items()}
        self._slots = {name: tensor.clone() for name, tensor in self._start.items()}
        pool = BufferPool(DEVICE)
        step = DecodeStep(weights, cache, kernels, pool, schedule=schedule)
        with torch.no_grad():
            self.logits = step(self._slots)["logits"].float().cpu()
            pool.freeze()
            self.graph = captured(lambda: step(self._slots))
        self._kept = (cache, pool, step)

    def reset(self) -> None:
        for name, tensor in self._start.items():
            self._slots[name].copy_(tensor)

    def ms(self) -> float:
        return median_ms(self.graph.replay, self.reset)
