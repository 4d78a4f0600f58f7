"""vLLM's first model runner (``GPUModelRunner`` and, on CPUs, ``CPUModelRunner``).

It runs the model through a `CUDAGraphWrapper`, which takes its key from the forward context. `StepWrapper`
stands in its place: it lets graphcap record while the runner makes its dummy runs, and replays when the
runner dispatches a batch to a full graph. Everything that is not a full graph passes through.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.platforms import current_platform
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from graphcap.errors import BackendError
from graphcap.hosts.vllm import ahead
from graphcap.hosts.vllm.config import Choice
from graphcap.hosts.vllm.engine import DECODE, MIXED, MIXED_RUN_EAGERLY, EngineCapture, row_slots
from graphcap.hosts.vllm.patching import wrap
from graphcap.recorders.base import garbage_collection_held
from graphcap.settings import Settings

logger = logging.getLogger(__name__)

Phase = Callable[[str, int, Callable[[], Any], "torch.Tensor | None", dict[str, Any]], Any]
"""What a capture does with one call of the model: (kind, size, forward, row slots, arguments) -> output."""


class StepWrapper(CUDAGraphWrapper):
    """The model as the runner calls it. Outside of graphcap's capture and serving it is vLLM's wrapper,
    also for the throw-away graphs with which vLLM estimates memory."""

    def __init__(self, runnable: Any, vllm_config: Any, runner: Any) -> None:
        if current_platform.is_cpu():  # vLLM's wrapper asks the platform for a pool of graph memory
            self.runnable = runnable
            self.is_debugging_mode = False
            self.concrete_cudagraph_entries: dict[Any, Any] = {}
        else:
            super().__init__(runnable, vllm_config, CUDAGraphMode.FULL)
        self.engine: EngineCapture | None = None
        self.phase: Phase | None = None
        self.recapture: Callable[[], None] | None = None
        """Records anew after a reload; None: vLLM reloads into the memory that recordings read."""
        self._runner = runner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_forward_context_available():
            return self.runnable(*args, **kwargs)
        context = get_forward_context()
        if self.phase is not None:
            kind, size = _bucket_of(context, args, kwargs)
            forward = _forward(self.runnable, args, kwargs)
            return self.phase(kind, size, forward, row_slots(context), kwargs)
        if self.engine is None:
            if current_platform.is_cpu():
                return self.runnable(*args, **kwargs)
            return super().__call__(*args, **kwargs)
        if context.cudagraph_runtime_mode != CUDAGraphMode.FULL:
            self._count_eager(context)
            return self.runnable(*args, **kwargs)
        descriptor = context.batch_descriptor
        kind = DECODE if descriptor.uniform else MIXED
        forward = _forward(self.runnable, args, kwargs)
        rows = self._real_rows()
        inputs = self.engine.managers[kind].inputs
        ids = kwargs.get("input_ids")
        if ids is not None and inputs.moved("input_ids", ids):  # type: ignore[attr-defined]
            self.engine.fall_back(rows, "inputs_moved", "the engine made new input buffers", kind)
            return forward()
        hidden = self.engine.replay(kind, descriptor.num_tokens, rows, forward)
        return forward() if hidden is None else hidden

    def clear_graphs(self) -> None:
        super().clear_graphs()
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _real_rows(self) -> int:
        """Tokens of this step that are no padding."""
        runner = self._runner
        return int(runner.query_start_loc.np[runner.input_batch.num_reqs])

    def _count_eager(self, context: Any) -> None:
        """A step that vLLM runs its own way: counted where graphcap would have served it."""
        metadata = context.attn_metadata
        if self.engine is None or not isinstance(metadata, dict) or not metadata:
            return  # a dummy run
        longest = max((getattr(m, "max_query_len", 0) or 0) for m in metadata.values())
        rows = self._real_rows()
        if longest > 1:
            choice = self.engine.choice  # on a tape large batches run eagerly by choice
            if choice.mixed == "full" and choice.recorder == "cuda":
                self.engine.fall_back(
                    rows,
                    "mixed_above_max_tokens",
                    "a prefill this large runs eagerly; lower max_num_batched_tokens to change that",
                    MIXED,
                )
            return
        cascade = any(getattr(m, "use_cascade", False) for m in metadata.values())
        if cascade:
            self.engine.fall_back(rows, "cascade_attention", "set disable_cascade_attn=True")
        else:
            self.engine.fall_back(
                rows,
                "above_max_batch",
                "raise cudagraph_capture_sizes (or max_cudagraph_capture_size) to the largest decode batch",
            )


def _forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    def forward() -> Any:
        return model(*args, **kwargs)

    return forward


def _bucket_of(context: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, int]:
    descriptor = context.batch_descriptor
    return (DECODE if descriptor.uniform else MIXED), int(descriptor.num_tokens)


# -- capture -------------------------------------------------------------------------------------


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
    wrapper = _wrapper_of(runner)
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
        "profile_seq_lens": _sequence_length(descriptor),
    }
    known = inspect.signature(GPUModelRunner._dummy_run).parameters
    wrapper.phase = phase
    try:
        runner._dummy_run(descriptor.num_tokens, **{k: v for k, v in wanted.items() if k in known})
    finally:
        wrapper.phase = None


def _sequence_length(descriptor: Any) -> int | None:
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


def _wrapper_of(runner: Any) -> StepWrapper | None:
    model = runner.model
    return model if isinstance(model, StepWrapper) else None


def _taken(config: Any) -> Choice | None:
    choice = Choice.of(config)
    return choice if choice is not None and choice.taken else None


# -- what is wrapped, one function each ----------------------------------------------------------


def _load_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: the runner makes its graph wrapper here, by name and not through the platform. And while
    weights come from a disk, the host's cores have time."""
    ahead.start(self.vllm_config, torch.device(self.device))
    result = original(self, *args, **kwargs)
    if _taken(self.vllm_config) is None or isinstance(self.model, StepWrapper):
        return result
    if type(self.model) is CUDAGraphWrapper:
        self.model = StepWrapper(self.model.runnable, self.vllm_config, self)
    else:
        logger.warning(
            "graphcap leaves this engine to vLLM: its model is wrapped in %s, expected %s",
            type(self.model).__name__,
            CUDAGraphWrapper.__name__,
        )
    return result


