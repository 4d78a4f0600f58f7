"""The fused decode layer on an H200: is it right, which tiles are best, what does the whole step gain.

    python bench/fused_layer.py --out bench/results/fused_seed-64_h200.json

In this order, so that a run that is cut short has measured what matters most:

0. all kernels are compiled, in several processes;
1. the whole step, plain and fused, with and without programmatic dependent launch, for every batch;
2. every fused kernel by itself, over the weights of all layers (none is found in the cache), for every
   tile that could be good: its largest error against float64 and µs a layer;
3. the whole step again with the best three tiles of each kernel in turn, the others as they are best.

A configuration that fails is reported and left out. The JSON is written after every batch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode_step import DEVICE, machine
from fused_layer_cases import CASES, Case
from fused_layer_compile import compile_all, configurations
from fused_layer_step import Replayed, Tiles, captured, median_ms

from graphcap.decode.kernels import DecodeKernels, decode_kernels
from graphcap.decode.measure import activity
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.decode.weights import ModelWeights
from graphcap.moe.kernels import choose_backend, triton_pdl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="seed-64")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batches", default="1,8,2,4,16,32")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--long", type=int, default=4096, help="one more context, at batch 1")
    parser.add_argument("--budget", type=float, default=500, help="seconds; no new tile after that")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=Path("fused_layer.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    deadline = time.monotonic() + options.budget
    shape = preset(options.shape)
    if options.layers:
        shape = shape.with_layers(options.layers)
    loads = [(int(word), options.context) for word in options.batches.split(",")]
    loads.insert(1, (1, options.long))
    failed = attempt(lambda: compile_all(shape, loads, str(DEVICE), deadline))
    if failed:
        print(f"compiling beforehand failed, so kernels compile when measured: {failed}")
    weights = random_weights(shape, device=DEVICE, dtype=torch.bfloat16, seed=0)
    kernels = decode_kernels(choose_backend("triton", DEVICE))
    result: dict[str, Any] = {
        "what": "fused decode layer",
        "shape": shape.name,
        "layers": shape.num_layers,
        "machine": machine(options.commit),
        "read_tb_s": read_bandwidth(),
        "steps": [],
        "kernels": [],
        "tuned": [],
    }
    print(f"{shape.name}, {shape.num_layers} layers; reads {result['read_tb_s']:.2f} TB/s")

    def save() -> None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(named(result), indent=1) + "\n")

    for load in loads:
        result["steps"] += compare_steps(weights, kernels, *load, result["read_tb_s"])
        save()
    for load in loads:
        seen = sweep(weights, *load, deadline)
        result["kernels"] += seen
        save()
        result["tuned"].append(tune(weights, kernels, *load, seen, deadline))
        save()
    # Last: the profiler stays attached and makes every later launch slower.
    for schedule in ("plain", "fused"):
        replayed = attempt(lambda s=schedule: Replayed(weights, kernels, s, 1, options.context))
        if isinstance(replayed, Replayed):
            result[f"operations_{schedule}"] = activity(replayed.graph.replay, DEVICE).operations
            print(f"{schedule}: {result[f'operations_{schedule}']} device operations at batch 1")
    save()


def named(value: Any) -> Any:
    """The same for JSON, tiles with the names of their fields."""
    if isinstance(value, dict):
        return {key: named(each) for key, each in value.items()}
    if hasattr(value, "_asdict"):
        return {"tile": type(value).__name__, **value._asdict()}
    return [named(each) for each in value] if isinstance(value, list) else value


def attempt(make: Callable[[], Any]) -> Any:
    """What `make` returns, or the error as text: one bad configuration must not end the run."""
    try:
        return make()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def read_bandwidth() -> float:
    """TB/s of a large reduction: the floor that the issue's percentages refer to."""
    numbers = torch.ones(2**30, device=DEVICE)
    out = torch.empty((), device=DEVICE)
    ms = median_ms(lambda: torch.sum(numbers, 0, out=out))
    return numbers.nbytes / ms / 1e9


