"""Recording behind vLLM's first model runner: its dummy runs are the steps that are captured."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from graphcap.errors import BackendError
from graphcap.explain import warn
from graphcap.hosts.vllm.choice import Choice
from graphcap.hosts.vllm.engine import DECODE, MIXED, EngineCapture
from graphcap.hosts.vllm.wrapper_v1 import Phase, StepWrapper, wrapper_of
from graphcap.recorders.base import garbage_collection_held
from graphcap.settings import Settings

logger = logging.getLogger(__name__)


@garbage_collection_held()  # over all buckets: one collection takes half a second in vLLM's heap
def capture_full(runner: Any, wrapper: StepWrapper, descriptors: Sequence[Any]) -> None:
    """Warm up every bucket, freeze the pool, record from the largest down; see `finish_capture`."""
    engine = _new_engine(runner, descriptors)
    wrapper.engine = None
    buckets = sorted(descriptors, key=lambda d: (d.uniform, -d.num_tokens))

    def warm_up(
        kind: str, size: int, forward: Any, slots: torch.Tensor | None, given: dict[str, Any]
    ) -> Any:
        engine.show(kind, slots, input_ids=given.get("input_ids"), positions=given.get("positions"))
        return _during(lambda step: engine.warm_up(kind, size, step), forward)

    def record(
        kind: str, size: int, forward: Any, slots: torch.Tensor | None, given: dict[str, Any]
    ) -> Any:
        if engine.record(kind, size, forward):
            return engine.managers[kind].recording(size).outputs["hidden_states"]
        return forward()

    try:
        for descriptor in buckets:
            _dummy_run(runner, wrapper, descriptor, warm_up)
        engine.freeze()
        for descriptor in buckets:
            _dummy_run(runner, wrapper, descriptor, record)
    except BaseException:
        engine.close()
        raise
    runner.graphcap_pending = (engine, buckets)


@garbage_collection_held()
def finish_capture(runner: Any, verify_buckets: bool = True) -> None:
    """Verify what `capture_full` recorded, then serve. Verification writes into the engine's cache.

    Apart, because a graph with an all-reduce can be replayed only after vLLM has registered its buffers
    with the other ranks, which it does when its own capture context ends.
    """
    engine, buckets = getattr(runner, "graphcap_pending", (None, ()))
    if engine is None:
        return
    runner.graphcap_pending = (None, ())
    wrapper = wrapper_of(runner)
    assert wrapper is not None

    def verify(
        kind: str, size: int, forward: Any, slots: torch.Tensor | None, given: dict[str, Any]
    ) -> Any:
        return _during(lambda step: engine.verify(kind, size, step), forward)

    if verify_buckets and engine.verifies:
        for descriptor in buckets:
            if descriptor.uniform:
                _dummy_run(runner, wrapper, descriptor, verify)
    engine.finish()
    wrapper.engine = engine


def _during(phase: Callable[[Callable[[], Any]], object], forward: Callable[[], Any]) -> Any:
    """Run a phase that runs the model, and give the runner the output that it waits for."""
    outputs: list[Any] = []

    def step() -> Any:
        outputs[:] = [forward()]
        return outputs[0]

    phase(step)
    return outputs[0] if outputs else forward()


def _dummy_run(runner: Any, wrapper: StepWrapper, descriptor: Any, phase: Phase) -> None:
    wanted = {
        "cudagraph_runtime_mode": CUDAGraphMode.FULL,
        "force_attention": True,
        "uniform_decode": descriptor.uniform,
        "allow_microbatching": False,
        "skip_eplb": True,
        "remove_lora": False,
        "is_graph_capturing": True,
        "num_active_loras": descriptor.num_active_loras,
        "profile_seq_lens": sequence_length(descriptor),
    }
    known = inspect.signature(GPUModelRunner._dummy_run).parameters
    wrapper.phase = phase
    try:
        runner._dummy_run(descriptor.num_tokens, **{k: v for k, v in wanted.items() if k in known})
    finally:
        wrapper.phase = None


def sequence_length(descriptor: Any) -> int | None:
    """The sequence length of a dummy batch: None is vLLM's own choice.

    For mixed batches that is the number of tokens of the whole batch, for which a block table may have no
    room; here each sequence is as long as the longest share of the batch.
    """
    if descriptor.uniform or not descriptor.num_reqs:
        return None
    share, rest = divmod(descriptor.num_tokens, descriptor.num_reqs)
    return int(share + rest)


def _new_engine(runner: Any, descriptors: Sequence[Any]) -> EngineCapture:
    choice = Choice.of(runner.vllm_config)
    assert choice is not None
    return EngineCapture(
        choice,
        Settings.from_env(),
        runner.vllm_config,
        runner.get_model(),
        torch.device(runner.device),
        [(DECODE if d.uniform else MIXED, d.num_tokens) for d in descriptors],
    )


def captured_by_graphcap(runner: Any, wrapper: StepWrapper, descriptors: Sequence[Any]) -> bool:
    """Capture what graphcap can; False where the recorder that was asked for does not work here."""
    try:
        capture_full(runner, wrapper, descriptors)
    except BackendError as error:
        warn(logger, "left-to-vllm", "graphcap leaves this engine to vLLM: %s", error)
        return False
    return True
