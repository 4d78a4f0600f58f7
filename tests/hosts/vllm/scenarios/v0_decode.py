"""vLLM 0.6.3's own worker, model runner and model, with decode steps through graphcap's manager."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from v0 import kernels
from v0.worker import (
    MOST,
    Sequences,
    eagerly,
    make_worker,
    prefill,
    start,
    step,
    turn_on,
)

from scenarios.common import from_graphcap, log_records, warnings_in

Facts = dict[str, Any]

CLOSE = 1e-2
"""Relative difference of rows that went to the same experts: vLLM's round elsewhere than graphcap's."""


def begun(lengths: list[int], seed: int = 0, *, variables: Any = None, **args: Any) -> Any:
    """(worker, engine, sequences that have their first new token)."""
    turn_on(**{"kernels": "reference", **(variables or {})})
    worker = make_worker(**{"dtype": "bfloat16", **args})
    engine = start(worker)
    return worker, engine, after_prefill(worker, lengths, seed)


def after_prefill(worker: Any, lengths: list[int], seed: int = 0, growth: int = 4) -> Sequences:
    sequences = Sequences(lengths, seed, growth)
    sequences.append(prefill(worker, sequences)["tokens"])
    return sequences


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


def poison(engine: Any, rows: int) -> None:
    """Nothing may depend on what padding, the pool or the results held before."""
    with torch.inference_mode():
        engine.manager.inputs.poison_pads(rows)
        engine.pool.poison()
        for size in engine.manager.ladder:
            for output in engine.manager.recording(size).outputs.values():
                output.fill_(float("nan"))


def one_step(worker: Any, engine: Any, sequences: Sequences) -> Facts:
    """The next step, replayed, beside the same step eagerly with the same experts and with vLLM's."""
    groups = sequences.groups(False)
    eager = eagerly(worker, groups)
    of_vllm = eagerly(worker, groups, pooled=False)
    before = engine.manager.stats().replays
    poison(engine, 0)
    kernels.calls.clear()
    replayed = step(worker, groups)
    assert engine.manager.stats().replays == before + 1
    return {
        "tokens": replayed["tokens"] == eager["tokens"],
        "rows": replayed["hidden"].shape[0],
        "to eager": difference(replayed["hidden"], eager["hidden"]),
        "rows like vllm's": sum(
            difference(one, other) < CLOSE
            for one, other in zip(replayed["hidden"], of_vllm["hidden"], strict=True)
        ),
        "kernels": dict(kernels.calls),
        "experts of vLLM": kernels.calls["invoke_fused_moe_kernel"],
    }


def stats(engine: Any) -> Facts:
    found = engine.manager.stats()
    return {
        "replays": found.replays,
        "fallbacks": found.fallbacks,
        "padding_rows": found.padding_rows,
        "verified": found.verified,
        "failures": {str(size): text for size, text in found.failures.items()},
        "by_bucket": {str(b.size): b.replays for b in found.buckets},
        "recorder": found.recorder,
        "input_launches": found.input_launches,
    }


# -- every batch size ----------------------------------------------------------------------------


def every_batch_size(**variables: str) -> Facts:
    # In float16 few routings are so close that a rounding decides them.
    worker, engine, _ = begun([5], variables=variables, dtype="float16")
    found = {}
    for rows in range(1, MOST + 1):
        lengths = [3 + (7 * rows + 11 * number) % 60 for number in range(rows)]
        found[str(rows)] = one_step(worker, engine, after_prefill(worker, lengths, seed=rows))
    return {"steps": found, **stats(engine), "calls": dict(engine.experts.calls)}


def generation(**args: Any) -> Facts:
    """Forty tokens, over block boundaries, each next to what eager steps alone would have chosen."""
    variables = args.pop("variables", {})
    worker, engine, _ = begun([4], variables=variables, dtype="float16", **args)
    sequences = after_prefill(worker, [4, 15, 31, 33, 47], growth=44)
    caches = [cache.clone() for cache in worker.gpu_cache[0]]
    first = [list(tokens) for tokens in sequences.tokens]
    for _ in range(40):
        poison(engine, len(first))
        sequences.append(step(worker, sequences.groups(False))["tokens"])
    replayed = [list(tokens) for tokens in sequences.tokens]
    for cache, contents in zip(worker.gpu_cache[0], caches, strict=True):
        cache.copy_(contents)
    eager = Sequences([len(tokens) for tokens in first])
    eager.tokens, eager.blocks = first, sequences.blocks
    vars(worker.model_runner).pop("graphcap_engine")
    worker.model_runner.model_config.enforce_eager = True
    for _ in range(40):
        eager.append(step(worker, eager.groups(False))["tokens"])
    different = {token for tokens in replayed for token in tokens[-40:]}
    return {
        "same": replayed == eager.tokens,
        "different": len(different),
        "backend": worker.model_runner.attn_backend.get_name(),
        **stats(engine),
    }


