"""vLLM's CPU platform: the first model runner with the tape as recorder.

vLLM has no graphs on CPUs, so it does not pad batches there and never captures. Both are turned on:
decode batches and small mixed ones are padded to a bucket as for full graphs, and the tape is recorded at
the end of the worker's start. Attention and cache update read the metadata of the step on the host; on
the tape they are operations that are called live.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention import attention
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from graphcap.hosts.vllm.capture_v1 import capture_full, finish_capture
from graphcap.hosts.vllm.patching import wrap
from graphcap.hosts.vllm.wrapper_v1 import StepWrapper, taken
from graphcap.recorders.base import garbage_collection_held
from graphcap.recorders.bindings import implemented_by


def _load_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: this runner has a load_model of its own, which wraps nothing."""
    result = original(self, *args, **kwargs)
    if taken(self.vllm_config) is not None and not isinstance(self.model, StepWrapper):
        self.model = StepWrapper(self.model, self.vllm_config, self)
    return result


def _get_model(original: Any, self: Any) -> Any:
    """Why: here get_model() hands out `self.model` as it is."""
    model = original(self)
    return model.unwrap() if isinstance(model, StepWrapper) else model


def _warm_up(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: the last thing a worker does before it serves; elsewhere the capture is part of it."""
    result = original(self, *args, **kwargs)
    wrapper = self.model_runner.model
    if isinstance(wrapper, StepWrapper):
        _capture(self.model_runner, wrapper)
        # A reload packs weights anew, in memory that no parameter names, and gives back the old one.
        # No verification then: the cache may hold what requests are waiting for.
        wrapper.recapture = partial(_capture, self.model_runner, wrapper, verify_buckets=False)
    return result


@torch.inference_mode()
@garbage_collection_held()
def _capture(runner: Any, wrapper: StepWrapper, verify_buckets: bool = True) -> None:
    descriptors = runner.cudagraph_dispatcher.get_capture_descs()
    full = [d for mode, group in descriptors if mode == CUDAGraphMode.FULL for d in group]
    if full:
        capture_full(runner, wrapper, full)
        finish_capture(runner, verify_buckets)


def _support(original: Any, cls: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: the backend says that no graph can hold it; on the tape it does not have to be held."""
    choice = taken(vllm_config)
    if choice is None:
        return original(cls, vllm_config, *args, **kwargs)
    if choice.mixed == "full":
        return AttentionCGSupport.ALWAYS
    return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def install() -> None:
    """Wrap the functions of the CPU platform. Idempotent."""
    for name in ("unified_attention_with_output", "unified_kv_cache_update"):
        function = getattr(attention, name, None)
        if function is not None:
            implemented_by(getattr(torch.ops.vllm, name).default, function)
    wrap(CPUModelRunner, "load_model", _load_model)
    wrap(CPUModelRunner, "get_model", _get_model)
    wrap(CPUWorker, "compile_or_warm_up_model", _warm_up)
    builder = CPUAttentionMetadataBuilder
    if not hasattr(builder.get_cudagraph_support, "__graphcap__"):
        original = builder.get_cudagraph_support.__func__

        def get_cudagraph_support(cls: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
            return _support(original, cls, vllm_config, *args, **kwargs)

        get_cudagraph_support.__graphcap__ = True  # type: ignore[attr-defined]
        builder.get_cudagraph_support = classmethod(get_cudagraph_support)
