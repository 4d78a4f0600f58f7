"""Attention of one decode step in graphcap and in vLLM, side by side in one run.

    python bench/attention.py --out bench/results/attention_seed-64_h200.json

From the output of the qkv projection to the input of the output projection: in graphcap the operation
`attend` (norms, RoPE, cache write and attention), by the tile that schedule "auto" chooses; in vLLM its
attention kernels alone, and with norms, RoPE and cache write before them; torch's
scaled_dot_product_attention alone. Each way is a CUDA graph of `--layers` layers, every layer with keys and
values of its own: once of attention alone, and once with a qkv projection before each, whose own time is
taken off. That is what attention adds to a step, where kernels overlap.

Keys and values come from memory, not from the L2 cache, which would hold the short contexts whole: before
each replay a large sum evicts them. So it is in a step: between two visits of a layer all others' weights
pass through the cache (80 MB a layer for `seed-64`).

Before it is timed, each way is held against float64 on fresh random inputs, what it must write poisoned.
Exit code 1: one is wrong (and is not timed). What cannot run here is named in the result. A CPU does for a
try: ``TRITON_INTERPRET=1 … --device cpu --shape tiny --schedule fused``.
"""

from __future__ import annotations

import argparse
import gc
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
from attention_timing import ColdClock
from attention_vllm import reason, vllm_version, vllm_ways
from attention_ways import (
    TOLERANCE,
    AttentionWay,
    Projections,
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
    parser.add_argument(
        "--projection",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure after a projection as well",
    )
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


class Run:
    """One run of the script, and what it found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.began = time.monotonic()
        self.options = options
        self.device = torch.device(options.device)
        self.cuda = self.device.type == "cuda"
        if self.cuda and not torch.cuda.is_available():
            raise SystemExit(
                f"--device {self.device}: torch sees no CUDA device here; --device cpu tries the script"
            )
        self.shape = preset(options.shape)
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.clock = ColdClock(self.device, options.layers)
        self.projections = None
        if options.projection:
            self.projections = Projections(self.shape, options.layers, self.device, self.dtype)
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
            "seed": options.seed,
            "l2_mib": self.clock.l2 / 2**20,
            "evicted_by_mib": self.clock.evicted_by / 2**20,
            "read_tb_s": read_bandwidth(self.device, 1 << (32 if self.cuda else 20)),
            "tolerance": TOLERANCE[self.dtype],
            "machine": machine(options.commit, vllm=vllm_version()),
            "rows": [],
            "unavailable": {},
            "wrong": [],
            "left_out": self.clock.notes,
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
        makers: dict[str, Callable[[], AttentionWay]] = {
            "graphcap": lambda: graphcap_way(load, self.options.schedule, self.projections),
            "sdpa": lambda: sdpa_way(load),
        }
        for name, make in makers.items():
            try:
                ways.append(make())
            except (UnavailableError, BackendError) as error:
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
        projected: dict[str, str] = {}
        if self.projections is not None:
            self.projections.for_rows(rows)
        for way in self.ways(load):
            if not self.checked(way, load, row, replays):
                continue
            if self.projections is not None:
                before = way.projection or self.projections.by_torch
                projected[way.name] = "torch" if way.projection is None else way.name
                base = f"projection, {projected[way.name]}"
                if base not in replays:
                    replays[base], _ = self.clock.recorded(before)
                replays[f"{way.name}, after projection"], _ = self.clock.recorded(before, way.run)
        times = self.clock.times(replays, options.rounds, options.replays)
        self.timings(row, load, times, projected)
        self.result["rows"].append(row)
        self.tell(row)
        self.save()

    def checked(
        self,
        way: AttentionWay,
        load: AttentionLoad,
        row: Row,
        replays: dict[str, Callable[[], object]],
    ) -> bool:
        """Record `way` and hold it against the reference; whether it is right, and can be timed."""
        try:
            replay, operations = self.clock.recorded(way.run)
        except RuntimeError as error:
            if way.name == "graphcap":
                raise
            self.unavailable(way.name, f"cannot be recorded: {reason(error)}")
            return False
        prepare(way, load)
        replay()
        off, allowed = off_by(way, load), self.result["tolerance"]
        if not off <= allowed:  # NaN is wrong, too
            wrong = f"{self.title(way.name)}, batch {load.rows}, context {load.context}: off by {off:.2g}"
            self.result["wrong"].append(wrong)
            self.say(f"WRONG: {wrong}, allowed {allowed:.2g}")
            return False
        replays[way.name] = replay
        row["ways"][way.name] = {"off_by": off, "operations": operations, **way.facts}
        return True

    def timings(
        self,
        row: Row,
        load: AttentionLoad,
        times: dict[str, list[list[float]]],
        projected: dict[str, str],
    ) -> None:
        """Into `row`: µs a layer by way, and what each adds to its projection."""
        medians = {
            name: [statistics.median(turn) for turn in turns] for name, turns in times.items()
        }
        for name, found in row["ways"].items():
            us = statistics.median(time for turn in times[name] for time in turn)
            found |= {"us": us, "low_us": min(medians[name]), "high_us": max(medians[name])}
            found["tb_s"] = load.nbytes / us / 1e6
            if name in projected:
                pairs = (f"{name}, after projection", f"projection, {projected[name]}")
                added = [a - b for a, b in zip(*(medians[pair] for pair in pairs), strict=True)]
                found |= {
                    "added_us": statistics.median(added),
                    "added_low_us": min(added),
                    "added_high_us": max(added),
                    "projection_us": statistics.median(medians[pairs[1]]),
                }

    def tell(self, row: Row) -> None:
        self.say(
            f"batch {row['batch']}, context {row['context']}: {row['cache_mib']:.2f} MiB a layer"
        )
        for name, found in row["ways"].items():
            added = f"adds {found['added_us']:.2f} µs, " if "added_us" in found else ""
            print(
                f"    {self.title(name):34s} {found['us']:8.2f} µs a layer "
                f"({found['low_us']:.2f} to {found['high_us']:.2f}), {added}{found['tb_s']:.2f} TB/s, "
                f"{found['operations']} operations, off by {found['off_by']:.1e}",
                flush=True,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    run = Run(options)
    if run.cuda:
        gc.freeze()  # torch collects before each capture: it need not walk all that is imported
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
