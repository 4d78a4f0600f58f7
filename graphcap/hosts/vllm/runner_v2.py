"""vLLM's second model runner: `CudaGraphManager` and its `ModelCudaGraphManager`.

There full graphs are captured from a function that vLLM prepares for each descriptor, write the hidden
states into one buffer of the manager's, and are replayed by `run_fullgraph`. graphcap takes the
model's manager; those of draft models stay vLLM's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.forward_context import get_forward_context
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from graphcap.errors import BackendError
from graphcap.explain import warn
from graphcap.hosts.vllm import ahead
from graphcap.hosts.vllm.choice import Choice
from graphcap.hosts.vllm.engine import (
    DECODE,
    MIXED,
    EngineCapture,
    makes_graphs,
    row_slots,
    warn_of_eager_mixed_batches,
)
from graphcap.hosts.vllm.patching import wrap
from graphcap.recorders.base import garbage_collection_held
from graphcap.settings import Settings

logger = logging.getLogger(__name__)


class _Model:
    """What graphcap keeps for one `ModelCudaGraphManager`."""

    def __init__(self, model: torch.nn.Module, buffers: Any) -> None:
        self.model = model
        self.buffers = buffers
        self.engine: EngineCapture | None = None
        self.forwards: dict[Any, Callable[[], torch.Tensor]] = {}
        self.rows = 0


def _model_of(manager: Any) -> _Model | None:
    return getattr(manager, "graphcap_model", None)


def _taken(manager: Any) -> Choice | None:
    choice = Choice.of(manager.vllm_config)
    if type(manager) is not ModelCudaGraphManager or choice is None or not choice.taken:
        return None
    return choice


def _kind(descriptor: Any) -> str:
    return DECODE if descriptor.uniform_token_count == 1 else MIXED


# -- capture -------------------------------------------------------------------------------------


def _new_engine(manager: Any, held: _Model, descriptors: Any) -> EngineCapture:
    choice = _taken(manager)
    assert choice is not None
    return EngineCapture(
        choice,
        Settings.from_env(),
        manager.vllm_config,
        held.model,
        torch.device(manager.device),
        [(_kind(d), d.num_tokens) for d in descriptors],
    )


@garbage_collection_held()  # over all buckets: one collection takes half a second in vLLM's heap
def _capture_full(
    manager: Any, held: _Model, engine: EngineCapture, descriptors: Any, create: Any
) -> None:
    """Warm up every bucket, freeze the pool, record from the largest down, verify, serve."""
    # The first forward pass sizes vLLM's buffer of hidden states: the largest one comes first.
    buckets = sorted(descriptors, key=lambda d: (_kind(d) == DECODE, -d.num_tokens))
    try:
        with graph_capture(device=manager.device):
            for descriptor in buckets:
                forward = _forward(manager, descriptor, create(descriptor, warmup=True))
                engine.warm_up(
                    _kind(descriptor),
                    descriptor.num_tokens,
                    _shown(engine, held, descriptor, forward),
                )
            engine.freeze()
            for descriptor in buckets:
                forward = _forward(manager, descriptor, create(descriptor, warmup=False))
                if engine.record(_kind(descriptor), descriptor.num_tokens, forward):
                    held.forwards[descriptor] = forward
        if engine.verifies:
            for descriptor in buckets:
                if _kind(descriptor) == DECODE and descriptor in held.forwards:
                    forward = _forward(manager, descriptor, create(descriptor, warmup=False))
                    engine.verify(DECODE, descriptor.num_tokens, forward)
        engine.finish()
    except BaseException:
        engine.close()
        raise
    held.engine = engine
    for descriptor in buckets:
        if not engine.managers[_kind(descriptor)].serves(descriptor.num_tokens):
            held.forwards.pop(descriptor, None)
            _withdraw(manager, descriptor)


def _shown(
    engine: EngineCapture, held: _Model, descriptor: Any, forward: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """`forward`, which on its way shows the engine's buffers to graphcap."""
    buffers, tokens, kind = held.buffers, descriptor.num_tokens, _kind(descriptor)
    original = held.model.forward

    def seen(*args: Any, **kwargs: Any) -> Any:
        engine.show(
            kind,
            row_slots(get_forward_context()),
            input_ids=buffers.input_ids[:tokens],
            positions=buffers.positions[:tokens],
        )
        return original(*args, **kwargs)

    def run() -> torch.Tensor:
        held.model.forward = seen  # type: ignore[method-assign]
        try:
            return forward()
        finally:
            del held.model.forward  # the class's own is found again

    return run


def _forward(manager: Any, descriptor: Any, prepared: Any) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        prepared(CUDAGraphMode.NONE)
        hidden: torch.Tensor = manager.hidden_states[: descriptor.num_tokens]
        return hidden

    return forward


def _withdraw(manager: Any, descriptor: Any) -> None:
    """Have vLLM dispatch no batch to a descriptor that has no recording."""
    for candidates in manager._candidates.values():
        if descriptor in candidates:
            candidates.remove(descriptor)


# -- what is wrapped, one function each ----------------------------------------------------------


def _load_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: while weights come from a disk, the host's cores have time."""
    ahead.start(self.vllm_config, torch.device(self.device))
    return original(self, *args, **kwargs)


