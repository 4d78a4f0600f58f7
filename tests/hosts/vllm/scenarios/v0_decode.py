"""vLLM 0.6.3's own worker, model runner and model, with decode steps through graphcap's manager."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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


# -- fallbacks -----------------------------------------------------------------------------------


def falls_back(
    lengths: list[int], change: Callable[[Any, Any], Any] | None = None, **given: Any
) -> Facts:
    """Two steps that no recording serves, the eager steps beside them, and what was said."""
    variables = given.pop("variables", {})
    worker, engine, sequences = begun(lengths, variables=variables, **given)
    if change is not None:
        change(worker, engine)
    found = []
    with log_records() as records:
        for _ in range(2):
            groups = sequences.groups(False)
            eager = eagerly(worker, groups)
            try:
                result = step(worker, groups)
            except Exception as error:
                return {"raised": [type(error).__name__, str(error)]}
            found.append(difference(result["hidden"], eager["hidden"]))
            sequences.append(result["tokens"])
    engine.reporter._counters.path  # noqa: B018  # there, whether or not anybody reads
    return {
        "differences": found,
        "warnings": warnings_in(records),
        "told": dict(engine.reporter.fallbacks),
        **stats(engine),
    }


def _rebind_weight(worker: Any, engine: Any) -> None:
    experts = worker.model_runner.model.model.layers[0].mlp.experts
    fresh = experts.w13_weight.data.flip(0).contiguous()
    experts.w13_weight = torch.nn.Parameter(fresh, requires_grad=False)


def _new_cache(worker: Any, engine: Any) -> None:
    worker.gpu_cache = [[cache.clone() for cache in worker.gpu_cache[0]]]


def _other_dtype(worker: Any, engine: Any) -> None:
    """A build of vLLM whose lengths are int64."""
    slots = engine.manager.inputs.slots
    slots["seq_lens"] = type(slots["seq_lens"])((), torch.int64)


def bucket_that_fails() -> Facts:
    """The model cannot be recorded for four rows."""
    from vllm.model_executor.models.qwen2_moe import Qwen2MoeModel

    forward = Qwen2MoeModel.forward

    def fails(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input_ids.shape[0] == 4:
            bool(input_ids.sum() > 0)  # the host looks at the device
        return forward(self, input_ids, *args, **kwargs)

    Qwen2MoeModel.forward = fails
    with log_records() as records:
        found = falls_back([4, 5, 6])
    return {**found, "at capture": warnings_in(records)}


def invisible_operation() -> Facts:
    """A kernel behind the back of torch's dispatcher that is no operation: verification sees it."""
    turn_on(kernels="reference")
    from vllm import _custom_ops

    _custom_ops.rms_norm = _custom_ops.rms_norm.__wrapped__
    with log_records() as records:
        found = falls_back([4, 5, 6])
    return {**found, "at capture": warnings_in(records)}


def another_rank_fails() -> Facts:
    """Bucket 8 cannot be recorded on another rank of two."""
    turn_on(kernels="reference")
    from graphcap.hosts.vllm.v0 import engine

    asked: list[bool] = []

    def agreed(mine: bool) -> bool:
        asked.append(mine)
        return len(asked) != 2

    init = engine.DecodeEngine.__init__

    def of_two(self: Any, choice: Any, settings: Any, runner: Any, caches: Any) -> None:
        parallel = runner.parallel_config
        runner.parallel_config = SimpleNamespace(tensor_parallel_size=2)
        init(self, choice, settings, runner, caches)
        runner.parallel_config = parallel

    engine.agreed, engine.DecodeEngine.__init__ = agreed, of_two
    with log_records() as records:
        found = falls_back([4, 5, 6])
    return {**found, "asked": asked, "at capture": warnings_in(records)}


# -- left to vLLM --------------------------------------------------------------------------------


def obstacles() -> Facts:
    """What `decide` says of a runner with each feature; and of one with none."""
    turn_on(kernels="reference")
    from graphcap.hosts.vllm.v0.choice import decide
    from graphcap.settings import Settings

    worker = make_worker(dtype="bfloat16")
    runner, settings = worker.model_runner, Settings.from_env()

    class Plans:
        """An attention state of its own kind, as FlashInfer's is."""

    class Drafts:
        def forward(self, input_ids: Any, previous_hidden_states: Any) -> None: ...

    found: Facts = {"none": decide(runner, settings).to_plain()}
    changes: dict[str, tuple[Any, str, Any]] = {
        "pooling": (runner.scheduler_config, "embedding_mode", True),
        "encoder-decoder": (runner.model_config.hf_config, "is_encoder_decoder", True),
        "multi-step": (runner.scheduler_config, "num_scheduler_steps", 8),
        "speculative": (runner.scheduler_config, "num_lookahead_slots", 4),
        "drafts": (runner, "model", Drafts()),
        "hidden states": (runner, "return_hidden_states", True),
        "LoRA": (runner, "lora_config", object()),
        "prompt adapters": (runner, "prompt_adapter_config", object()),
        "pipeline": (runner.parallel_config, "pipeline_parallel_size", 2),
        "offloading": (runner.cache_config, "cpu_offload_gb", 4),
        "state": (runner, "has_inner_state", True),
        "attention": (runner, "attn_state", Plans()),
        "eager": (runner.model_config, "enforce_eager", True),
    }
    for name, (owner, attribute, value) in changes.items():
        before = getattr(owner, attribute)
        vars(owner)[attribute] = value
        if isinstance(owner, torch.nn.Module):
            setattr(owner, attribute, value)
        found[name] = list(decide(runner, settings).why_not)
        setattr(owner, attribute, before)
    found["other runner"] = list(decide(SimpleNamespace(), settings).why_not)
    found["put back"] = decide(runner, settings).taken
    return found


def left_to_vllm() -> Facts:
    """An engine with prompt adapters captures as vLLM does, which needs a device."""
    turn_on(kernels="reference")
    worker = make_worker(dtype="bfloat16")
    worker.model_runner.prompt_adapter_config = object()
    with log_records() as records:
        try:
            start(worker)
        except Exception as error:
            raised = str(error)
    return {"raised": raised, "warnings": warnings_in(records)}


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
    "above max": partial(falls_back, [4] * (MOST + 1)),
    "above max, strict": partial(falls_back, [4] * (MOST + 1), variables={"strict": "1"}),
    "long sequence": partial(falls_back, [5, 40], max_seq_len_to_capture=32),
    "rebound weight": partial(falls_back, [5, 9], _rebind_weight),
    "new cache": partial(falls_back, [5, 9], _new_cache),
    "other dtype": partial(falls_back, [5, 9], _other_dtype),
    "bucket that fails": bucket_that_fails,
    "invisible operation": invisible_operation,
    "another rank fails": another_rank_fails,
    "obstacles": obstacles,
    "left to vLLM": left_to_vllm,
    "report": report,
}
