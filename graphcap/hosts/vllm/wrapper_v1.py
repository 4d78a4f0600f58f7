"""The model as vLLM's first model runner calls it: `StepWrapper` in the place of its `CUDAGraphWrapper`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.platforms import current_platform

from graphcap.hosts.vllm.choice import Choice
from graphcap.hosts.vllm.engine import DECODE, MIXED, EngineCapture, makes_graphs, row_slots

Phase = Callable[[str, int, Callable[[], Any], "torch.Tensor | None", dict[str, Any]], Any]
"""What a capture does with one call of the model: (kind, size, forward, row slots, arguments) -> output."""


class StepWrapper(CUDAGraphWrapper):
    """The model as the runner calls it. Outside of graphcap's capture and serving it is vLLM's wrapper,
    also for the throw-away graphs with which vLLM estimates memory; where the recorder is the tape there
    are none, since the card may refuse them."""

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
            full = context.cudagraph_runtime_mode == CUDAGraphMode.FULL
            if current_platform.is_cpu() or (full and not self._makes_graphs):
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

    @cached_property
    def _makes_graphs(self) -> bool:
        return makes_graphs(taken(self._runner.vllm_config), torch.device(self._runner.device))

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


def wrapper_of(runner: Any) -> StepWrapper | None:
    model = runner.model
    return model if isinstance(model, StepWrapper) else None


def taken(config: Any) -> Choice | None:
    choice = Choice.of(config)
    return choice if choice is not None and choice.taken else None
