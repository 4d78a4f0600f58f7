"""A worker of vLLM 0.6.3 on a CPU: its own Worker, ModelRunner, CacheEngine, XFormers backend, sampler
and Qwen2-MoE model, over the kernels of `v0.kernels`. Stood in for: what asks a CUDA device.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from scenarios.common import set_variables

MOST = 12
"""Sequences of the engines here: no multiple of eight, so that a ladder of eights would miss it."""

VOCABULARY = 256
BLOCK = 16
MAX_LENGTH = 96
"""Tokens of the longest sequence: six blocks."""

CACHE_BLOCKS = 80

MODEL: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_attention_heads": 2,  # of 64, the smallest head size of its paged attention
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}


def turn_on(**variables: str) -> None:
    """The plugin in this process, loaded as every process of vLLM loads it."""
    set_variables(
        {"GRAPHCAP": "1"} | {f"GRAPHCAP_{name.upper()}": v for name, v in variables.items()}
    )
    from vllm.plugins import load_general_plugins

    load_general_plugins()


@cache
def _without_cuda() -> None:
    """Answer for the device, and make a group of one rank."""
    import vllm.utils
    from vllm import ModelRegistry
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.models.qwen2_moe import Qwen2MoeForCausalLM

    # Known by name it would be looked at in a process that has none of what is stood in for here.
    ModelRegistry.register_model("Qwen2MoeForCausalLM", Qwen2MoeForCausalLM)
    vllm.utils.DeviceMemoryProfiler.current_memory_usage = lambda self: 0.0
    for module in list(sys.modules.values()):  # who imported it by name
        if hasattr(module, "is_pin_memory_available"):
            module.is_pin_memory_available = lambda: False
    rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
    init_distributed_environment(1, 0, rendezvous, 0, "gloo")
    ensure_model_parallel_initialized(1, 1, "gloo")


def make_worker(*, changes: dict[str, Any] | None = None, **args: Any) -> Any:
    """A worker whose model is loaded; its cache is not made and nothing is captured yet.

    Args:
        changes: of the model's configuration.
        args: of `EngineArgs`.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.worker.worker import Worker

    _without_cuda()
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps({**MODEL, **(changes or {})}))
    given = {
        "device": "cpu",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_num_seqs": MOST,
        "max_model_len": MAX_LENGTH,
        "block_size": BLOCK,
        **args,
    }
    config = EngineArgs(model=str(folder), **given).create_engine_config()
    config.model_config.hf_config.rope_scaling = None  # a newer transformers says "default"
    torch.manual_seed(0)
    worker = Worker(
        config.model_config,
        config.parallel_config,
        config.scheduler_config,
        config.device_config,
        config.cache_config,
        config.load_config,
        local_rank=0,
        rank=0,
        distributed_init_method="",
        lora_config=config.lora_config,
        prompt_adapter_config=config.prompt_adapter_config,
        is_driver_worker=True,
    )
    worker.device = torch.device("cpu")
    worker.load_model()
    _draw_weights(worker.model_runner.model)
    return worker


def _draw_weights(model: torch.nn.Module) -> None:
    """Dummy weights are so small that every token gets the same hidden state."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        values = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            weight.data.copy_(1 + 0.1 * values)
        else:
            weight.data.copy_(values * weight.shape[-1] ** -0.5)


def start(worker: Any) -> Any:
    """Make the cache and capture, as vLLM does after it has measured the memory. graphcap's engine, or
    None."""
    worker.initialize_cache(CACHE_BLOCKS, 0)
    return vars(worker.model_runner).get("graphcap_engine")


class Sequences:
    """Sequences of given lengths with random tokens, each with blocks of the cache of its own, up to
    `growth` more tokens."""

    def __init__(self, lengths: Sequence[int], seed: int = 0, growth: int = 4) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = [
            torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths
        ]
        order = (torch.randperm(CACHE_BLOCKS - 1, generator=generator) + 1).tolist()
        # Block 0 is nobody's.
        self.blocks = [[order.pop() for _ in range(-(-(n + growth) // BLOCK))] for n in lengths]

    def append(self, tokens: Sequence[int]) -> None:
        for sequence, token in zip(self.tokens, tokens, strict=True):
            sequence.append(token)

    def groups(self, is_prompt: bool, only: Sequence[int] | None = None) -> list[Any]:
        """What the scheduler hands to the model runner for the next step."""
        from vllm.sampling_params import SamplingParams
        from vllm.sequence import SequenceData, SequenceGroupMetadata

        found = []
        for number in only if only is not None else range(len(self.tokens)):
            data = SequenceData.from_seqs(self.tokens[number])
            if not is_prompt:
                data.update_num_computed_tokens(len(self.tokens[number]) - 1)
            found.append(
                SequenceGroupMetadata(
                    request_id=str(number),
                    is_prompt=is_prompt,
                    seq_data={number: data},
                    sampling_params=SamplingParams(temperature=0),
                    block_tables={number: self.blocks[number][: -(-data.get_len() // BLOCK)]},
                )
            )
        return found


def step(worker: Any, groups: list[Any]) -> dict[str, Any]:
    """One step through vLLM's own prepare_model_input and execute_model.

    Returns:
        ``tokens`` that the sampler chose, and ``hidden``: the states that went into the head.
    """
    runner = worker.model_runner
    kept: dict[str, torch.Tensor] = {}
    original = runner.model.compute_logits

    def compute_logits(hidden: torch.Tensor, metadata: Any) -> torch.Tensor:
        kept["hidden"] = hidden.clone()
        logits: torch.Tensor = original(hidden, metadata)
        return logits

    runner.model.compute_logits = compute_logits
    try:
        model_input = runner.prepare_model_input(groups)
        (output,) = runner.execute_model(model_input, worker.gpu_cache[0])
    finally:
        del runner.model.compute_logits
    tokens = [group.samples[0].output_token for group in output.outputs]
    return {"tokens": tokens, "hidden": kept["hidden"], "input": model_input}


def prefill(worker: Any, sequences: Sequences) -> dict[str, Any]:
    return step(worker, sequences.groups(is_prompt=True))


def eagerly(worker: Any, groups: list[Any], *, pooled: bool = True) -> dict[str, Any]:
    """The same step as vLLM runs it with --enforce-eager; the cache is afterwards as it was.

    `pooled`: its experts are graphcap's also here, as they are in an eager step; otherwise vLLM's own.
    """
    from graphcap.hosts.vllm.v0 import experts

    runner = worker.model_runner
    engine, caches = vars(runner).pop("graphcap_engine", None), worker.gpu_cache[0]
    saved = [cache.clone() for cache in caches]
    was, runner.model_config.enforce_eager = runner.model_config.enforce_eager, True
    serving = experts._engine
    if not pooled:
        experts._engine = None
    try:
        return step(worker, groups)
    finally:
        experts._engine = serving
        runner.model_config.enforce_eager = was
        if engine is not None:
            runner.graphcap_engine = engine
        for kept, contents in zip(caches, saved, strict=True):
            kept.copy_(contents)
