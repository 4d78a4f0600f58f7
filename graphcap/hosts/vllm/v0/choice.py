"""Whether an engine of vLLM 0.6.3 is taken, and with which buckets.

Decided when its model runner would capture: there everything is known, and nothing travels to another
process. What is decided is a `Choice`, as for newer versions of vLLM.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from graphcap.buckets import BucketLadder
from graphcap.hosts.vllm.choice import Choice
from graphcap.settings import Settings

GRAPH_INPUTS = ("_graph_slot_mapping", "_graph_seq_lens", "_graph_block_tables")
"""Where `CommonAttentionState` keeps the inputs of its graphs while it captures."""


def _backend(runner: Any) -> str:
    return "none" if runner.attn_backend is None else str(runner.attn_backend.get_name())


def _compiles(runner: Any) -> bool:
    from vllm import envs

    return int(envs.VLLM_TORCH_COMPILE_LEVEL) > 0


def _speculates(runner: Any) -> bool:
    ahead = runner.scheduler_config.num_lookahead_slots > 0
    draft = "previous_hidden_states" in inspect.signature(runner.model.forward).parameters
    return ahead or draft or bool(runner.return_hidden_states)


OBSTACLES: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("a pooling model", lambda r: r.scheduler_config.embedding_mode),
    (
        "an encoder-decoder model (cross attention)",
        lambda r: r.model_config.is_encoder_decoder_model,
    ),
    ("multi-step scheduling", lambda r: r.scheduler_config.is_multi_step),
    ("speculative decoding", _speculates),
    ("LoRA adapters", lambda r: r.lora_config is not None),
    ("prompt adapters", lambda r: r.prompt_adapter_config is not None),
    ("pipeline parallelism", lambda r: r.parallel_config.pipeline_parallel_size > 1),
    ("weight offloading", lambda r: r.cache_config.cpu_offload_gb > 0),
    ("a model with a recurrent state", lambda r: r.has_inner_state),
    ("positions of several dimensions (M-RoPE)", lambda r: r.model_is_mrope),
    ("torch.compile (VLLM_TORCH_COMPILE_LEVEL)", _compiles),
)
"""Features for which graphcap leaves an engine to vLLM: the name, and whether a model runner has it."""


def decide(runner: Any, settings: Settings) -> Choice:
    """Decide for a model runner whose model is loaded. Changes nothing."""
    from vllm.attention.backends.utils import CommonAttentionState
    from vllm.worker.model_runner import ModelRunner

    if not isinstance(runner, ModelRunner):
        return Choice(False, (f"its model runner is {type(runner).__name__}",))
    why_not = [name for name, present in OBSTACLES if present(runner)]
    if not isinstance(runner.attn_state, CommonAttentionState):
        why_not.append(
            f"the attention backend {_backend(runner)}, which plans each step on the host"
        )
    eager = bool(runner.model_config.enforce_eager)
    if eager and settings.recorder != "tape":
        why_not.append(
            "--enforce-eager (no graphs were asked for); with GRAPHCAP_RECORDER=tape graphcap replays "
            "the decode step without one"
        )
    if why_not:
        return Choice(False, tuple(why_not), kernels=settings.kernels)
    most = min(runner.scheduler_config.max_num_seqs, runner.max_batchsize_to_capture)
    return Choice(
        taken=True,
        decode=tuple(BucketLadder.parse(settings.buckets, most)),
        left_alone=("--enforce-eager",) if eager else (),
        recorder="tape" if settings.recorder == "tape" else "cuda",
        kernels=settings.kernels,
    )
