"""A vLLM engine on the CPU, in this process: starting it, what it decodes, what graphcap counts.

`serve` is a small life of a server; two engines that compute alike return alike from it. Whether graphcap
is on is the environment's business, before the first engine is started.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_SEQUENCES = 6
BLOCK = 32
PREFIX = 2 * BLOCK

NATIVE_NORMS = {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}
C_NORMS = {"rms_norm": ["graphcap_cpu"], "fused_add_rms_norm": ["graphcap_cpu"]}


def start(model: Path, *, norms: dict[str, list[str]] | None = None, **changes: Any) -> Any:
    """An `LLM`. Few blocks, so that six long requests do not fit, and chunked prefill."""
    from vllm import LLM

    if norms is not None:
        changes["kernel_config"] = {"ir_op_priority": norms}
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_model_len": 8 * BLOCK,
        "max_num_seqs": MOST_SEQUENCES,
        "max_num_batched_tokens": 48,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 20,
        "kv_cache_memory_bytes": 1 << 24,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    return LLM(model=str(model), **{**arguments, **changes})


def start_plain(model: Path, **changes: Any) -> Any:
    """An engine of vLLM's own that is not compiled, as one of graphcap's is not."""
    return start(model, enforce_eager=True, **changes)


def shut_down(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


def core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def runner(llm: Any) -> Any:
    return core(llm).model_executor.driver_worker.worker.model_runner


def capture(llm: Any) -> Any:
    """The runner's `EngineCapture`."""
    return runner(llm).model.engine


# -- requests ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    tokens: int
    seed: int | None = None

    def params(self) -> Any:
        from vllm import SamplingParams

        sampled = self.seed is not None
        return SamplingParams(
            temperature=0.8 if sampled else 0.0,
            top_p=0.9 if sampled else 1.0,
            seed=self.seed,
            max_tokens=self.tokens,
            ignore_eos=True,
            detokenize=False,
        )


def requests(
    count: int = 24, *, sampled: bool = False, seed: int = 7, least: int = 6, most: int = 24
) -> list[Request]:
    """Prompts of 1 to 60 tokens, answers of `least` to `most`. Sampled ones have short prompts, since
    vLLM itself cannot put back the random generator of a CPU, as it does after a part of a prompt."""
    draw = random.Random(seed)
    return [
        Request(
            [draw.randrange(512) for _ in range(draw.randint(1, 8 if sampled else 60))],
            draw.randint(least, most),
            index if sampled else None,
        )
        for index in range(count)
    ]