def flash_attention() -> Facts:
    """vLLM's default backend on NVIDIA cards, whose operator reads the step's metadata on the host."""
    from v0 import flash

    flash.install()
    with log_records() as records:
        found = generation()
    text = [r["text"] for r in from_graphcap(records) if "graphcap: the decode step" in r["text"]]
    return {**found, "lines": text, "calls": dict(kernels.calls)}


# -- with and without graphs ---------------------------------------------------------------------


def enforce_eager(**variables: str) -> Facts:
    with log_records() as records:
        worker, engine, sequences = begun([9, 20], variables=variables, enforce_eager=True)
    found: Facts = {
        "warnings": warnings_in(records),
        "lines": [r["text"] for r in from_graphcap(records)],
        "engine": engine is not None,
        "graphs": len(worker.model_runner.graph_runners[0]),
    }
    if engine is not None:
        found |= {"step": one_step(worker, engine, sequences), **stats(engine)}
    else:
        groups = sequences.groups(False)
        kernels.calls.clear()
        result = step(worker, groups)
        found |= {
            "experts of vLLM": kernels.calls["invoke_fused_moe_kernel"],
            "to vllm": difference(
                result["hidden"], eagerly(worker, groups, pooled=False)["hidden"]
            ),
        }
    return found


def prefill_is_vllms() -> Facts:
    """A prompt, and a prompt together with a decode step (chunked prefill)."""
    worker, engine, sequences = begun(
        [5, 9], enable_chunked_prefill=True, max_num_batched_tokens=96
    )
    before = stats(engine)
    other = Sequences([40], seed=5)
    other.blocks = [sorted({*range(1, 79)} - {b for own in sequences.blocks for b in own})[:3]]
    (prompt,) = other.groups(True)
    prompt.request_id, prompt.token_chunk_size = "new", 40
    prompt.seq_data = {7: prompt.seq_data[0]}
    prompt.block_tables = {7: prompt.block_tables[0]}
    mixed = step(worker, [prompt, *sequences.groups(False)])
    padded = mixed["input"].attn_metadata
    return {
        "before": before,
        "after": stats(engine),
        "tokens": len(mixed["tokens"]),
        "prefill tokens": padded.num_prefill_tokens,
        "graph": padded.use_cuda_graph,
        "experts": dict(engine.experts.calls),
    }


# -- what is told --------------------------------------------------------------------------------


def report() -> Facts:
    path = Path(tempfile.mkdtemp()) / "report.json"
    with log_records() as records:
        _, engine, _ = begun([5], variables={"report": str(path), "buckets": "1,4"})
    lines = [r["text"] for r in from_graphcap(records) if r["level"] == "INFO"]
    plain = json.loads(path.read_text())
    census = engine.manager.report.census
    return {
        "lines": lines,
        "plain": {
            name: plain[name] for name in ("host", "vllm", "rank", "moe_layers", "fallbacks")
        },
        "buckets": [b["size"] for b in plain["managers"]["decode"]["buckets"]],
        "recorder": plain["choice"]["recorder"],
        "census": {row.operation: row.count for row in census.rows},
        "pool": [plain["pool_bytes"], engine.pool.nbytes],
    }


def wrong_replay() -> Facts:
    """A recording that leaves out one operation: the step gets the eager result."""
    worker, engine, _ = begun([5], variables={"verify": "1"}, dtype="float16")
    groups = after_prefill(worker, [5, 9, 12], seed=3).groups(False)
    eager = eagerly(worker, groups)
    recording = engine.manager.recording(4)
    recording._entries, recording._stream = recording._entries[:-1], None
    with log_records() as records:
        steps = [step(worker, groups) for _ in range(2)]
    return {
        "tokens": [found["tokens"] == eager["tokens"] for found in steps],
        "told": dict(engine.reporter.fallbacks),
        "warnings": [r["text"] for r in from_graphcap(records) if r["level"] == "WARNING"],
        **stats(engine),
    }


SCENARIOS: dict[str, Callable[[], Any]] = {
    "every batch size": every_batch_size,
    "every batch size, checked": partial(every_batch_size, verify="1"),
    "generation": generation,
    "generation without graphs": partial(
        generation, variables={"recorder": "tape"}, enforce_eager=True
    ),
    "flash attention": flash_attention,
    "enforce_eager": enforce_eager,
    "enforce_eager, tape": partial(enforce_eager, recorder="tape"),
    "prefill": prefill_is_vllms,
    "report": report,
    "a wrong replay": wrong_replay,
}
