"""How the plugin rewrites a configuration, on a platform that says it is an H200 (or an A100)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from scenarios.common import (
    Records,
    compilation,
    engine_config,
    from_graphcap,
    log_records,
    set_variables,
    turn_on,
)

ROWS: dict[str, dict[str, Any]] = {
    "nothing set": {},
    "dense": {"kind": "qwen3"},
    "hybrid": {"kind": "qwen3_next"},
    "tensor parallel": {"tensor_parallel_size": 2},
    # Attention.
    "TRITON_ATTN": {"attention_config": {"backend": "TRITON_ATTN"}},
    "FLASH_ATTN": {"attention_config": {"backend": "FLASH_ATTN"}},
    "FLASHINFER": {"attention_config": {"backend": "FLASHINFER"}},
    "A100": {"capability": (8, 0)},
    "A100, FLASH_ATTN": {"capability": (8, 0), "attention_config": {"backend": "FLASH_ATTN"}},
    "A100, TRITON_ATTN": {"capability": (8, 0), "attention_config": {"backend": "TRITON_ATTN"}},
    # Modes.
    "FULL": compilation(cudagraph_mode="FULL"),
    "FULL_DECODE_ONLY": compilation(cudagraph_mode="FULL_DECODE_ONLY"),
    "FULL_DECODE_ONLY, mode 0": compilation(cudagraph_mode="FULL_DECODE_ONLY", mode=0),
    "FULL_DECODE_ONLY, mode 3": compilation(cudagraph_mode="FULL_DECODE_ONLY", mode=3),
    "FULL_AND_PIECEWISE": compilation(cudagraph_mode="FULL_AND_PIECEWISE"),
    "mode 0": compilation(mode=0),
    "mode 3": compilation(mode=3),
    "optimization level 1": {"optimization_level": 1},
    # Sizes.
    "sizes": compilation(cudagraph_capture_sizes=[8, 1, 4, 2, 8]),
    "sizes beyond a batch": compilation(cudagraph_capture_sizes=[4, 16, 64, 16384]),
    "sizes, A100": {**compilation(cudagraph_capture_sizes=[4, 64]), "capability": (8, 0)},
    "largest size": compilation(max_cudagraph_capture_size=20),
    "largest size, A100": {**compilation(max_cudagraph_capture_size=48), "capability": (8, 0)},
    "GRAPHCAP_BUCKETS": {"variables": {"buckets": "1,2,64"}},
    "64 sequences": {"variables": {"buckets": "1,2,64"}, "max_num_seqs": 64},
    "13 sequences": {"max_num_seqs": 13},
    "few tokens": {"max_num_batched_tokens": 40, "max_model_len": 40},
    "short sequences": {"max_model_len": 16},
    # graphcap's own.
    "tape": {"variables": {"recorder": "tape"}},
    "reference kernels": {"variables": {"kernels": "reference"}},
    "additional_config": {"additional_config": {"mine": 1}},
}
"""Engines that graphcap takes."""

NOT_TAKEN: dict[str, dict[str, Any]] = {
    "enforce_eager": {"enforce_eager": True},
    "optimization level 0": {"optimization_level": 0},
    "PIECEWISE": compilation(cudagraph_mode="PIECEWISE"),
    "NONE": compilation(cudagraph_mode="NONE"),
    "FULL, mode 3": compilation(cudagraph_mode="FULL", mode=3),
    "FULL, A100": {**compilation(cudagraph_mode="FULL"), "capability": (8, 0)},
    "FULL_AND_PIECEWISE, mode 0": compilation(cudagraph_mode="FULL_AND_PIECEWISE", mode=0),
    "sizes above the sequences": compilation(cudagraph_capture_sizes=[64, 128]),
    "tape, mode 3": {"variables": {"recorder": "tape"}, **compilation(mode=3)},
    "tape, FULL_AND_PIECEWISE": {
        "variables": {"recorder": "tape"},
        **compilation(cudagraph_mode="FULL_AND_PIECEWISE"),
    },
    "speculative decoding": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 3,
        }
    },
    "LoRA": {"enable_lora": True},
    "pipeline parallelism": {"pipeline_parallel_size": 2},
    "data parallelism": {"data_parallel_size": 2},
    "expert parallelism": {"enable_expert_parallel": True},
    "context parallelism": {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
    "KV connector": {
        "kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    },
    "KV offloading": {"kv_offloading_size": 1.0},
    "weight offloading": {"cpu_offload_gb": 1},
    "pooling": {"runner": "pooling"},
    "two of them": {"enable_lora": True, "enforce_eager": True},
}


def _engine(
    on: bool = True,
    variables: dict[str, str] | None = None,
    capability: tuple[int, int] = (9, 0),
    **args: Any,
) -> Any:
    from pretend_h200 import PretendH200Platform
    from vllm.platforms.interface import DeviceCapability

    PretendH200Platform.get_device_capability = classmethod(
        lambda cls, device_id=0: DeviceCapability(*capability)
    )
    PretendH200Platform.device_count = classmethod(lambda cls: 8)
    if on:
        turn_on(**(variables or {}))
    else:
        set_variables({"VLLM_PLUGINS": "graphcap_test_platform"})
    return engine_config(**args)


def configured(**row: Any) -> dict[str, Any]:
    with log_records() as records:
        config = _engine(**row)
    return _described(config, records)


def _described(config: Any, records: Records) -> dict[str, Any]:
    settings = config.compilation_config
    choice = (config.additional_config or {}).get("graphcap")
    return {
        "choice": choice,
        "mode": settings.mode.name,
        "cudagraph_mode": settings.cudagraph_mode.name,
        "sizes": settings.cudagraph_capture_sizes,
        "largest": settings.max_cudagraph_capture_size,
        "additional": {k: v for k, v in config.additional_config.items() if k != "graphcap"},
        "hash": config.compute_hash(),
        "lines": [line for line in from_graphcap(records) if "graphcap is on" not in line["text"]],
    }


# -- a configuration that goes on ----------------------------------------------------------------


def decided_once() -> dict[str, Any]:
    """A configuration is sent to the engine's process, and copied for a part of the model."""
    turn_on()
    from graphcap.hosts.vllm import install

    decisions = []
    decide = install.decide

    def counted(*args: Any, **kwargs: Any) -> Any:
        decisions.append(args)
        return decide(*args, **kwargs)

    install.decide = counted
    with log_records() as records:
        config = engine_config()
        first = _described(config, records)
        sent = pickle.loads(pickle.dumps(config))
        copied = sent.with_hf_config(sent.model_config.hf_config)
    return {
        "decisions": len(decisions),
        "first": first,
        "sent": _described(sent, records),
        "copied": _described(copied, records),
    }


