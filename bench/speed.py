"""A decode step by several ways, side by side in one run: eager, plain torch in a CUDA graph,
torch.compile, graphcap.

    python bench/speed.py --shape seed-64 --out bench/results/speed_seed-64_h200.json

First 128 greedy tokens of the recorded step are held against plain torch in float32, then every batch is
measured, then `run_many`, then torch.compile (minutes), and last operations are counted, because the
profiler stays attached. The JSON is written after every batch; what there was no time for is named in
it. Exit code 1: the tokens are wrong. A CPU does for a try: ``--shape tiny --device cpu``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from machine import machine
from plain_torch import EXPERTS, PlainStep
from speed_bytes import bytes_read, routing_of_steps
from speed_check import check_tokens
from speed_many import NEVER, many_times
from speed_ways import (
    HEADROOM,
    Load,
    OutOfTimeError,
    Way,
    compiled_way,
    eager_way,
    graphcap_way,
    in_turn,
    plain_way,
    read_bandwidth,
)

from graphcap.buckets import BucketLadder
from graphcap.decode.decoder import Decoder
from graphcap.decode.kernels import DecodeKernels, decode_kernels
from graphcap.decode.measure import activity, host_times
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.decode.weights import ModelWeights
from graphcap.moe.kernels import choose_backend
from graphcap.settings import Settings

AT_ONCE = 32
"""Tokens of one call of `run_many`."""

HOST_BURSTS = 30
"""Bursts of 8 in which the host's part of graphcap's step is timed, 7 calls of each; others 5."""

COUNTING = 40
"""Seconds that compiling leaves for the counts after it."""

Row = dict[str, Any]


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="seed-64")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument(
        "--long", type=int, default=4096, help="one more context at batch 1; 0: none"
    )
    parser.add_argument(
        "--schedules", default="plain", help="of graphcap; the first is the chosen one"
    )
    parser.add_argument("--turns", type=int, default=9, help="of five tokens each, eager two")
    parser.add_argument("--check-tokens", type=int, default=128)
    parser.add_argument("--check-rows", type=int, default=4)
    parser.add_argument("--many-batches", default="1,8")
    parser.add_argument("--compile-batches", default="1,8", help="empty: none")
    parser.add_argument("--compile-units", default="step,layer", help="the first that works")
    parser.add_argument("--compile-seconds", type=float, default=150, help="at most, for each")
    parser.add_argument(
        "--seconds", type=float, default=560, help="start nothing new after so long"
    )
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",") if word]


class Run:
    """One run of the script: weights, the decoders, and what was found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.began = time.monotonic()
        self.options = options
        self.device = torch.device(options.device)
        self.cuda = self.device.type == "cuda"
        self.context: int = options.context
        self.batches = numbers(options.batches)
        self.schedules: list[str] = options.schedules.split(",")
        shape = preset(options.shape)
        if options.layers:
            shape = shape.with_layers(options.layers)
        self.read_tb_s = read_bandwidth(self.device, 1 << (32 if self.cuda else 24))
        dtype = torch.bfloat16 if self.cuda else torch.float32
        self.weights: ModelWeights = random_weights(shape, device=self.device, dtype=dtype, seed=0)
        self.kernels: DecodeKernels = decode_kernels(choose_backend("auto", self.device))
        self.ways: dict[tuple[int, int], list[Way]] = {}
        self.result: dict[str, Any] = {
            "what": "decode step, ways side by side in one run",
            "shape": shape.name,
            "layers": shape.num_layers,
            "dtype": str(dtype).removeprefix("torch."),
            "context": self.context,
            "weights_gib": self.weights.nbytes / 2**30,
            "kernels": self.kernels.experts.name,
            "schedules": self.schedules,
            "read_tb_s": self.read_tb_s,
            "machine": machine(options.commit),
            "capture": [],
            "rows": [],
            "many": [],
            "left_out": [],
        }
        if not self.cuda:
            self.left_out("CUDA graph of plain torch: no CUDA device, it runs eagerly")
        self.say(f"{shape.name}, {shape.num_layers} layers; reads {self.read_tb_s:.2f} TB/s")

    # -- what is shared --------------------------------------------------------------------------

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def left_out(self, what: str) -> None:
        self.result["left_out"].append(what)
        self.say(f"left out: {what}")

    @property
    def seconds_left(self) -> float:
        return float(self.options.seconds - (time.monotonic() - self.began))

    def in_time(self, what: str, needed: float = 0) -> bool:
        left = self.seconds_left > needed
        if not left:
            self.left_out(f"{what}: no time left")
        return left

    def save(self) -> None:
        out = self.options.out
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(self.result, indent=1) + "\n")

    def decoder(
        self, schedule: str, batches: Sequence[int], context: int, at_once: int = 1
    ) -> Decoder:
        decoder = Decoder(
            self.weights,
            self.kernels,
            max_batch=max(batches),
            max_context=context + HEADROOM,
            ladder=BucketLadder(batches),
            settings=Settings(recorder="cuda" if self.cuda else "tape"),
            tokens_per_launch=at_once,
            eos=() if at_once == 1 else (NEVER,),
            schedule=schedule,
        )
        decoder.cache.fill_random(1)  # also what verification attends to
        report = decoder.manager.capture()
        decoder.cache.fill_random(1)
        for bucket, why in report.failures.items():
            self.left_out(f"graphcap {schedule}, bucket {bucket}: {why}")
        self.result["capture"].append(
            {
                "schedule": schedule,
                "context": context,
                "tokens_per_launch": at_once,
                "buckets": [bucket.size for bucket in report.buckets],
                "seconds": report.seconds,
                "pool_mib": report.pool_bytes / 2**20,
                "pool_lower_bound_mib": report.pool_lower_bound_bytes / 2**20,
            }
        )
        self.say(f"captured {schedule}, context {context}: {report.seconds:.1f} s")
        return decoder

    # -- measurements ----------------------------------------------------------------------------

    def check(self, decoder: Decoder) -> bool:
        rows = min(self.options.check_rows, max(self.batches))
        seen = check_tokens(decoder, rows, self.options.check_tokens)
        self.result["tokens"] = {"schedule": self.schedules[0], **seen}
        decoder.cache.fill_random(1)
        self.say(f"tokens: {seen}")
        return bool(seen["ok"])

    def row(self, decoders: Mapping[str, Decoder], rows: int, context: int) -> None:
        loads = {
            name: Load(decoder.cache, self.weights.shape.vocab_size, rows, context)
            for name, decoder in decoders.items()
        }
        chosen = loads[self.schedules[0]]
        plain, step = self.best_plain(chosen)
        ways = [eager_way(self.weights, self.kernels, chosen), plain]
        for name, decoder in reversed(list(decoders.items())):
            if decoder.manager.serves(rows):
                title = "graphcap" if name == self.schedules[0] else f"graphcap {name}"
                ways.append(graphcap_way(title, decoder, loads[name], name))
        start: Callable[[], object] = lambda: chosen.put(step)  # noqa: E731
        routing = routing_of_steps(step, start, ways[-1].timed)
        read = bytes_read(self.weights.shape, self.weights.dtype, rows, context, routing)
        floor = read.total / self.read_tb_s / 1e9
        row: Row = {"batch": rows, "context": context, "read": asdict(read), "floor_ms": floor}
        row["ways"] = self.measured(ways, row)
        self.result["rows"].append(row)
        self.ways[rows, context] = ways
        for load in loads.values():  # its blocks stay as they are until others need them
            load.close()
        self.show(row)
        self.save()

    def best_plain(self, load: Load) -> tuple[Way, PlainStep]:
        """Plain torch with the experts that are faster for this load."""
        found = []
        # torch.compile knows grouped products of half types only.
        half = self.weights.dtype.itemsize == 2
        for experts in EXPERTS if half else ("gathered",):
            try:
                way, step = plain_way(self.weights, load, experts, self.device)
                times = in_turn([way], self.device, 2)[way.name]
                found.append((statistics.median(times), experts, way, step))
            except (RuntimeError, NotImplementedError) as error:
                self.left_out(f"plain torch, {experts} experts, batch {load.rows}: {error}")
        if not found:
            raise RuntimeError("plain torch runs in no way; see what was left out")
        _, _, way, step = min(found, key=lambda each: each[0])
        way.facts["experts_tried_ms"] = {experts: ms for ms, experts, _, _ in found}
        return way, step

    def measured(self, ways: Sequence[Way], row: Row) -> dict[str, Row]:
        in_turn(ways, self.device, 1)
        times = in_turn(ways, self.device, self.options.turns)
        return {way.name: self.columns(way, times[way.name], row) for way in ways}

    def columns(self, way: Way, times: Sequence[float], row: Row) -> Row:
        ms = statistics.median(times)
        host = None
        if self.cuda:
            bursts, queue = (2, 4) if way.timed < 5 else (5, 8)
            if way.name.startswith("graphcap"):
                bursts = HOST_BURSTS
            host = host_times(way.step, self.device, bursts, queue, before=way.start)
        return {
            "ms": ms,
            "low_ms": min(times),
            "high_ms": max(times),
            "timed": len(times),
            "tokens_per_s": row["batch"] / ms * 1e3,
            "tb_s": row["read"]["weights"] / ms / 1e9 + row["read"]["cache"] / ms / 1e9,
            "of_floor": row["floor_ms"] / ms,
            "host_us": None if host is None else host.queued,
            "host_us_least": None if host is None else host.least,
            "host_us_after_idle": None if host is None else host.idle,
            "host_calls": None if host is None else host.calls,
            "operations": None,
            "launches": None,
            "allocations": None,
            **way.facts,
        }

    def many(self, rows: int) -> None:
        """Several tokens by one call: see `many_times`."""
        schedule = self.schedules[0]
        decoder = self.decoder(schedule, [rows], self.context, AT_ONCE)
        load = Load(decoder.cache, self.weights.shape.vocab_size, rows, self.context)
        manager = decoder.manager
        found = {
            "batch": rows,
            "tokens": AT_ONCE,
            "schedule": schedule,
            "loop": manager.loops(rows),
            "notes": list(manager.report.notes),
            **many_times(manager, load.batch, AT_ONCE, self.device),
        }
        self.result["many"].append(found)
        self.say(f"run_many: {found}")
        load.close()
        decoder.close()
        self.save()

    def compiled(self, row: Row, load: Load) -> None:
        """torch.compile beside graphcap, which is timed again with it."""
        for unit in self.options.compile_units.split(","):
            name = f"torch.compile of the {unit}, batch {row['batch']}"
            if not self.in_time(name, COUNTING):
                return
            seconds = min(self.options.compile_seconds, self.seconds_left - COUNTING)
            used = row["ways"]["torch graph"]["experts"]
            plain = PlainStep(self.weights, load.rows, self.context + HEADROOM, experts=used)
            load.copy_to(plain)
            try:
                way = compiled_way(plain, load, unit, seconds)
            except (OutOfTimeError, Exception) as error:
                text = str(error).strip().splitlines()
                self.left_out(f"{name}: {type(error).__name__}: {text[0] if text else ''}")
                continue
            way.facts["experts"] = used
            beside = self.ways[row["batch"], self.context][-1]
            found = self.measured([way, beside], row)
            row["ways"][way.name] = found[way.name] | {
                "graphcap_beside_ms": found[beside.name]["ms"]
            }
            self.ways[row["batch"], self.context].append(way)
            self.show(row)
            self.save()
            return

    def count(self) -> None:
        """Launches, operations and allocations of a token by every way."""
        for row in self.result["rows"]:
            for way in self.ways[row["batch"], row["context"]]:
                if not self.in_time(f"operations of {way.name}, batch {row['batch']}"):
                    continue
                way.start()
                seen = activity(way.step, self.device)
                row["ways"][way.name].update(
                    launches=seen.launches,
                    operations=seen.operations,
                    allocations=seen.allocations,
                )
            self.save()

    def show(self, row: Row) -> None:
        read, context = row["read"], row["context"]
        self.say(
            f"batch {row['batch']}, context {context}: floor {row['floor_ms']:.3f} ms, "
            f"{read['experts']:.1f} experts a layer"
        )
        for name, way in row["ways"].items():
            host = "-" if way["host_us"] is None else f"{way['host_us']:.1f}"
            facts = {
                key: way[key] for key in ("experts", "schedule", "unit", "nodes") if key in way
            }
            print(
                f"    {name:15} {way['ms']:9.3f} ms {way['tokens_per_s']:9.1f} tokens/s "
                f"{way['tb_s']:6.3f} TB/s {way['of_floor']:6.1%} of the floor, host {host} us, "
                f"graph {_or_dash(way.get('graph_mib'))} MiB, "
                f"capture {_or_dash(way.get('capture_ms'))} ms {facts}",
                flush=True,
            )


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        print(
            f"speed.py: error: --device {options.device}: expected a CUDA device of this machine, found "
            "none; give --device cpu, and a small shape (--shape tiny --schedules plain)",
            file=sys.stderr,
        )
        return 2
    with torch.no_grad():
        run = Run(options)
        decoders = {name: run.decoder(name, run.batches, run.context) for name in run.schedules}
        first = decoders[run.schedules[0]]
        right = run.check(first) if options.check_tokens else True
        for rows in run.batches:
            if run.in_time(f"batch {rows}"):
                run.row(decoders, rows, run.context)
        if options.long and run.in_time(f"context {options.long}"):
            longer = {name: run.decoder(name, [1], options.long) for name in run.schedules}
            run.row(longer, 1, options.long)
        for rows in numbers(options.many_batches):
            if run.in_time(f"run_many, batch {rows}"):
                run.many(rows)
        for row in list(run.result["rows"]):
            if row["batch"] in numbers(options.compile_batches) and row["context"] == run.context:
                vocab_size = run.weights.shape.vocab_size
                load = Load(first.cache, vocab_size, row["batch"], run.context)
                run.compiled(row, load)
                load.close()
        if run.cuda:
            run.count()
        run.save()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
