"""vLLM 0.6.3: steps that no recording serves, and engines that are left to vLLM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from v0.worker import MOST, eagerly, make_worker, start, step, turn_on

from scenarios.common import log_records, warnings_in
from scenarios.v0_decode import Facts, begun, difference, stats

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


SCENARIOS: dict[str, Callable[[], Any]] = {
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
}
