"""Measure one vLLM engine in one mode: start-up, decode, a mixed load, host calls. One process each.

    python bench/vllm_engine.py --mode graphcap --layers 64 --batches 1,8,32 --mixed --census
    python bench/vllm_modes.py --out bench/results/NAME.json     all modes, one after the other

Weights are normally scaled random values, drawn on the device after vLLM's dummy loading (in place, so
that recordings stay valid): every layer has its own, and routing varies. Prints one line `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median, quantiles
from typing import Any

MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "default": {},
    "decode-only": {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0}},
    "full": {"compilation_config": {"cudagraph_mode": "FULL", "mode": 0}},
    "graphcap": {},
    "no-plans": {},
    "tape": {"enforce_eager": True},
    "tape-vllm": {"enforce_eager": True},
}
"""What each mode asks of vLLM. ``tape-vllm``: the experts' kernels are vLLM's, so tokens must be eager's."""
TAPE = {"GRAPHCAP": "1", "GRAPHCAP_RECORDER": "tape"}
VARIABLES: dict[str, dict[str, str]] = {
    "graphcap": {"GRAPHCAP": "1"},
    "no-plans": {"GRAPHCAP": "1", "GRAPHCAP_SCHEDULE": "plain"},
    "tape": TAPE,
    "tape-vllm": {**TAPE, "GRAPHCAP_KERNELS": "vllm"},
}
VOCABULARY = 151_936


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=list(MODES), required=True)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=64, help="between the short and the long run")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--max-seqs", type=int, default=32)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--mixed", action="store_true", help="also a load of arriving requests")
    parser.add_argument("--rate", type=float, default=16.0, help="of that load, requests a second")
    parser.add_argument("--requests", type=int, default=96, help="of that load")
    parser.add_argument("--census", action="store_true", help="also count host calls a token")
    parser.add_argument("--backend", default="TRITON_ATTN")
    return parser.parse_args()


def write_config(folder: Path, layers: int, experts: int) -> None:
    """The shape `seed-64`: hidden 2048, 16 query and 2 key-value heads of 128, top-8 of 512 wide."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "hidden_size": 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 512,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))


def draw_weights(worker: Any) -> None:
    """Run in each worker: fill the weights in place. Projections into the residual stream are scaled
    down, so that 64 layers do not drown the embedding."""
    import torch

    model = worker.model_runner.get_model()
    generator = torch.Generator("cuda").manual_seed(7)
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue
        std = 0.004 if ("o_proj" in name or "w2_weight" in name) else 0.03
        for part in weight.data.split(16) if weight.dim() == 3 else (weight.data,):
            part.normal_(0, std, generator=generator)
    torch.cuda.synchronize()


class Lines(logging.Handler):
    """Keeps vLLM's log lines, of which some are measurements."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def number(self, pattern: str) -> float | None:
        for line in self.lines:
            found = re.search(pattern, line)
            if found:
                return float(found[1])
        return None


def main() -> None:
    args = arguments()
    # In process, so that its log lines and, with one card, its host calls are seen.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # draw_weights travels to the workers
    os.environ["GRAPHCAP"] = "0"
    os.environ.update(VARIABLES.get(args.mode, {}))
    import torch
    from vllm import LLM

    lines = Lines()
    logging.getLogger("vllm").addHandler(lines)
    folder = Path(tempfile.mkdtemp())
    write_config(folder, args.layers, args.experts)
    began = time.perf_counter()
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=args.max_seqs,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.9,
        attention_config={"backend": args.backend},
        tensor_parallel_size=args.tp,
        enable_prefix_caching=False,
        seed=0,
        **MODES[args.mode],
    )
    result: dict[str, Any] = {
        "mode": args.mode,
        "layers": args.layers,
        "tp": args.tp,
        "engine_s": time.perf_counter() - began,
        "ready_s": lines.number(r"init engine .* took ([\d.]+) s"),
        "weights_s": lines.number(r"Model loading took .* and ([\d.]+) seconds"),
        "graph_gib": lines.number(r"Graph capturing finished .* took (-?[\d.]+) GiB"),
        "batches": {},
    }
    llm.collective_rpc(draw_weights)
    for batch in map(int, args.batches.split(",")):
        result["batches"][batch] = decode(llm, batch, args.tokens, args.pairs)
        print(args.mode, "batch", batch, result["batches"][batch], flush=True)
    result["tokens"], result["gaps"] = greedy(llm, 64)
    if args.mixed:
        result["mixed"] = mixed_load(llm, args.requests, args.rate)
        print(args.mode, "mixed", result["mixed"], flush=True)
    if args.census and args.tp == 1:
        result["census"] = census(llm, torch)
    result["graphcap"] = [line for line in lines.lines if "graphcap" in line]
    print("RESULT", json.dumps(result), flush=True)


