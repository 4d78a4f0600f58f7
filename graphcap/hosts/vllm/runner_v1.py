"""Hooks into vLLM's first model runner (``GPUModelRunner`` and, on CPUs, ``CPUModelRunner``).

It runs the model through a `CUDAGraphWrapper`, which takes its key from the forward context. `StepWrapper`
stands in its place: it lets graphcap record while the runner makes its dummy runs, and replays when the
runner dispatches a batch to a full graph. Everything that is not a full graph passes through.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from graphcap.explain import warn
from graphcap.hosts.vllm import ahead
from graphcap.hosts.vllm.capture_v1 import captured_by_graphcap, finish_capture, sequence_length
from graphcap.hosts.vllm.choice import Choice
from graphcap.hosts.vllm.engine import warn_of_eager_mixed_batches
from graphcap.hosts.vllm.patching import wrap
from graphcap.hosts.vllm.wrapper_v1 import StepWrapper, taken, wrapper_of

logger = logging.getLogger(__name__)


def _load_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: the runner makes its graph wrapper here, by name and not through the platform. And while
    weights come from a disk, the host's cores have time."""
    ahead.start(self.vllm_config, torch.device(self.device))
    result = original(self, *args, **kwargs)
    if taken(self.vllm_config) is None or isinstance(self.model, StepWrapper):
        return result
    if type(self.model) is CUDAGraphWrapper:
        self.model = StepWrapper(self.model.runnable, self.vllm_config, self)
    else:
        warn(
            logger,
            "left-to-vllm",
            "graphcap leaves this engine to vLLM: its model is wrapped in %s, expected %s",
            type(self.model).__name__,
            CUDAGraphWrapper.__name__,
        )
    return result


def _capture_cudagraphs(
    original: Any,
    self: Any,
    batch_descriptors: Any,
    cudagraph_runtime_mode: Any,
    *rest: Any,
    **kw: Any,
) -> Any:
    """Why: the runner captures here, one descriptor after the other, without freezing a pool."""
    ahead.wait()
    wrapper = wrapper_of(self)
    if wrapper is None or cudagraph_runtime_mode != CUDAGraphMode.FULL:
        return original(self, batch_descriptors, cudagraph_runtime_mode, *rest, **kw)
    descriptors = list(batch_descriptors)
    if captured_by_graphcap(self, wrapper, descriptors):
        return None
    return original(self, descriptors, cudagraph_runtime_mode, *rest, **kw)


def _dummy_sampler_run(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: here a kernel is needed that is being compiled; a second compilation would take longer."""
    ahead.wait("sampler")
    return original(self, *args, **kwargs)


def _warmup_and_capture(original: Any, self: Any, desc: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: vLLM estimates graph memory with dummy batches whose sequences can be shorter than what is
    asked of them, once a graph holds more tokens than vLLM's own largest; attention then reads astray."""
    ahead.wait()
    if wrapper_of(self) is not None and not desc.uniform and "profile_seq_lens" in kwargs:
        kwargs["profile_seq_lens"] = sequence_length(desc)
    return original(self, desc, *args, **kwargs)


def _capture_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: what was recorded can be checked only after vLLM's capture context has ended."""
    result = original(self, *args, **kwargs)
    if wrapper_of(self) is not None:
        finish_capture(self)
    return result


def _initialize_keys(
    original: Any, self: Any, cudagraph_mode: Any, *args: Any, **kwargs: Any
) -> Any:
    """Why: in vLLM one list of sizes serves decode and mixed batches, and a mode with full graphs for
    both records one graph of a size for both, whose attention is the one of prefills."""
    result = original(self, cudagraph_mode, *args, **kwargs)
    choice = taken(self.vllm_config)
    if choice is not None and choice.mixed == "full":
        if cudagraph_mode == CUDAGraphMode.FULL:
            _separate_ladders(self, choice)
        elif cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY:
            warn_of_eager_mixed_batches()
    return result


def _separate_ladders(dispatcher: Any, choice: Choice) -> None:
    decode = _rounded_up(choice.decode)
    mixed = _rounded_up(choice.mixed_tokens)
    dispatcher.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY  # "separate", as it dispatches
    make = type(dispatcher)._create_padded_batch_descriptor

    def padded(
        num_tokens: int, uniform_decode: bool, has_lora: bool, num_active_loras: int = 0
    ) -> Any:
        # A decode batch above its ladder (of sizes that the user chose) has a mixed graph, as in vLLM.
        decodes = uniform_decode and num_tokens <= choice.decode[-1]
        table = decode if decodes else mixed
        if num_tokens < len(table):
            dispatcher._bs_to_padded_graph_size = table
        return make(dispatcher, num_tokens, decodes, has_lora, num_active_loras)

    dispatcher._create_padded_batch_descriptor = padded
    keys = dispatcher.cudagraph_keys[CUDAGraphMode.FULL]
    keys.clear()
    keys.update(padded(size, True, False) for size in choice.decode)
    keys.update(padded(size, False, False) for size in choice.mixed_tokens)


def _rounded_up(sizes: tuple[int, ...]) -> list[int]:
    """Index n -> the smallest size that is at least n."""
    table = [0]
    for size in sizes:
        table += [size] * (size + 1 - len(table))
    return table


def _reload_weights(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: recordings read the weights where they lay; a reload that rebinds one must be noticed."""
    wrapper = wrapper_of(self)
    engine = None if wrapper is None else wrapper.engine
    if wrapper is None or engine is None:
        return original(self, *args, **kwargs)
    if wrapper.recapture is not None:
        wrapper.clear_graphs()
        result = original(self, *args, **kwargs)
        wrapper.recapture()
        return result
    try:
        return original(self, *args, **kwargs)
    finally:
        engine.expect_change()


def _shutdown(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: recordings keep weights and caches alive that the runner is about to give back."""
    wrapper = wrapper_of(self)
    if wrapper is not None:
        wrapper.clear_graphs()
    return original(self, *args, **kwargs)


def install() -> None:
    """Wrap the runner's functions. Idempotent."""
    wrap(GPUModelRunner, "load_model", _load_model)
    wrap(GPUModelRunner, "_dummy_sampler_run", _dummy_sampler_run)
    wrap(GPUModelRunner, "_capture_cudagraphs", _capture_cudagraphs)
    wrap(GPUModelRunner, "_warmup_and_capture", _warmup_and_capture)
    wrap(GPUModelRunner, "capture_model", _capture_model)
    wrap(GPUModelRunner, "reload_weights", _reload_weights)
    wrap(GPUModelRunner, "shutdown", _shutdown)
    wrap(CudagraphDispatcher, "initialize_cudagraph_keys", _initialize_keys)