def compare_steps(
    weights: ModelWeights, kernels: DecodeKernels, rows: int, context: int, read_tb_s: float
) -> list[dict[str, Any]]:
    """Plain and fused with PDL, fused without it; differences of the first step's logits to plain."""
    found = []
    floor = weights.shape.bytes_read_per_step(weights.dtype, rows) / read_tb_s / 1e9
    plain: torch.Tensor | None = None
    on_device = triton_pdl._on_device
    for schedule, pdl in (("plain", True), ("fused", True), ("fused", False)):
        if not pdl:
            triton_pdl._on_device = lambda _device: False
        try:
            step = attempt(lambda s=schedule: Replayed(weights, kernels, s, rows, context))
            row: dict[str, Any] = {"rows": rows, "context": context}
            row |= {"schedule": schedule, "pdl": pdl}
            if isinstance(step, str):
                row["failed"] = step
            else:
                row["ms"] = step.ms()
                row["tokens_s"] = rows / row["ms"] * 1e3
                row["of_floor"] = floor / row["ms"]  # at most: as if no two tokens shared an expert
                if plain is None:
                    plain = step.logits
                row["difference"] = float((step.logits - plain).abs().max() / plain.abs().max())
        finally:
            triton_pdl._on_device = on_device
        found.append(row)
        show(row)
    return found


def sweep(weights: ModelWeights, rows: int, context: int, deadline: float) -> list[dict[str, Any]]:
    found = []
    for name, make in CASES.items():
        case = attempt(lambda make=make: make(weights, rows, context))
        if isinstance(case, str):
            found.append({"kernel": name, "rows": rows, "context": context, "failed": case})
            show(found[-1])
            continue
        for tile, pdl in configurations(name, weights.shape, rows, context):
            if time.monotonic() > deadline:
                print(f"out of time before {name} {tile} at {rows} rows: left out")
                return found
            row = {"kernel": name, "rows": rows, "context": context, "tile": tile, "pdl": pdl}
            row |= measured(case, tile, pdl)
            found.append(row)
            show(row)
    return found


def measured(case: Case, tile: Any, pdl: bool) -> dict[str, Any]:
    error = attempt(lambda: case.error(tile, pdl))
    if isinstance(error, str):
        return {"failed": error}
    if not error < 2e-2:
        return {"failed": f"WRONG: error {error:.3g} against float64"}
    graph = attempt(lambda: captured(lambda: case.over_layers(tile, pdl)))
    if isinstance(graph, str):
        return {"failed": graph, "error": error}
    us = attempt(lambda: median_ms(graph.replay) * 1e3 / case.layers)
    return {"failed": us, "error": error} if isinstance(us, str) else {"us": us, "error": error}


def tune(
    weights: ModelWeights,
    kernels: DecodeKernels,
    rows: int,
    context: int,
    seen: list[dict[str, Any]],
    deadline: float,
) -> dict[str, Any]:
    """The best tiles in the whole step: three for each kernel, one kernel after the other."""
    best: Tiles = {}
    step = attempt(lambda: Replayed(weights, kernels, "fused", rows, context).ms())
    best_ms = step if isinstance(step, float) else float("inf")
    for name in CASES:
        good = [row for row in seen if row["kernel"] == name and "us" in row and row["tile"]]
        for row in sorted(good, key=lambda row: row["us"])[:3]:
            if time.monotonic() > deadline:
                break
            tiles = {**best, name: row["tile"]}
            ms = attempt(
                lambda tiles=tiles: Replayed(weights, kernels, "fused", rows, context, tiles).ms()
            )
            show({"rows": rows, "context": context, "step_with": tiles, "ms": ms})
            if isinstance(ms, float) and ms < best_ms:
                best, best_ms = tiles, ms
    tuned = {"rows": rows, "context": context, "default_ms": step, "ms": best_ms, "tiles": best}
    show({"tuned": True, **tuned})
    return tuned


def show(row: dict[str, Any]) -> None:
    words = (
        f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
    )
    print(" | ".join(words), flush=True)


if __name__ == "__main__":
    main()
