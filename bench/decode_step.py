"""Decode one shape eagerly and by replay, side by side in one run, and write what was measured.

    python bench/decode_step.py --shape seed-64 --batches 1,8,32 --out bench/results/NAME.json

Launches, device operations and allocations are counted by torch's profiler (CUPTI) and the
allocator's statistics; times are medians. Run it on a CUDA device; see the README's table.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from graphcap import __version__
from graphcap.decode.cache import PagedCache
from graphcap.decode.decoder import Decoder, EagerDecoder, Prompts
from graphcap.decode.kernels import DecodeKernels, decode_kernels
from graphcap.decode.measure import activity, host_times
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.decode.weights import ModelWeights
from graphcap.moe.kernels import choose_backend
from graphcap.settings import Settings

DEVICE = torch.device("cuda:0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="seed-64")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    batches = [int(word) for word in options.batches.split(",")]
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device; on a CPU run: python -m pytest bench")

    shape = preset(options.shape)
    if options.layers:
        shape = shape.with_layers(options.layers)
    started = time.perf_counter()
    weights = random_weights(shape, device=DEVICE, dtype=torch.bfloat16, seed=0)
    torch.cuda.synchronize()
    print(f"weights: {weights.nbytes / 2**30:.1f} GiB in {time.perf_counter() - started:.1f} s")
    backend = choose_backend("auto", DEVICE)
    kernels = decode_kernels(backend)
    decoder = Decoder(
        weights,
        kernels,
        max_batch=max(batches),
        max_context=options.context,
        settings=Settings(recorder="cuda"),
    )
    decoder.cache.fill_random(1)
    report = decoder.manager.capture()
    decoder.cache.clear()
    result = {
        "what": "decode step, eager against replay",
        "shape": shape.name,
        "layers": shape.num_layers,
        "dtype": "bfloat16",
        "context": options.context,
        "weights_gib": weights.nbytes / 2**30,
        "kernels": backend.name,
        "machine": machine(options.commit),
        "capture": {
            "seconds": report.seconds,
            "failures": report.to_json()["failures"],
            "pool_mib": report.pool_bytes / 2**20,
            "pool_lower_bound_mib": report.pool_lower_bound_bytes / 2**20,
            "buckets": [
                {
                    "size": bucket.size,
                    "nodes": bucket.nodes,
                    "mib": bucket.nbytes / 2**20,
                    "capture_ms": bucket.capture_ms,
                    "largest_difference": bucket.largest_difference,
                }
                for bucket in report.buckets
            ],
        },
        "batches": [
            measure(decoder, weights, kernels, batch, options.tokens, options.context)
            for batch in batches
        ],
    }
    # Counted last: the profiler stays attached and makes every later launch slower.
    for row in result["batches"]:
        for way, seen in row.pop("counts")().items():
            row[way].update(asdict(seen))
    print_table(result)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    decoder.close()


def measure(
    decoder: Decoder,
    weights: ModelWeights,
    kernels: DecodeKernels,
    batch: int,
    tokens: int,
    context: int,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(batch)
    lengths = torch.randint(4, 33, (batch,), generator=generator).tolist()
    prompts = [
        torch.randint(weights.shape.vocab_size, (length,), generator=generator).tolist()
        for length in lengths
    ]
    eager = EagerDecoder(
        weights,
        PagedCache(
            weights.shape,
            num_sequences=batch,
            max_context=context,
            device=DEVICE,
            dtype=weights.dtype,
            format=kernels.cache_format,
        ),
        kernels,
    )
    eager.decode(prompts, 2)
    by_eager = eager.decode(prompts, tokens)
    decoder.decode(prompts, 2)
    by_replay = decoder.decode(prompts, tokens)
    run, manager = decoder.manager.run, decoder.manager
    distinct = len({token for row in by_replay.token_ids for token in row})
    # Both now stand at the same place: the same work, eager and replayed in turn.
    eager_laid = Prompts(prompts, context - 40, eager.cache, weights.shape.vocab_size)
    replay_laid = Prompts(prompts, context - 40, decoder.cache, weights.shape.vocab_size)
    for prompt_batch in eager_laid.batches():
        eager.load(prompt_batch)
        eager.run()
    for prompt_batch in replay_laid.batches():
        manager.run(prompt_batch)
    eager_ms, replay_ms = [], []
    for _ in range(10):
        eager_ms.append(event_ms(eager.run, 2))
        replay_ms.append(event_ms(run, 10))
    host = host_times(run, DEVICE)
    alone = host_times(manager.recording(batch).replay, DEVICE)
    eager_laid.close()
    replay_laid.close()

    def counts() -> dict[str, Any]:
        return {"eager": activity(eager.run, DEVICE), "replay": activity(run, DEVICE)}

    return {
        "counts": counts,
        "batch": batch,
        "tokens_equal": by_eager.token_ids == by_replay.token_ids,
        "tokens_compared": batch * tokens,
        "distinct_tokens": distinct,
        "eager": {
            "ms": statistics.median(eager_ms),
        },
        "replay": {
            "ms": statistics.median(replay_ms),
            "ms_all": replay_ms,
            "host_us": host.queued,
            "host_us_after_idle": host.idle,
            "host_us_recording_alone": alone.queued,
        },
    }


def event_ms(call: Callable[[], object], times: int) -> float:
    """Device time of one call in ms: CUDA events around `times` of them."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(times):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / times


def machine(commit: str) -> dict[str, Any]:
    import triton

    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "card": torch.cuda.get_device_name(DEVICE),
        "driver": smi.stdout.strip().splitlines()[0] if smi.stdout.strip() else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "graphcap": __version__,
        "commit": commit,
    }


def print_table(result: dict[str, Any]) -> None:
    print(f"{result['shape']}, {result['layers']} layers, {result['machine']['card']}")
    for row in result["batches"]:
        e, r = row["eager"], row["replay"]
        print(
            f"batch {row['batch']:3}: eager {e['ms']:8.3f} ms {e['launches']:5} launches "
            f"{e['allocations']:5} allocations | replay {r['ms']:7.3f} ms {r['launches']} launch "
            f"{r['allocations']} allocations {r['operations']} operations, host {r['host_us']:.1f} "
            f"(recording alone {r['host_us_recording_alone']:.1f}, after idle "
            f"{r['host_us_after_idle']:.1f}) µs | tokens equal {row['tokens_equal']} "
            f"({row['distinct_tokens']} distinct of {row['tokens_compared']})"
        )
    capture = result["capture"]
    print(
        f"capture {capture['seconds']:.1f} s, pool {capture['pool_mib']:.2f} MiB (lower bound "
        f"{capture['pool_lower_bound_mib']:.2f}), failures {capture['failures']}"
    )
    for bucket in capture["buckets"]:
        print(
            f"  bucket {bucket['size']:3}: {bucket['nodes']} nodes, {bucket['mib']:.1f} MiB, "
            f"{bucket['capture_ms']:.1f} ms, difference {bucket['largest_difference']}"
        )


if __name__ == "__main__":
    main()
