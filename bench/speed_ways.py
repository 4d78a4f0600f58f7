"""The ways to run a decode step that bench/speed.py holds side by side, and how they are timed.

All ways of one load begin at the same tokens, positions and keys, so that they do the same work.
"""

from __future__ import annotations

import gc
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from plain_torch import PlainStep

from graphcap.decode.cache import PagedCache
from graphcap.decode.decoder import Decoder, EagerDecoder
from graphcap.decode.kernels import DecodeKernels
from graphcap.decode.weights import ModelWeights

HEADROOM = 96
"""Tokens that a sequence may grow from where a load begins."""


@dataclass
class Way:
    """One way to run the step.

    Attributes:
        start: puts the step at its beginning and runs one token, which is not timed.
        step: the next token.
        timed: tokens that are timed in one turn.
        facts: what is known of it besides its times.
    """

    name: str
    start: Callable[[], object]
    step: Callable[[], object]
    timed: int
    facts: dict[str, Any] = field(default_factory=dict)


class Load:
    """`rows` sequences that stand at `context` tokens, in blocks of a cache filled with random keys.

    Attributes:
        batch: the slots of the next step, on the host; of the `context` tokens it is the last.
    """

    def __init__(self, cache: PagedCache, vocab_size: int, rows: int, context: int) -> None:
        generator = torch.Generator().manual_seed(rows)
        self.cache, self.rows, self.context = cache, rows, context
        tables = torch.stack([cache.allocate(context + HEADROOM) for _ in range(rows)])
        positions = torch.full((rows,), context - 1)
        blocks = tables.gather(1, (positions // cache.block_size)[:, None])[:, 0].long()
        slots = blocks * cache.block_size + positions % cache.block_size
        self.batch = {
            "token_ids": torch.randint(vocab_size, (rows,), generator=generator).int(),
            "positions": positions,
            "seq_lens": (positions + 1).int(),
            "slot_mapping": slots.to(cache.format.slot_dtype),
            "block_tables": tables,
        }
        if cache.states is not None:
            self.batch["state_slots"] = torch.tensor([cache.states.allocate() for _ in tables])

    def copy_to(self, plain: PlainStep) -> None:
        """Keys, values and states of the sequences, into the caches of plain torch."""
        tables = self.batch["block_tables"].to(plain.token_ids.device).long()
        attention = (layer.state for layer in plain.layers if layer.state[0].dim() == 4)
        for source, (keys, values) in zip(self.pairs(), attention, strict=True):
            for paged, flat in zip(source, (keys, values), strict=True):
                tokens = paged[tables].flatten(1, 2)[:, : flat.shape[1]]
                flat[:, : tokens.shape[1]].copy_(tokens)
        if self.cache.states is not None:
            slots = self.batch["state_slots"].to(plain.token_ids.device)
            states = self.cache.states
            nets = (layer.state for layer in plain.layers if layer.state[0].dim() == 3)
            for conv, recurrent, own in zip(states.conv, states.recurrent, nets, strict=True):
                own[0].copy_(conv[slots])
                own[1].copy_(recurrent[slots])

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self.cache.keys, self.cache.values, strict=True)

    def put(self, plain: PlainStep) -> None:
        """`plain` at the beginning."""
        plain.token_ids.copy_(self.batch["token_ids"])
        plain.positions.copy_(self.batch["positions"])

    def close(self) -> None:
        for table in self.batch["block_tables"]:
            self.cache.free(table)
        if self.cache.states is not None:
            for slot in self.batch["state_slots"].tolist():
                self.cache.states.free(slot)


def graphcap_way(name: str, decoder: Decoder, load: Load, schedule: str) -> Way:
    (bucket,) = (b for b in decoder.manager.report.buckets if b.size == load.rows)
    facts = {
        "schedule": schedule,
        "choice": bucket.choice,
        "nodes": bucket.nodes,
        "graph_mib": bucket.nbytes / 2**20,
        "capture_ms": bucket.capture_ms,
    }
    run = decoder.manager.run
    return Way(name, lambda: run(load.batch), run, 5, facts)


def eager_way(weights: ModelWeights, kernels: DecodeKernels, load: Load) -> Way:
    """graphcap's own step, run from Python, in the same cache."""
    eager = EagerDecoder(weights, load.cache, kernels, schedule="plain")

    def start() -> None:
        eager.load(load.batch)
        eager.run()

    return Way("eager", start, eager.run, 2)


def plain_way(
    weights: ModelWeights, load: Load, experts: str, device: torch.device
) -> tuple[Way, PlainStep]:
    """Plain torch in a CUDA graph; on a CPU eagerly."""
    plain = PlainStep(weights, load.rows, load.context + HEADROOM, experts=experts)
    load.copy_to(plain)
    load.put(plain)
    replay, facts = recorded(plain, device)

    def start() -> None:
        load.put(plain)
        replay()

    return Way("torch graph", start, replay, 5, {"experts": experts, **facts}), plain


def recorded(
    step: Callable[[], object], device: torch.device
) -> tuple[Callable[[], object], dict[str, Any]]:
    """(a call that replays `step`, what recording it took)"""
    if device.type != "cuda":
        return step, {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    free = _free_bytes()
    began = time.perf_counter()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    took = (time.perf_counter() - began) * 1e3
    return graph.replay, {"graph_mib": (free - _free_bytes()) / 2**20, "capture_ms": took}


def _free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


class OutOfTimeError(BaseException):
    """Not an Exception: a compiler that tries something else on every Exception must not catch it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises `OutOfTimeError` in the body after so long. Main thread only."""

    def ring(*_: object) -> None:
        raise OutOfTimeError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def compiled_way(plain: PlainStep, load: Load, unit: str, seconds: float) -> Way:
    """The same plain torch by torch.compile(mode="reduce-overhead"): the whole step as one function, or
    the layer as one that all layers share.

    Raises:
        OutOfTimeError: it is not compiled after so many seconds.
        Exception: whatever the compiler raises.
    """
    import torch._dynamo as dynamo

    cuda = plain.token_ids.is_cuda
    skips = dynamo.utils.counters["inductor"]["cudagraph_skips"]
    # Otherwise weights and caches would be copied into the graph's own buffers for every token.
    for tensor in (*plain.own(), *(tensor for _, tensor in plain.weights.named_tensors())):
        dynamo.mark_static_address(tensor, guard=False)
    options: dict[str, Any] = {"mode": "reduce-overhead"} if cuda else {"backend": "eager"}
    compiled = torch.compile(
        PlainStep.__call__ if unit == "step" else _layer_call,
        fullgraph=True,
        dynamic=False,
        **options,
    )
    whole: Callable[[], object] = lambda: compiled(plain)  # noqa: E731
    if unit == "layer":
        layers = plain.layers
        plain.layers = [_Compiled(compiled, layer) for layer in layers]  # type: ignore[misc]
        whole = plain

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        whole()

    free = _free_bytes() if cuda else 0
    began = time.perf_counter()
    try:
        with at_most(seconds):
            for _ in range(3):  # compiled, then run once, then recorded
                load.put(plain)
                step()
            if cuda:
                torch.cuda.synchronize()
    except BaseException:
        if unit == "layer":
            plain.layers = layers
        raise
    facts: dict[str, Any] = {"unit": unit, "compile_s": time.perf_counter() - began}
    facts["capture_ms"] = facts["compile_s"] * 1e3
    if cuda:
        facts["graph_mib"] = (free - _free_bytes()) / 2**20
        skipped = dynamo.utils.counters["inductor"]["cudagraph_skips"] - skips
        facts["graphs_skipped"] = skipped

    def start() -> None:
        load.put(plain)
        step()

    return Way("torch.compile", start, step, 5, facts)


def _layer_call(layer: Any, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    return layer(*args)


class _Compiled:
    """Stands in for a layer."""

    def __init__(self, compiled: Callable[..., Any], layer: Any) -> None:
        self.compiled, self.layer = compiled, layer
        self.state = layer.state

    def __call__(self, *args: torch.Tensor) -> Any:
        return self.compiled(self.layer, *args)


def in_turn(ways: Sequence[Way], device: torch.device, turns: int) -> Mapping[str, list[float]]:
    """Milliseconds of single tokens by way, the ways by turns, so that all share the card's pace."""
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(turns):
        for way in ways:
            times[way.name] += _turn(way, device)
    return times


def _turn(way: Way, device: torch.device) -> list[float]:
    way.start()
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(way.timed):
            way.step()
            marks.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(way.timed + 1)]
    events[0].record()
    for event in events[1:]:
        way.step()
        event.record()
    events[-1].synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def read_bandwidth(device: torch.device, nbytes: int = 1 << 32) -> float:
    """TB/s at which a large sum reads memory: what no step can read faster than."""
    numbers = torch.ones(nbytes // 4, device=device)
    out = torch.empty((), device=device)
    way = Way("sum", lambda: None, lambda: torch.sum(numbers, 0, out=out), 21)
    return numbers.nbytes / statistics.median(_turn(way, device)[1:]) / 1e9
