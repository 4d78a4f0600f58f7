"""Every feature for which an engine is left to vLLM is found by itself."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from graphcap.hosts.vllm.obstacles import ENFORCE_EAGER, OBSTACLES, obstacles

MODEL = SimpleNamespace(is_encoder_decoder=False, runner_type="generate", enforce_eager=False)
PLAIN = SimpleNamespace(
    model_config=MODEL,
    speculative_config=None,
    lora_config=None,
    parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
    cache_config=SimpleNamespace(),
)
"""A configuration with nothing that stands in the way, and none of the fields that a version may lack."""

FOUND = {
    "an engine without a model": ("model_config", None),
    "speculative decoding": ("speculative_config", object()),
    "LoRA adapters": ("lora_config", object()),
    "pipeline parallelism": ("parallel_config.pipeline_parallel_size", 2),
    "data parallelism": ("parallel_config.data_parallel_size", 2),
    "expert parallelism": ("parallel_config.enable_expert_parallel", True),
    "expert load balancing (EPLB)": ("parallel_config.enable_eplb", True),
    "dual batch overlap (DBO)": ("parallel_config.enable_dbo", True),
    "context parallelism (DCP)": ("parallel_config.decode_context_parallel_size", 2),
    "context parallelism (PCP)": ("parallel_config.prefill_context_parallel_size", 2),
    "a KV transfer connector": ("kv_transfer_config", object()),
    "KV cache offloading": ("cache_config.kv_offloading_size", 1.0),
    "weight offloading": ("cache_config.cpu_offload_gb", 4),
    "an encoder-decoder model": ("model_config.is_encoder_decoder", True),
    "a pooling model": ("model_config.runner_type", "pooling"),
    ENFORCE_EAGER: ("model_config.enforce_eager", True),
}
"""Name -> a field and a value with which it stands."""


def with_field(path: str, value: Any) -> SimpleNamespace:
    config = copy.deepcopy(PLAIN)
    *owners, name = path.split(".")
    owner = config
    for part in owners:
        owner = getattr(owner, part)
    setattr(owner, name, value)
    return config


def test_a_plain_engine_has_none():
    assert obstacles(PLAIN) == []


def test_all_are_tried_here():
    assert [name for name, _ in OBSTACLES] == list(FOUND)


@pytest.mark.parametrize("name", FOUND)
def test_each_is_found_and_named(name: str):
    assert obstacles(with_field(*FOUND[name])) == [name]


def test_newer_offloading():
    offload = SimpleNamespace(
        uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=2)
    )
    assert obstacles(with_field("offload_config", offload)) == ["weight offloading"]
    offload.prefetch.offload_group_size = 0
    assert obstacles(with_field("offload_config", offload)) == []
