"""Attention of one decode step in graphcap and in vLLM, side by side in one run.

    python bench/attention.py --out bench/results/attention_seed-64_h200.json

From the output of the qkv projection to the input of the output projection: in graphcap the operation
`attend` (norms, RoPE, cache write and attention), by the tile that schedule "auto" chooses; in vLLM its
attention kernels alone, and with norms, RoPE and cache write before them; torch's
scaled_dot_product_attention alone. Each way is a CUDA graph of `--layers` layers, every layer with keys and
values of its own. Between any two replays a large sum evicts them from the L2 cache, which would hold the
short contexts whole: in a step the weights of a layer, 80 MB, pass through it between two of its visits.

Before it is timed, each way is held against float64 on fresh random inputs, what it must write poisoned.
Exit code 1: one is wrong (and is not timed). What cannot run here is named in the result. A CPU does for a
try: ``TRITON_INTERPRET=1 … --device cpu --shape tiny --schedule fused``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attention_load import AttentionLoad
from attention_table import TITLES
from attention_vllm import reason, vllm_version, vllm_ways
from attention_ways import (
    TOLERANCE,
    AttentionWay,
    UnavailableError,
    graphcap_way,
    off_by,
    prepare,
    sdpa_way,
)
from machine import machine
from speed_ways import read_bandwidth

from graphcap.decode.shapes import preset
from graphcap.errors import BackendError
from graphcap.recorders.graph_nodes import GraphReader

Row = dict[str, Any]


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="seed-64")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--contexts", type=_numbers, default="256,1024,4096,16384")
    parser.add_argument("--batches", type=_numbers, default="1,8")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7, help="in each, every way has its turn")
    parser.add_argument("--replays", type=int, default=10, help="of one turn")
    parser.add_argument("--schedule", default="auto", help="of graphcap: auto or fused")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--seconds", type=float, default=80, help="start nothing new after so long")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if preset(options.shape).is_hybrid:
        parser.error(f"--shape: {options.shape} is a hybrid, which the fused schedule cannot run")
    return options


def _numbers(words: str) -> list[int]:
    numbers = [int(word) for word in words.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected positive numbers, found {words!r}")
    return numbers


class Evictor:
    """Reads four times what the L2 cache holds. It writes nothing, so that nothing is left to be written
    back while a way is timed."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.l2 = torch.cuda.get_device_properties(device).L2_cache_size if cuda else 0
        self.numbers = torch.ones(max(1, self.l2), device=device)
        self._out = torch.empty((), device=device)

    def __call__(self) -> None:
        torch.sum(self.numbers, 0, out=self._out)


