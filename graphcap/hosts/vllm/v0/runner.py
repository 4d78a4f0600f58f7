"""The hooks of vLLM 0.6.3: where it captures, where it decides on padding, where it skips both.

`ModelRunner.execute_model` is left as it is: it takes the executable of a decode step from
``graph_runners`` by the number of rows, and finds graphcap's engine there.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.worker.model_runner import GPUModelRunnerBase, ModelInputForGPUBuilder
from vllm.worker.worker import Worker

from graphcap.errors import BackendError
from graphcap.explain import warn
from graphcap.hosts.vllm.patching import wrap
from graphcap.hosts.vllm.v0.choice import decide
from graphcap.hosts.vllm.v0.engine import DecodeEngine
from graphcap.settings import Settings

logger = logging.getLogger(__name__)

ENGINE = "graphcap_engine"
"""Attribute of a model runner: its `DecodeEngine`."""


def take(runner: Any, kv_caches: list[torch.Tensor]) -> DecodeEngine | None:
    """Record the decode step of `runner`; None, with one WARNING, where the engine is left to vLLM."""
    settings = Settings.from_env()
    choice = decide(runner, settings)
    if not choice.taken:
        warn(logger, "left-to-vllm", "%s", choice.text())
        return None
    logger.info("%s", choice.text())
    try:
        engine = DecodeEngine(choice, settings, runner, kv_caches)
    except BackendError as error:
        warn(logger, "left-to-vllm", "graphcap leaves this engine to vLLM: %s", error)
        return None
    engine.capture()
    setattr(runner, ENGINE, engine)
    runner.graph_runners[0] = dict.fromkeys(range(1, engine.most + 1), engine)
    return engine


# -- what is wrapped, one function each ----------------------------------------------------------


def _capture_model(original: Any, self: Any, kv_caches: Any) -> Any:
    """Why: here vLLM makes a CUDA graph for each batch size."""
    if take(self, kv_caches[0]) is None:
        return original(self, kv_caches)
    return None


def _warm_up_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: with --enforce-eager vLLM does not come to capture_model()."""
    result = original(self, *args, **kwargs)
    if self.model_config.enforce_eager:
        take(self.model_runner, self.gpu_cache[0])
    return result


def _pad_size(original: Any, self: Any, num_seqs: int, *args: Any, **kwargs: Any) -> Any:
    """Why: the ladder is graphcap's and so is the padding; vLLM only has to prepare the metadata that
    its graphs want. (And it asks this with a length of 0, so that it would take any length.)"""
    engine: DecodeEngine | None = getattr(self.runner, ENGINE, None)
    if engine is None:
        return original(self, num_seqs, *args, **kwargs)
    if not self.decode_only:
        return -1  # a prefill among them
    longest = max((max(data.seq_lens, default=0) for data in self.inter_data_list), default=0)
    return 0 if engine.admits(num_seqs, longest) else -1


def install() -> None:
    """Wrap the functions of the model runner. Idempotent."""
    wrap(GPUModelRunnerBase, "capture_model", _capture_model)
    wrap(Worker, "_warm_up_model", _warm_up_model)
    wrap(ModelInputForGPUBuilder, "_get_cuda_graph_pad_size", _pad_size)
