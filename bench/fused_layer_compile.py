"""Compile the kernels that bench/fused_layer.py measures beforehand, in several processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from typing import Any

import torch
from fused_layer_cases import CASES, candidates

from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import ModelShape
from graphcap.decode.weights import ModelWeights

_one_layer: list[ModelWeights] = []


def start_compiler(shape: ModelShape, device: str) -> None:
    """In a process of its own: weights of one layer, for `compile_case`."""
    _one_layer.append(
        random_weights(shape.with_layers(1), device=device, dtype=torch.bfloat16, seed=0)
    )


def compile_case(name: str, rows: int, context: int, tile: Any, pdl: bool) -> None:
    """Leave the kernel in Triton's cache on disk. What fails here fails again, and is reported, there."""
    with suppress(Exception):
        CASES[name](_one_layer[0], rows, context).error(tile, pdl)


def configurations(
    name: str, shape: ModelShape, rows: int, context: int
) -> Iterator[tuple[Any, bool]]:
    """(tile, pdl): the default with and without PDL, then every other tile with it."""
    yield from ((None, True), (None, False))
    yield from ((tile, True) for tile in candidates(name, shape, rows, context))


def compile_all(
    shape: ModelShape, loads: list[tuple[int, int]], device: str, deadline: float
) -> None:
    """Fill Triton's cache on disk, for at most half of the time there is."""
    started = time.monotonic()
    jobs = [
        (name, *load, *configuration)
        for load in loads
        for name in CASES
        for configuration in configurations(name, shape, *load)
    ]
    pool = ProcessPoolExecutor(
        max(1, min(12, (os.cpu_count() or 1) - 2)),
        multiprocessing.get_context("spawn"),
        start_compiler,
        (shape, device),
    )
    futures = [pool.submit(compile_case, *job) for job in jobs]
    done, left = wait(futures, timeout=(deadline - started) / 2)
    pool.shutdown(
        wait=True, cancel_futures=True
    )  # who has begun ends; the rest compiles when measured
    broken = {type(future.exception()).__name__ for future in done if future.exception()}
    print(
        f"compiled {len(done)} of {len(jobs)} kernels in {time.monotonic() - started:.0f} s"
        + (f"; a compiling process failed: {', '.join(broken)}" if broken else "")
        + (f"; {len(left)} left" if left else "")
    )
