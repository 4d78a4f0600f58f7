"""Compiles the kernels of many plans beforehand, in several processes: python -m graphcap.tuning.compiling.

Each process is a program of its own that reads its jobs from its standard input, so that it makes no
difference how the tuner was started. What it compiles it leaves in Triton's cache on disk.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.model_shape import ModelShape
from graphcap.tuning.space import knobs, starts

Job = tuple[int, int, LayerPlan]
"""Rows, context, plan."""


def jobs_of(shape: ModelShape, loads: Sequence[tuple[int, int]]) -> list[Job]:
    """For every load the plans that differ from a start by one knob: all kernels that a search can run."""
    jobs: list[Job] = []
    for rows, context in loads:
        jobs.append((rows, context, LayerPlan("plain")))
        for start in starts(rows):
            jobs.append((rows, context, start))
            for name, changes in knobs(start, shape, rows, context):
                if name == "pdl":  # the first turns it off for all
                    changes = changes[:1]
                jobs += [(rows, context, change(start)) for change in changes]
    return jobs


def compile_all(
    shape: ModelShape,
    device: str,
    loads: Sequence[tuple[int, int]],
    seconds: float,
    dtype: str = "bfloat16",
) -> str:
    """Run all jobs, for at most `seconds`; says what was done. What is left compiles when it is tried.

    The device must have room for one layer in every process.
    """
    started = time.monotonic()
    jobs = jobs_of(shape, loads)
    count = max(1, min(12, (os.cpu_count() or 1) - 2, len(jobs)))
    shares: list[list[Job]] = [[] for _ in range(count)]
    for job in jobs:
        # One plan for several loads goes to one process: most of its kernels are the same.
        shares[zlib.crc32(repr(job[2]).encode()) % count].append(job)
    running = []
    for share in shares:
        process = subprocess.Popen(
            [sys.executable, "-m", "graphcap.tuning.compiling"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.write(pickle.dumps((shape, device, dtype, share)))
        process.stdin.close()
        process.stdin = None
        running.append(process)
    failed = []
    for process in running:
        try:
            _out, errors = process.communicate(
                timeout=max(0.1, started + seconds - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            failed.append("out of time")
            continue
        if process.returncode:
            failed.append(errors.decode(errors="replace").strip().rpartition("\n")[2])
    return (
        f"compiled {len(jobs)} plans in {count} processes in {time.monotonic() - started:.0f} s"
        + (f"; {len(failed)} of the processes failed, one with: {failed[0]}" if failed else "")
    )


def main() -> None:
    import torch

    from graphcap.decode.kernels import decode_kernels
    from graphcap.decode.random_weights import random_weights
    from graphcap.moe.kernels import choose_backend
    from graphcap.tuning.trials import Trials

    shape, name, dtype, jobs = pickle.load(sys.stdin.buffer)
    device = torch.device(name)
    small = replace(shape.with_layers(1), vocab_size=min(shape.vocab_size, 4096))
    weights = random_weights(small, device=device, dtype=getattr(torch, dtype), seed=0)
    kernels = decode_kernels(choose_backend("triton", device))
    trials: dict[tuple[int, int], Trials] = {}
    for rows, context, plan in jobs:
        if (rows, context) not in trials:
            trials[rows, context] = Trials(weights, kernels, rows, context)
        with suppress(Exception):  # what fails here fails again, and is reported, when it is tried
            trials[rows, context].first_logits(plan)


if __name__ == "__main__":
    main()