def other_additional_config() -> dict[str, Any]:
    """`additional_config` can be an object of a platform's own."""

    class Theirs:
        def compute_hash(self) -> str:
            return "theirs"

    with log_records() as records:
        turn_on()
        config = engine_config(additional_config=Theirs())
    return {
        "type": type(config.additional_config).__name__,
        "lines": [line["text"] for line in from_graphcap(records)],
    }


def vllm_ends_elsewhere() -> dict[str, Any]:
    """vLLM's own checks come to a mode without full graphs, after graphcap has decided."""
    from vllm.config import CUDAGraphMode, VllmConfig

    own = VllmConfig.__post_init__
    parts: list[tuple[Any, Any]] = []

    def post_init(self: Any) -> None:
        parts.append((self.compilation_config, self.kernel_config))
        own(self)
        self.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
        if len(parts) == 1:
            self.kernel_config.ir_op_priority.rms_norm = ["of the first time"]

    VllmConfig.__post_init__ = post_init
    found = configured()
    assert len(parts) == 2  # and as VllmConfig's own checks ran again, so did ours
    found["same objects"] = [now is then for now, then in zip(*parts, strict=True)]
    found["norms"] = parts[1][1].ir_op_priority.rms_norm
    return found


SCENARIOS: dict[str, Callable[[], Any]] = {
    **{name: partial(configured, **row) for name, row in {**ROWS, **NOT_TAKEN}.items()},
    **{
        f"{name}, without graphcap": partial(configured, on=False, **row)
        for name, row in NOT_TAKEN.items()
    },
    "decided once": decided_once,
    "other additional_config": other_additional_config,
    "vLLM ends elsewhere": vllm_ends_elsewhere,
}