def _init_candidates(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: in vLLM a mode with full graphs for mixed batches records one graph of a size for decode and
    mixed batches alike, whose attention is the one of prefills."""
    result = original(self, *args, **kwargs)
    choice = _taken(self)
    if choice is None or choice.mixed != "full":
        return result
    if self.cudagraph_mode != CUDAGraphMode.FULL:
        warn_of_eager_mixed_batches()
        return result
    full = CUDAGraphMode.FULL
    decode = [
        BatchExecutionDescriptor(
            cg_mode=full, num_tokens=size, num_reqs=size, uniform_token_count=1
        )
        for size in choice.decode
    ]
    # With a sequence for each token a dummy batch looks like decode, and vLLM 0.26 would record decode
    # attention. One for two tokens is enough but for the largest, above which there is no other.
    largest = choice.mixed_tokens[-1]
    mixed = [
        BatchExecutionDescriptor(
            cg_mode=full,
            num_tokens=size,
            num_reqs=max(1, min(size - 1 if size == largest else size // 2, self.max_num_reqs)),
        )
        for size in choice.mixed_tokens
    ]
    self._capture_descs = {full: sorted(decode + mixed, key=lambda d: -d.num_tokens)}
    self._candidates = {}
    for tokens in range(1, max(choice.decode[-1], choice.mixed_tokens[-1]) + 1):
        fits = [d for d in decode if d.num_tokens >= tokens][:1]
        fits += [d for d in mixed if d.num_tokens >= tokens]
        self._candidates[tokens, 0] = fits
    return result


def _capture_with_model(
    original: Any,
    self: Any,
    model: Any,
    model_state: Any,
    input_buffers: Any,
    *rest: Any,
    **kw: Any,
) -> Any:
    """Why: the only place where the manager meets its model and its buffers."""
    if _taken(self) is not None:
        self.graphcap_model = _Model(model, input_buffers)
    return original(self, model, model_state, input_buffers, *rest, **kw)


def _capture(original: Any, self: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: vLLM records each descriptor right after its warm-up, without freezing a pool."""
    ahead.wait()
    held = _model_of(self)
    profiling = getattr(self, "_max_full_descs_to_capture", None) is not None
    full = self._capture_descs.get(CUDAGraphMode.FULL)
    if held is None or not full:
        return original(self, create_forward_fn, *args, **kwargs)
    if profiling:  # with throw-away graphs, of which a tape has none, and which the card may refuse
        with _graphs_of(self, full=makes_graphs(_taken(self), torch.device(self.device))):
            return original(self, create_forward_fn, *args, **kwargs)
    try:
        engine = _new_engine(self, held, full)
    except BackendError as error:
        warn(logger, "left-to-vllm", "graphcap leaves this engine to vLLM: %s", error)
        return original(self, create_forward_fn, *args, **kwargs)
    with _graphs_of(self, full=False):
        result = original(self, create_forward_fn, *args, **kwargs)
    _capture_full(self, held, engine, list(full), create_forward_fn)
    return result


@contextmanager
def _graphs_of(manager: Any, *, full: bool) -> Iterator[None]:
    """What vLLM captures by itself inside: everything, or all but full graphs."""
    everything = manager._capture_descs
    if not full:
        manager._capture_descs = {m: d for m, d in everything.items() if m != CUDAGraphMode.FULL}
    try:
        yield
    finally:
        manager._capture_descs = everything


def _run_fullgraph(original: Any, self: Any, desc: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: full graphs are replayed here, by descriptor."""
    held = _model_of(self)
    if held is None or held.engine is None:
        return original(self, desc, *args, **kwargs)
    forward = held.forwards[desc]
    if held.engine.replay(_kind(desc), desc.num_tokens, held.rows, forward) is None:
        forward()
    return None


def _dispatch(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: only here is it known how many tokens of a step are real, and what got no graph."""
    descriptor = original(self, *args, **kwargs)
    held = _model_of(self)
    if held is None or held.engine is None:
        return descriptor
    named = dict(zip(("num_reqs", "num_tokens", "uniform_token_count"), args, strict=False))
    named.update(kwargs)
    held.rows = int(named.get("num_tokens") or 0)
    if descriptor.cg_mode == CUDAGraphMode.NONE and held.rows:
        decode = named.get("uniform_token_count") == 1
        if decode:
            held.engine.fall_back(
                held.rows,
                "above_max_batch",
                "raise cudagraph_capture_sizes (or max_cudagraph_capture_size) to the largest decode batch",
            )
        elif held.engine.choice.mixed == "full":
            held.engine.fall_back(
                held.rows,
                "mixed_above_max_tokens",
                "a prefill this large runs eagerly; lower max_num_batched_tokens to change that",
                MIXED,
            )
    return descriptor


def _reload_weights(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: recordings read the weights where they lay; a reload that rebinds one must be noticed."""
    try:
        return original(self, *args, **kwargs)
    finally:
        held = _model_of(self.cudagraph_manager)
        if held is not None and held.engine is not None:
            held.engine.expect_change()


def _shutdown(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: recordings keep weights and caches alive that the runner is about to give back."""
    held = _model_of(getattr(self, "cudagraph_manager", None))
    if held is not None and held.engine is not None:
        held.engine.close()
        held.engine = None
    return original(self, *args, **kwargs)


def install() -> None:
    """Wrap the functions of the second runner. Idempotent."""
    wrap(CudaGraphManager, "_init_candidates", _init_candidates)
    wrap(CudaGraphManager, "capture", _capture)
    wrap(CudaGraphManager, "run_fullgraph", _run_fullgraph)
    wrap(CudaGraphManager, "dispatch", _dispatch)
    wrap(ModelCudaGraphManager, "capture", _capture_with_model)
    wrap(GPUModelRunner, "load_model", _load_model)
    wrap(GPUModelRunner, "reload_weights", _reload_weights)
    wrap(GPUModelRunner, "shutdown", _shutdown)