class Run:
    """One run of the script, and what it found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.began = time.monotonic()
        self.options = options
        self.device = torch.device(options.device)
        self.cuda = self.device.type == "cuda"
        self.shape = preset(options.shape)
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.evict = Evictor(self.device)
        self.reader, unread = None, ""
        if self.cuda:
            try:
                self.reader = GraphReader()
            except BackendError as error:
                unread = f"device operations are not counted: {error}"
        self.result: dict[str, Any] = {
            "what": "attention of one decode step, ways side by side in one run",
            "shape": self.shape.name,
            "heads": self.shape.num_heads,
            "kv_heads": self.shape.num_kv_heads,
            "head_dim": self.shape.head_dim,
            "dtype": str(self.dtype).removeprefix("torch."),
            "layers": options.layers,
            "rounds": options.rounds,
            "replays": options.replays,
            "schedule": options.schedule,
            "l2_mib": self.evict.l2 / 2**20,
            "evicted_by_mib": self.evict.numbers.nbytes / 2**20,
            "read_tb_s": read_bandwidth(self.device, 1 << (32 if self.cuda else 20)),
            "tolerance": TOLERANCE[self.dtype],
            "machine": machine(options.commit, vllm=vllm_version()),
            "rows": [],
            "unavailable": {},
            "wrong": [],
            "left_out": [unread] if unread else [],
        }

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.1f} s] {text}", flush=True)

    def save(self) -> None:
        out = self.options.out
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(self.result, indent=1) + "\n")

    def unavailable(self, name: str, why: str) -> None:
        if name not in self.result["unavailable"]:
            self.result["unavailable"][name] = why
            self.say(f"{self.title(name)} is not available: {why}")

    def title(self, name: str) -> str:
        return TITLES[name].replace("*", "")

    def ways(self, load: AttentionLoad) -> list[AttentionWay]:
        """Those that run; the others are noted."""
        ways, missing = [], {}
        for name, make in (
            ("graphcap", lambda: graphcap_way(load, self.options.schedule)),
            ("sdpa", lambda: sdpa_way(load)),
        ):
            try:
                way = make()
                way.run(0)
                ways.append(way)
            except (
                UnavailableError,
                BackendError,
                TypeError,
            ) as error:  # TypeError: an older torch
                missing[name] = reason(error)
        more, why = vllm_ways(load)
        for name, told in (missing | why).items():
            self.unavailable(name, told)
        found = {way.name: way for way in (*ways, *more)}
        return [found[name] for name in TITLES if name in found]

    def case(self, rows: int, context: int) -> None:
        options = self.options
        load = AttentionLoad(
            self.shape, rows, context, options.layers, self.device, self.dtype, options.seed
        )
        row: Row = {
            "batch": rows,
            "context": context,
            "capacity": load.capacity,
            "cache_mib": load.nbytes / 2**20,
            "floor_us": load.nbytes / self.result["read_tb_s"] / 1e6,
            "ways": {},
        }
        replays: dict[str, Callable[[], object]] = {}
        for way in self.ways(load):
            try:
                replay, operations = self.recorded(way, load)
            except RuntimeError as error:
                if way.name == "graphcap":
                    raise
                self.unavailable(way.name, f"cannot be recorded: {reason(error)}")
                continue
            prepare(way, load)
            replay()
            off = off_by(way, load)
            if not off <= self.result["tolerance"]:  # NaN is wrong, too
                wrong = f"{self.title(way.name)}, batch {rows}, context {context}: off by {off:.2g}"
                self.result["wrong"].append(wrong)
                self.say(f"WRONG: {wrong}, allowed {self.result['tolerance']:.2g}")
                continue
            replays[way.name] = replay
            row["ways"][way.name] = {"off_by": off, "operations": operations, **way.facts}
        for name, turns in self.timed(replays).items():
            medians = [statistics.median(turn) for turn in turns]
            us = statistics.median(time for turn in turns for time in turn)
            row["ways"][name] |= {
                "us": us,
                "low_us": min(medians),
                "high_us": max(medians),
                "tb_s": load.nbytes / us / 1e6,
            }
        self.result["rows"].append(row)
        self.say(f"batch {rows}, context {context}: {row['cache_mib']:.2f} MiB a layer")
        for name, way_row in row["ways"].items():
            print(
                f"    {self.title(name):34s} {way_row['us']:8.2f} µs a layer "
                f"({way_row['low_us']:.2f} to {way_row['high_us']:.2f}), {way_row['tb_s']:.2f} TB/s, "
                f"{way_row['operations']} operations, off by {way_row['off_by']:.1e}",
                flush=True,
            )
        self.save()

    def recorded(
        self, way: AttentionWay, load: AttentionLoad
    ) -> tuple[Callable[[], object], float | None]:
        """(a call that enqueues all layers, device operations of one)"""

        def step() -> None:
            for layer in range(load.layers):
                way.run(layer)

        step()  # compiles
        if not self.cuda:
            return step, None
        torch.cuda.synchronize(self.device)
        graph, nodes = torch.cuda.CUDAGraph(), None
        with torch.cuda.graph(graph):
            step()
            if self.reader is not None:
                stream = torch.cuda.current_stream().cuda_stream
                nodes = self.reader.count(self.reader.graph_under_capture(stream)) / load.layers
        return graph.replay, nodes

    def timed(self, replays: dict[str, Callable[[], object]]) -> dict[str, list[list[float]]]:
        """µs a layer of single replays by way and round; the ways take turns, and every round begins with
        another one."""
        times: dict[str, list[list[float]]] = {name: [] for name in replays}
        names = list(replays)
        for index in range(-1, self.options.rounds):  # the first round warms up
            first = index % len(names) if names else 0
            for name in names[first:] + names[:first]:
                turn = [self.once(replays[name]) for _ in range(self.options.replays)]
                found = [finish() * 1e3 / self.options.layers for finish in turn]
                if index >= 0:
                    times[name].append(found)
        return times

    def once(self, replay: Callable[[], object]) -> Callable[[], float]:
        """Enqueue one replay on a cold cache; gives a call that waits for it and returns its ms."""
        if not self.cuda:
            began = time.perf_counter()
            replay()
            took = (time.perf_counter() - began) * 1e3
            return lambda: took
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.evict()
        first.record()
        replay()
        last.record()

        def finish() -> float:
            last.synchronize()
            return first.elapsed_time(last)

        return finish


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    run = Run(options)
    with torch.no_grad():
        for rows in options.batches:
            for context in options.contexts:
                if time.monotonic() - run.began > options.seconds:
                    run.result["left_out"].append(f"batch {rows}, context {context}: no time left")
                    run.say(f"left out: {run.result['left_out'][-1]}")
                else:
                    run.case(rows, context)
    run.save()
    return 1 if run.result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
