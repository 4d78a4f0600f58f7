"""Layer plans on an H200: whole steps plain, by default and tuned, and what each kernel takes.

    python bench/fused_layer.py --out bench/results/fused_seed-64_h200.json

In this order, so that a run that is cut short has measured what matters most:

0. all kernels are compiled, in several processes;
1. the whole step, plain and fused by default plans, for every load;
2. for every load the tuner's search on a model of fewer layers, then the whole step by what it found;
3. device operations and the time of each kernel in one step of every tuned plan, by the profiler.

A plan that fails is reported and left out. The JSON is written after every step.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from machine import machine

from graphcap.decode.kernels import DecodeKernels, decode_kernels
from graphcap.decode.layer_plan import LayerPlan, default_plan
from graphcap.decode.plan_json import plan_to_json
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.decode.weights import ModelWeights
from graphcap.moe.kernels import choose_backend
from graphcap.tuning.compiling import compile_all
from graphcap.tuning.search import attempt, search
from graphcap.tuning.trials import Trials, captured, median_ms, shortened

Load = tuple[int, int]


class Report:
    """Prints every row and keeps it for the JSON."""

    def __init__(self, out: Path, **head: Any) -> None:
        self.out = out
        self.found: dict[str, Any] = head

    def add(self, part: str, **row: Any) -> None:
        row = {
            key: plan_to_json(value) if isinstance(value, LayerPlan) else value
            for key, value in row.items()
        }
        self.found.setdefault(part, []).append(row)
        words = (
            f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
        )
        print(part, *words, sep=" | ", flush=True)

    def save(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.found, indent=1) + "\n")


DEVICE = torch.device("cuda:0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="seed-64")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--loads", default="1x256,8x256,32x256,1x4096,2x256,4x256,16x256,64x256")
    parser.add_argument("--search-layers", type=int, default=12)
    parser.add_argument("--budget", type=float, default=330, help="seconds; no new plan after that")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=Path("fused_layer.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    deadline = time.monotonic() + options.budget
    shape = preset(options.shape)
    if options.layers:
        shape = shape.with_layers(options.layers)
    loads: list[Load] = []
    for word in options.loads.split(","):
        rows, _, context = word.partition("x")
        loads.append((int(rows), int(context)))
    print(compile_all(shape, str(DEVICE), loads, options.budget / 4), flush=True)

    weights = random_weights(shape, device=DEVICE, dtype=torch.bfloat16, seed=0)
    kernels = decode_kernels(choose_backend("triton", DEVICE))
    report = Report(
        options.out,
        what="layer plans",
        shape=shape.name,
        layers=shape.num_layers,
        machine=machine(options.commit),
        read_tb_s=read_bandwidth(),
    )
    print(f"{shape.name}, {shape.num_layers} layers; reads {report.found['read_tb_s']:.2f} TB/s")
    floors = {load: floor_ms(weights, kernels, load, report) for load in loads}
    for load in loads:
        for name, plan in (("plain", LayerPlan("plain")), ("default", default_plan(load[0]))):
            whole_step(weights, kernels, load, name, plan, floors[load], report)
        report.save()

    best: dict[Load, LayerPlan] = {}
    short = shortened(weights, options.search_layers)
    for index, load in enumerate(loads):
        now = time.monotonic()
        # What an easy load leaves goes to those that follow.
        until = now + (deadline - now) / max(1, len(loads) - index)
        trials = Trials(short, kernels, *load)
        best[load], _ms = search(trials, until, lambda row: report.add("trials", **row))
        whole_step(weights, kernels, load, "tuned", best[load], floors[load], report)
        report.save()
    # Last: the profiler stays attached and makes every later launch slower.
    for load, plan in best.items():
        for name, each in (("tuned", plan), ("plain", LayerPlan("plain"))):
            profile(weights, kernels, load, name, each, report)
        report.save()


def read_bandwidth() -> float:
    """TB/s of a large reduction: the floor that the issue's percentages refer to."""
    numbers = torch.ones(2**30, device=DEVICE)
    out = torch.empty((), device=DEVICE)
    ms = median_ms(lambda: torch.sum(numbers, 0, out=out), turns=9, calls=20)
    return numbers.nbytes / ms / 1e9


def floor_ms(weights: ModelWeights, kernels: DecodeKernels, load: Load, report: Report) -> float:
    """The time to read once what this very step reads: of the experts those that its tokens choose."""
    rows = load[0]
    distinct = Trials(weights, kernels, *load).distinct_experts()
    read = weights.shape.bytes_read_per_step(weights.dtype, rows, round(distinct))
    ms = read / report.found["read_tb_s"] / 1e9
    report.add(
        "floors", rows=rows, context=load[1], distinct_experts=distinct, gb=read / 1e9, ms=ms
    )
    return ms


def whole_step(
    weights: ModelWeights,
    kernels: DecodeKernels,
    load: Load,
    name: str,
    plan: LayerPlan,
    floor: float,
    report: Report,
) -> None:
    trial = attempt(Trials(weights, kernels, *load), plan)
    row: dict[str, Any] = {"rows": load[0], "context": load[1], "schedule": name}
    if isinstance(trial, str):
        row["failed"] = trial
    else:
        row |= {
            "ms": trial.ms,
            "tokens_s": load[0] / trial.ms * 1e3,
            "of_floor": floor / trial.ms,
            "difference": trial.difference,
        }
    report.add("steps", **row, plan=plan)


def profile(
    weights: ModelWeights,
    kernels: DecodeKernels,
    load: Load,
    name: str,
    plan: LayerPlan,
    report: Report,
) -> None:
    """µs of each kernel in a replay; with dependent launch kernels overlap, so they may add up to more
    than the step takes."""
    trials = Trials(weights, kernels, *load)
    try:
        with torch.no_grad():
            _pool, step = trials.step(plan)
            step()
            trials.reset()
            graph = captured(step)
            graph.replay()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                graph.replay()
                torch.cuda.synchronize()
    except Exception as error:
        report.add("kernels", rows=load[0], context=load[1], schedule=name, failed=str(error))
        return
    rows = [
        (event.key, event.count, event.self_device_time_total / event.count)
        for event in seen.key_averages()
        if event.self_device_time_total > 0
    ]
    count = sum(times for _, times, _ in rows)
    report.add("operations", rows=load[0], context=load[1], schedule=name, operations=count)
    for kernel, times, us in sorted(rows, key=lambda row: -row[1] * row[2])[:16]:
        report.add(
            "kernels", rows=load[0], context=load[1], schedule=name, kernel=kernel[:60],
            count=times, us=us,
        )  # fmt: skip


if __name__ == "__main__":
    main()
