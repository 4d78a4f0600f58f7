"""vLLM's first model runner around a toy model: what is vLLM's here, and what is stood in for.

vLLM's own code: `CudagraphDispatcher`, `GPUModelRunner.capture_model`, `_capture_cudagraphs` and
`shutdown`, `CUDAGraphWrapper`, the forward context. Stood in for: `load_model`, `_dummy_run`,
`reload_weights` and `execute_model`. The recorder is the tape, since the device is a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from scenarios import fakes
from scenarios.common import engine_config, turn_on
from scenarios.fakes import LAYER, Toy

MOST = 12
"""Sequences of the engines here: no multiple of eight, so that a ladder of eights would miss it."""

MOST_TOKENS = 64

Wrapped = Callable[[Toy, Any], Any]


def make_runner(
    model: Toy | None = None,
    *,
    variables: dict[str, str] | None = None,
    wrapped: Wrapped | None = None,
    **args: Any,
) -> Any:
    """A runner of an engine with `args`, whose model is loaded; nothing is captured yet.

    Args:
        variables: ``GRAPHCAP_*``, without the prefix.
        wrapped: (model, configuration) -> how vLLM leaves the model after loading it.
    """
    toy = model or Toy()
    runner_class = _stand_ins(toy, wrapped or _full_graphs)
    turn_on(**(variables or {}))
    fakes.without_cuda()
    given = {"max_num_seqs": MOST, "max_num_batched_tokens": MOST_TOKENS, "max_model_len": 64}
    runner = runner_class(engine_config(**{**given, **args}))
    runner.load_model()
    return runner


def _full_graphs(toy: Toy, config: Any) -> Any:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.config import CUDAGraphMode

    return CUDAGraphWrapper(toy, config, runtime_mode=CUDAGraphMode.FULL)


def _stand_ins(toy: Toy, wrapped: Wrapped) -> Any:
    """The runner's class. What graphcap wraps is put into vLLM's own class, before it does."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def load_model(self: Any, *_: Any, **__: Any) -> None:
        self.model = wrapped(toy, self.vllm_config)

    def reload_weights(self: Any, change: Callable[[Toy], Any]) -> None:
        change(toy)

    GPUModelRunner.load_model = load_model
    GPUModelRunner.reload_weights = reload_weights
    GPUModelRunner._maybe_init_encoder_cudagraph_manager = lambda self: None
    GPUModelRunner.maybe_remove_all_loras = lambda self, config: None
    members = {
        "__init__": _init,
        "_dummy_run": _dummy_run,
        "forward": _forward,
        "step": _step,
        "toy": toy,
    }
    return type("Runner", (GPUModelRunner,), members)


def _init(self: Any, config: Any) -> None:
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    self.vllm_config = config
    self.compilation_config = config.compilation_config
    self.parallel_config = config.parallel_config
    self.cache_config = config.cache_config
    self.load_config = config.load_config
    self.lora_config = None
    self.encoder_cudagraph_manager = None
    self.device = torch.device("cpu")
    self.cudagraph_dispatcher = CudagraphDispatcher(config)
    most = config.scheduler_config.max_num_batched_tokens
    self.input_ids = torch.zeros(most, dtype=torch.int32)
    self.positions = torch.zeros(most, dtype=torch.int64)
    self.slots = fakes.make_slots(most)
    sequences = config.scheduler_config.max_num_seqs
    self.query_start_loc = SimpleNamespace(np=np.zeros(sequences + 1, dtype=np.int32))
    self.input_batch = SimpleNamespace(num_reqs=0)
    self.dummy_runs = []
    layer = fakes.attention_layer(torch.zeros(8, 4))
    config.compilation_config.static_forward_context[LAYER] = layer


def _dummy_run(self: Any, num_tokens: int, **given: Any) -> Any:
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor

    self.dummy_runs.append({"num_tokens": num_tokens, **given})
    mode, descriptor = given["cudagraph_runtime_mode"], BatchDescriptor(num_tokens)
    if mode != CUDAGraphMode.NONE:
        found, descriptor = self.cudagraph_dispatcher.dispatch(
            num_tokens, uniform_decode=given["uniform_decode"]
        )
        assert found == mode
        assert descriptor.num_tokens == num_tokens
    self.slots[LAYER].fill_(-1)
    return self.forward(mode, descriptor, num_tokens, fakes.attention_metadata())


def _forward(self: Any, mode: Any, descriptor: Any, tokens: int, metadata: Any) -> torch.Tensor:
    from vllm.forward_context import set_forward_context

    with set_forward_context(
        metadata,
        self.vllm_config,
        num_tokens=tokens,
        cudagraph_runtime_mode=mode,
        batch_descriptor=descriptor,
        slot_mapping={name: slots[:tokens] for name, slots in self.slots.items()},
    ):
        hidden: torch.Tensor = self.model(
            input_ids=self.input_ids[:tokens],
            positions=self.positions[:tokens],
            intermediate_tensors=None,
            inputs_embeds=None,
        )
        return hidden


def _step(self: Any, lengths: list[int], seed: int = 0, **metadata: Any) -> dict[str, Any]:
    """One step of sequences with so many new tokens each, held against the model run eagerly."""
    generator = torch.Generator().manual_seed(seed)
    tokens, longest = sum(lengths), max(lengths)
    mode, descriptor = self.cudagraph_dispatcher.dispatch(tokens, uniform_decode=longest == 1)
    padded = descriptor.num_tokens
    self.input_ids[:tokens] = torch.randint(
        0, fakes.VOCABULARY, (tokens,), generator=generator, dtype=torch.int32
    )
    self.input_ids[tokens:padded] = 0
    self.positions[:tokens] = torch.arange(tokens)
    self.slots[LAYER][:tokens] = torch.arange(tokens)
    self.slots[LAYER][tokens:padded] = -1
    self.query_start_loc.np[1 : len(lengths) + 1] = np.cumsum(lengths)
    self.input_batch.num_reqs = len(lengths)
    found = fakes.attention_metadata(max_query_len=longest, **metadata)
    with torch.inference_mode():
        hidden = self.forward(mode, descriptor, padded, found)[:tokens].clone()
        eager = self.toy(self.input_ids[:tokens], self.positions[:tokens])
    return {"mode": mode.name, "bucket": padded, "equal": torch.equal(hidden, eager)}


def capture(runner: Any, mode: Any = None) -> None:
    """As vLLM does once the attention backend has said what it can."""
    resolved = mode or runner.compilation_config.cudagraph_mode
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(resolved, 1)
    with torch.inference_mode():
        runner.capture_model()


def stats(engine: Any, kind: str = "decode") -> dict[str, Any]:
    """What a manager of an engine has counted."""
    found = engine.managers[kind].stats()
    return {
        "replays": found.replays,
        "fallbacks": found.fallbacks,
        "padding_rows": found.padding_rows,
        "verified": found.verified,
        "failures": {str(size): text for size, text in found.failures.items()},
        "by_bucket": {str(b.size): b.replays for b in found.buckets},
    }
