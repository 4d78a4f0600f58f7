"""Run vLLM in this process on requests that arrive over time, and print what came out as JSON.

    python arrivals.py --model FOLDER --requests 64 --tokens 128 --max-seqs 32 [--eager] [--sampled]

Prints one line ``RESULT {...}``: the tokens of each request, the gap between the two most likely tokens at
each step (a near-tie is where two correct engines may part), and graphcap's report where it has one.
Whether graphcap is on is the environment's business (``GRAPHCAP=1``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--max-seqs", type=int, default=8)
    parser.add_argument("--longest-prompt", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--sampled", action="store_true", help="seeded sampling, not greedy")
    parser.add_argument("--logprobs", action="store_true", help="record the gaps of near-ties")
    parser.add_argument("--varied", action="store_true", help="answers of 1/4 to all of --tokens")
    parser.add_argument("--memory", type=float, default=0.1)
    parser.add_argument("--backend", default=None)
    parser.add_argument("--engine", default="{}", help="more engine arguments, as JSON")
    return parser.parse_args()


def run(args: argparse.Namespace) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    extra: dict[str, Any] = json.loads(args.engine)
    if args.backend:
        extra["attention_config"] = {"backend": args.backend}
    began = time.perf_counter()
    llm = LLM(
        model=args.model,
        skip_tokenizer_init=True,
        max_model_len=args.longest_prompt + args.tokens + 8,
        max_num_seqs=args.max_seqs,
        gpu_memory_utilization=args.memory,
        enforce_eager=args.eager,
        enable_prefix_caching=False,
        seed=0,
        **extra,
    )
    start_s = time.perf_counter() - began
    draw = random.Random(7)
    waiting = []
    for index in range(args.requests):
        length = draw.randint(1, args.longest_prompt)
        prompt = [draw.randrange(2, args.vocab) for _ in range(length)]
        tokens = draw.randint(args.tokens // 4, args.tokens) if args.varied else args.tokens
        params = SamplingParams(
            temperature=0.8 if args.sampled else 0.0,
            top_p=0.9 if args.sampled else 1.0,
            seed=index if args.sampled else None,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=2 if args.logprobs else None,
        )
        waiting.append((index, prompt, params))
    engine, done, steps = llm.llm_engine, {}, 0
    # A few at once, then one request every third step: batches of every size, growing, shrinking, mixed.
    for index, prompt, params in waiting[: args.max_seqs // 8]:
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    waiting = waiting[args.max_seqs // 8 :]
    while waiting or engine.has_unfinished_requests():
        if waiting and steps % 3 == 0:
            index, prompt, params = waiting.pop(0)
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        for output in engine.step():
            if output.finished:
                done[int(output.request_id.split("-")[0])] = output.outputs[0]
        steps += 1
    result: dict[str, Any] = {
        "start_s": start_s,
        "steps": steps,
        "tokens": [list(done[i].token_ids) for i in range(args.requests)],
    }
    if args.logprobs:
        result["gaps"] = [
            [_gap(step) for step in done[i].logprobs or ()] for i in range(args.requests)
        ]
    result["graphcap"] = _graphcap(llm)
    return result


def _gap(step: Any) -> float:
    best = sorted((entry.logprob for entry in step.values()), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")


def _graphcap(llm: Any) -> dict[str, Any] | None:
    """Statistics of the plugin's managers; None where it is off."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    if not hasattr(executor, "driver_worker"):  # workers are processes of their own
        return None
    runner = executor.driver_worker.worker.model_runner
    engine = getattr(runner.model, "engine", None)
    if engine is None:
        held = getattr(getattr(runner, "cudagraph_manager", None), "graphcap_model", None)
        engine = None if held is None else held.engine
    if engine is None:
        return None
    stats = {kind: manager.stats() for kind, manager in engine.managers.items()}
    return {
        kind: {
            "replays": found.replays,
            "fallbacks": dict(found.fallbacks),
            "padding_rows": found.padding_rows,
            "buckets": {b.size: b.replays for b in found.buckets},
            "verified": found.verified,
        }
        for kind, found in stats.items()
    } | {
        "layers": dict(engine.experts.layers),
        "plans": {
            rows: [choice.source, choice.lacks, *sorted(choice.plan.in_cuda)]
            for rows, choice in engine.experts.plans.items()
        },
        "pool_bytes": engine.pool.nbytes,
        "nodes": {
            kind: max((b.nodes for b in manager.report.buckets), default=0)
            for kind, manager in engine.managers.items()
        },
        "seconds": sum(m.report.seconds for m in engine.managers.values()),
        "graph_bytes": sum(m.report.graph_bytes for m in engine.managers.values()),
        "failures": {
            kind: {str(k): v for k, v in found.failures.items()} for kind, found in stats.items()
        },
    }


if __name__ == "__main__":
    print("RESULT", json.dumps(run(arguments())), flush=True)