def prompt(seed: int, length: int) -> dict[str, Any]:
    draw = random.Random(seed)
    return {"prompt_token_ids": [draw.randrange(10, 50_000) for _ in range(length)]}


def sampling(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def decode(llm: Any, batch: int, tokens: int, pairs: int) -> dict[str, float]:
    """Milliseconds a token: (long run − short run) / extra tokens, so that prefill cancels."""

    def seconds(count: int) -> float:
        prompts = [prompt(1000 * batch + i, 32) for i in range(batch)]
        began = time.perf_counter()
        llm.generate(prompts, sampling(count), use_tqdm=False)
        return time.perf_counter() - began

    for count in (4, 4 + tokens):  # kernels are compiled at their first batch and length
        seconds(count)
    each = [(seconds(4 + tokens) - seconds(4)) / tokens * 1e3 for _ in range(pairs)]
    ms = median(each)
    return {"ms": ms, "tokens_per_s": batch / ms * 1e3, "low_ms": min(each), "high_ms": max(each)}


def greedy(llm: Any, tokens: int) -> tuple[list[int], list[float]]:
    """Tokens of one request, and how far the two likeliest were apart at each (log-probabilities)."""
    from vllm import SamplingParams

    wanted = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=2
    )
    (output,) = llm.generate([prompt(77, 32)], wanted, use_tqdm=False)
    best = [
        sorted((entry.logprob for entry in step.values()), reverse=True)
        for step in output.outputs[0].logprobs
    ]
    return list(output.outputs[0].token_ids), [top[0] - top[1] for top in best]


def mixed_load(llm: Any, requests: int, rate: float) -> dict[str, float]:
    """Requests that arrive at random times, prompts of 32 to 512 tokens, 64 tokens each."""
    return [_load(llm, requests, rate, seed) for seed in (1, 2)][1]  # the first one warms up


def _load(llm: Any, requests: int, rate: float, seed: int) -> dict[str, float]:
    draw, engine = random.Random(seed), llm.llm_engine
    at, waiting = 0.0, []
    for index in range(requests):
        at += draw.expovariate(rate)
        waiting.append((at, f"{seed}.{index}", prompt(index, draw.randint(32, 512))))
    arrived: dict[str, float] = {}
    first: dict[str, float] = {}
    tokens, began = 0, time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        now = time.perf_counter() - began
        while waiting and waiting[0][0] <= now:
            due, name, given = waiting.pop(0)
            arrived[name] = due
            engine.add_request(name, given, sampling(64))
        if not engine.has_unfinished_requests():
            time.sleep(0.0005)
            continue
        for output in engine.step():
            name = next(
                (n for n in (output.request_id, output.request_id.split("-")[0]) if n in arrived),
                None,
            )
            if name is not None and name not in first:
                first[name] = time.perf_counter() - began
            if output.finished:
                tokens += len(output.outputs[0].token_ids)
    took = time.perf_counter() - began
    waits = sorted((first[name] - arrived[name]) * 1e3 for name in arrived)
    cuts = quantiles(waits, n=100, method="inclusive")
    return {
        "tokens_per_s": tokens / took,
        "ttft_p50_ms": cuts[49],
        "ttft_p99_ms": cuts[98],
        "seconds": took,
    }


def census(llm: Any, torch: Any) -> dict[str, Any]:
    """Host calls and device operations of one token at batch 1."""

    def count(tokens: int) -> tuple[Counter[str], Counter[str], float]:
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as run:
            llm.generate([prompt(1, 32)], sampling(tokens), use_tqdm=False)
            torch.cuda.synchronize()
        host: Counter[str] = Counter()
        device: Counter[str] = Counter()
        micros = 0.0
        for event in run.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                device[event.name] += 1
                micros += event.device_time_total
            elif event.name.startswith(("cuda", "cuLaunch", "cuMem", "cuGraph")):
                host[event.name] += 1
        return host, device, micros

    count(4)
    (h0, d0, m0), (h1, d1, m1) = count(4), count(20)

    def per(new: Counter[str], old: Counter[str]) -> dict[str, float]:
        return {name: (new[name] - old[name]) / 16 for name in new if new[name] != old[name]}

    kernels = sorted(per(d1, d0).items(), key=lambda item: -item[1])
    return {
        "host_calls": per(h1, h0),
        "device_operations": (d1.total() - d0.total()) / 16,
        "device_us": (m1 - m0) / 16,
        "kernels": {name[:90]: times for name, times in kernels[:40]},
    }


if __name__ == "__main__":
    main()