def decode(
    llm: Any,
    wanted: Sequence[Request],
    *,
    at_once: int = 3,
    abort_after: dict[int, int] | None = None,
) -> list[list[int]]:
    """The tokens of each request. `at_once` come first, then one every other step, so that batches
    grow, shrink and mix. `abort_after`: number of a request -> the step after which it is aborted."""
    engine, aborted = llm.llm_engine, dict(abort_after or {})
    done: dict[str, list[int]] = {}
    waiting = list(enumerate(wanted))

    def add() -> None:
        index, request = waiting.pop(0)
        engine.add_request(str(index), {"prompt_token_ids": request.prompt}, request.params())

    for _ in range(min(at_once, len(waiting))):
        add()
    step = 0
    while waiting or engine.has_unfinished_requests():
        if waiting and step % 2 == 0:
            add()
        for output in engine.step():
            if output.finished:
                done[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
        step += 1
        for index in [i for i, after in aborted.items() if after <= step]:
            del aborted[index]
            engine.abort_request([str(index)])
    return [done.get(str(index), []) for index in range(len(wanted))]


def serve(llm: Any) -> dict[str, Any]:
    """A small life of a server. Everything in the result is decided by the model's weights."""
    shared = requests(1, seed=1)[0].prompt * PREFIX
    again = [Request([*shared[:PREFIX], index], 12) for index in range(8)]
    preemptions: list[str] = []
    counted(core(llm).scheduler, "_preempt_request", preemptions)
    found: dict[str, Any] = {"greedy": decode(llm, requests())}
    found["sampled"] = decode(llm, requests(sampled=True, seed=8))
    found["aborted"] = decode(llm, requests(6, seed=9, least=20), abort_after={1: 4, 2: 9})
    found["one longer"] = decode(llm, [Request([5, 6, 7], 180), *requests(3, seed=10)])
    found["before preemption"] = len(preemptions)
    crowd = [Request([11 * index + 3] * 20, 110) for index in range(MOST_SEQUENCES)]
    found["crowd"] = decode(llm, crowd, at_once=MOST_SEQUENCES)
    found["preemptions"] = len(preemptions)
    found["batches"] = []
    for _ in range(2):
        outputs = llm.generate(
            [{"prompt_token_ids": request.prompt} for request in again],
            [request.params() for request in again],
            use_tqdm=False,
        )
        found["batches"].append([list(output.outputs[0].token_ids) for output in outputs])
        found["cached tokens"] = [output.num_cached_tokens for output in outputs]
    return found


# -- what is counted -----------------------------------------------------------------------------


def counted(owner: Any, name: str, calls: list[str]) -> None:
    """Have each call of ``owner.name`` added to `calls`."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def count_steps(llm: Any) -> dict[str, Counter[int]]:
    """Counts from now on the steps by what is scheduled: ``decode``, by sequences, where each gets one
    token, and ``other``, by tokens."""
    scheduler = core(llm).scheduler
    original: Callable[..., Any] = scheduler.schedule
    steps: dict[str, Counter[int]] = {"decode": Counter(), "other": Counter()}

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        tokens = output.num_scheduled_tokens.values()
        if tokens:
            alike = all(count == 1 for count in tokens)
            steps["decode" if alike else "other"][sum(tokens)] += 1
        return output

    scheduler.schedule = schedule
    return steps


def statistics(llm: Any) -> dict[str, Any]:
    """What graphcap's managers have counted."""
    managers = capture(llm).managers
    found = managers["decode"].stats()
    mixed = managers["mixed"].stats()
    return {
        "replays": found.replays,
        "buckets": {str(bucket.size): bucket.replays for bucket in found.buckets},
        "padding_rows": found.padding_rows,
        "rows": found.rows,
        "mixed": {str(bucket.size): bucket.replays for bucket in mixed.buckets},
        "mixed padding": mixed.padding_rows,
        "fallbacks": dict(Counter(found.fallbacks) + Counter(mixed.fallbacks)),
        "verified": [found.verified, mixed.verified],
        "failures": {str(size): text for size, text in found.failures.items()},
    }


def shared_counters() -> dict[str, Any]:
    """What the engines of this process have told the other processes of a server."""
    import os

    from graphcap.hosts.vllm.counter_directory import DIRECTORY_VARIABLE
    from graphcap.hosts.vllm.worker_counts import read_workers

    (worker,) = read_workers(Path(os.environ[DIRECTORY_VARIABLE])).values()
    return {
        "replays": sorted([*key, count] for key, count in worker.replays.items()),
        "mixed": pairs(worker.mixed),
        "fallbacks": dict(worker.fallbacks),
        "eager": pairs(worker.eager),
        "gauges": worker.gauges,
    }


def pairs(counts: Counter[int]) -> list[list[int]]:
    return sorted([key, count] for key, count in counts.items())


def prometheus() -> list[tuple[str, dict[str, str], float]]:
    """The samples that an endpoint of this server would show of graphcap."""
    from prometheus_client import CollectorRegistry

    from graphcap.hosts.vllm.metrics import GraphcapCollector

    registry = CollectorRegistry()
    registry.register(GraphcapCollector())
    families: Iterable[Any] = registry.collect()
    return [(s.name, s.labels, s.value) for family in families for s in family.samples]
