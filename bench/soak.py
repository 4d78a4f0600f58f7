"""Soak: requests with prompts of their own come and go at random on one decoder, for many replays.

    python bench/soak.py --replays 100000 --out bench/results/NAME.json

After each leg all requests have left and memory is read: nothing may grow from the first leg on. (A run
that is too short for that, in which kernels are still being loaded, tells growth and does not judge it:
``--growth tell``.) Results are held against eager ones on the way: soak_run.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from soak_memory import Memory, grown
from soak_run import Soak

from graphcap.errors import GraphcapError
from graphcap.report import versions


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, found {text!r}")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, found {text!r}")
    return share


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--replays",
        type=_positive,
        default=100_000,
        help="at least so many; a leg ends when its last request has left (default 100000)",
    )
    parser.add_argument(
        "--legs", type=_positive, default=10, help="readings of memory (default 10)"
    )
    parser.add_argument("--shape", default="tiny", help="random weights of a shape (default tiny)")
    parser.add_argument("--layers", type=_positive, help="only the first so many")
    parser.add_argument("--max-batch", type=_positive, default=8, help="default 8")
    parser.add_argument(
        "--sample",
        type=_share,
        default=0.01,
        help="share of the steps that is held against eager, 0 to 1 (default 0.01)",
    )
    parser.add_argument("--recorder", choices=("auto", "cuda", "tape"), default="auto")
    parser.add_argument(
        "--growth",
        choices=("judge", "tell"),
        default="judge",
        help="judge: exit code 1 if memory grew after the first leg (default)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="unknown", help="of the sources, noted in --out")
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    options = parser.parse_args(arguments)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        soak = Soak(
            device,
            shape=options.shape,
            layers=options.layers,
            max_batch=options.max_batch,
            sample=options.sample,
            seed=options.seed,
            recorder=options.recorder,
        )
    except GraphcapError as error:
        print(f"soak.py: error: {error}", file=sys.stderr)
        return 2
    if soak.report.failures:
        print(f"not recorded: {soak.report.failures}", file=sys.stderr)
        return 1
    legs: list[Memory] = []
    print("| replays | s | requests | tensors | resident MiB | allocated MiB | reserved MiB |")
    print("|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    started = time.perf_counter()
    for _ in range(options.legs):
        legs.append(soak.leg(-(-options.replays // options.legs)))
        now, mib = legs[-1], 2**20
        print(
            f"| {soak.steps:,} | {time.perf_counter() - started:.1f} | {soak.requests:,} "
            f"| {now.tensors:,} | {now.resident / mib:.2f} | {now.allocated / mib:.3f} "
            f"| {now.reserved / mib:.3f} |",
            flush=True,
        )
    seconds = time.perf_counter() - started
    stats = soak.manager.stats()
    more = grown(legs)
    print(f"held against eager: {dict(soak.checked)}; more than after the first leg: {more}")
    if options.out:
        result = {
            "what": "soak: random requests on one decoder",
            "shape": options.shape,
            "layers": soak.decoder.weights.shape.num_layers,
            "max_batch": options.max_batch,
            "recorder": stats.recorder,
            "device": soak.report.device,
            "versions": versions(),
            "commit": options.commit,
            "replays": stats.replays,
            "fallbacks": stats.fallbacks,
            "padding_rows": stats.padding_rows,
            "requests": soak.requests,
            "batches": dict(sorted(soak.batches.items())),
            "checked": dict(soak.checked),
            "differing": 0,  # the first one ends the run
            "seconds": seconds,
            "legs": [asdict(memory) for memory in legs],
            "grown": more,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    soak.close()
    if stats.fallbacks:
        print(f"not replayed: {dict(stats.fallbacks)}", file=sys.stderr)
        return 1
    judged = ("tensors", "allocated", "reserved") if options.growth == "judge" else ()
    return 1 if any(more[kind] for kind in judged) else 0


if __name__ == "__main__":
    sys.exit(main())
