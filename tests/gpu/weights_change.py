"""Serve, and change the weights under the recordings in every way that vLLM has; print the tokens of each.

    python weights_change.py --model FOLDER [--eager]

Prints one line ``RESULT {...}``: the tokens after each change, and graphcap's replays and fallbacks
during each. Whether graphcap is on is the environment's business.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions travel to the worker


def in_place(worker: Any) -> None:
    import torch

    model = worker.model_runner.get_model()
    generator = torch.Generator("cuda").manual_seed(5)
    for weight in model.parameters():
        if weight.dim() >= 2:
            factor = torch.rand(weight.shape, generator=generator, device="cuda") * 0.4 + 0.8
            weight.data.mul_(factor.to(weight.dtype))


def rebind(worker: Any) -> None:
    layer = worker.model_runner.get_model().model.layers[0]
    weight = layer.self_attn.o_proj.weight
    weight.data = weight.data.flip(0).clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=args.model,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=16,
        kv_cache_memory_bytes=1_000_000_000,
        enforce_eager=args.eager,
        enable_prefix_caching=False,
        enable_sleep_mode=True,
        attention_config={"backend": "TRITON_ATTN"},
        seed=0,
    )
    draw = random.Random(3)
    prompts = [
        {"prompt_token_ids": [draw.randrange(2, 2048) for _ in range(draw.randint(4, 64))]}
        for _ in range(12)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False)
    result: dict[str, Any] = {}

    def serve(name: str, change: Callable[[], object]) -> None:
        change()
        before = counts(llm)
        tokens = [
            list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)
        ]
        after = counts(llm)
        result[name] = {"tokens": tokens, "replays": after[0] - before[0], "fallbacks": after[1]}

    def sleep_and_wake() -> None:
        llm.sleep(level=1)
        llm.wake_up()

    def discard_and_reload() -> None:
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])

    serve("start", lambda: None)
    serve("sleep and wake", sleep_and_wake)
    serve("in place", lambda: llm.collective_rpc(in_place))
    serve("reload", lambda: llm.collective_rpc("reload_weights"))
    serve("discard and reload", discard_and_reload)
    serve("rebind", lambda: llm.collective_rpc(rebind))
    print("RESULT", json.dumps(result), flush=True)


def counts(llm: Any) -> tuple[int, dict[str, int]]:
    """Replays and fallbacks of decode so far; zero where graphcap is off."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    runner = executor.driver_worker.worker.model_runner
    engine = getattr(runner.model, "engine", None)
    if engine is None:
        held = getattr(getattr(runner, "cudagraph_manager", None), "graphcap_model", None)
        engine = None if held is None else held.engine
    if engine is None:
        return 0, {}
    stats = engine.managers["decode"].stats()
    return stats.replays, dict(stats.fallbacks)


if __name__ == "__main__":
    main()
