"""What an engine may have for which graphcap leaves it to vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _offloads(config: Any) -> bool:
    offload = getattr(config, "offload_config", None)
    if offload is not None:
        uva = getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0) or 0
        group = getattr(getattr(offload, "prefetch", None), "offload_group_size", 0) or 0
        return bool(uva or group)
    return bool(getattr(config.cache_config, "cpu_offload_gb", 0))


def _of_model(present: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda config: config.model_config is not None and present(config.model_config)


def _of_parallel(name: str, least: int = 1) -> Callable[[Any], Any]:
    """A field that a version may lack: a switch, or a size from `least` on."""
    return lambda config: (getattr(config.parallel_config, name, 0) or 0) >= least


ENFORCE_EAGER = (
    "--enforce-eager (no graphs were asked for; GRAPHCAP_RECORDER=tape replays decode without)"
)
"""Stands in the way of nothing where the tape was asked for."""

OBSTACLES: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("an engine without a model", lambda config: config.model_config is None),
    ("speculative decoding", lambda config: config.speculative_config is not None),
    ("LoRA adapters", lambda config: config.lora_config is not None),
    ("pipeline parallelism", _of_parallel("pipeline_parallel_size", 2)),
    ("data parallelism", _of_parallel("data_parallel_size", 2)),
    ("expert parallelism", _of_parallel("enable_expert_parallel")),
    ("expert load balancing (EPLB)", _of_parallel("enable_eplb")),
    ("dual batch overlap (DBO)", _of_parallel("enable_dbo")),
    ("context parallelism (DCP)", _of_parallel("decode_context_parallel_size", 2)),
    ("context parallelism (PCP)", _of_parallel("prefill_context_parallel_size", 2)),
    (
        "a KV transfer connector",
        lambda config: getattr(config, "kv_transfer_config", None) is not None,
    ),
    (
        "KV cache offloading",  # vLLM makes a connector of it, in its own checks
        lambda config: getattr(config.cache_config, "kv_offloading_size", None) is not None,
    ),
    ("weight offloading", lambda config: _offloads(config)),
    ("an encoder-decoder model", _of_model(lambda m: getattr(m, "is_encoder_decoder", False))),
    (
        "a pooling model",
        _of_model(lambda m: getattr(m, "runner_type", "generate") != "generate"),
    ),
    (ENFORCE_EAGER, _of_model(lambda m: m.enforce_eager)),
)
"""Features for which graphcap leaves an engine to vLLM: the name, and whether a `VllmConfig` has it."""


def obstacles(config: Any) -> list[str]:
    """The names in `OBSTACLES` of what `config` has."""
    return [name for name, present in OBSTACLES if present(config)]