def captured_by_graphcap(runner: Any, wrapper: StepWrapper, descriptors: Sequence[Any]) -> bool:
    """Capture what graphcap can; False where the recorder that was asked for does not work here."""
    try:
        capture_full(runner, wrapper, descriptors)
    except BackendError as error:
        logger.warning("graphcap leaves this engine to vLLM: %s", error)
        return False
    return True


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
    wrapper = _wrapper_of(self)
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
    if _wrapper_of(self) is not None and not desc.uniform and "profile_seq_lens" in kwargs:
        kwargs["profile_seq_lens"] = _sequence_length(desc)
    return original(self, desc, *args, **kwargs)


def _capture_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Why: what was recorded can be checked only after vLLM's capture context has ended."""
    result = original(self, *args, **kwargs)
    if _wrapper_of(self) is not None:
        finish_capture(self)
    return result


def _initialize_keys(
    original: Any, self: Any, cudagraph_mode: Any, *args: Any, **kwargs: Any
) -> Any:
    """Why: in vLLM one list of sizes serves decode and mixed batches, and a mode with full graphs for
    both records one graph of a size for both, whose attention is the one of prefills."""
    result = original(self, cudagraph_mode, *args, **kwargs)
    choice = _taken(self.vllm_config)
    if choice is not None and choice.mixed == "full":
        if cudagraph_mode == CUDAGraphMode.FULL:
            _separate_ladders(self, choice)
        elif cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY:
            logger.warning(MIXED_RUN_EAGERLY)
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
    wrapper = _wrapper_of(self)
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
    wrapper = _wrapper_of(self)
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
