"""What stands in for CUDA, for other ranks and for a model of gigabytes, so that vLLM's own code runs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

HIDDEN = 16
VOCABULARY = 512
LAYER = "model.layers.0.attention"
"""Name of the toy's only layer with a cache."""
RECURRENT = "model.layers.0.linear_attn"
"""Name of a layer with a recurrent state. vLLM keeps a slot mapping for it as well, which stays -1."""


class Toy(nn.Module):
    """Rows in, rows out; every row depends on its token, its position and the weights.

    Attributes:
        calls: (rows) of every call.
        fails_at: rows -> the call with so many rows that raises, counted from 1.
    """

    def __init__(self, extra: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.project = nn.Linear(HIDDEN, HIDDEN)
        # More than a fingerprint compares at every replay.
        self.extra = nn.ParameterList(torch.ones(HIDDEN) for _ in range(extra))
        self.requires_grad_(False)
        self.calls: list[int] = []
        self.fails_at: dict[int, int] = {}

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
    ) -> torch.Tensor:
        rows = input_ids.shape[0]
        self.calls.append(rows)
        if self.calls.count(rows) == self.fails_at.get(rows):
            raise RuntimeError("this operation cannot be recorded")
        rows_of = torch.index_select(self.embed.weight, 0, input_ids)
        hidden = rows_of + positions.unsqueeze(1) * 0.01
        for weight in self.extra:
            hidden = hidden * weight
        return torch.tanh(self.project(hidden))


class Accelerator:
    """`torch.accelerator`, as far as vLLM asks it around a capture."""

    @staticmethod
    def synchronize(*_: Any) -> None: ...

    @staticmethod
    def empty_cache() -> None: ...

    @staticmethod
    def get_memory_info(*_: Any) -> tuple[int, int]:
        return (100 << 30, 140 << 30)


def without_cuda() -> None:
    """Give vLLM and graphcap what they ask of CUDA and of a group of one rank."""
    import vllm.distributed.parallel_state as parallel_state
    from vllm.platforms import current_platform

    gc.unfreeze = lambda: None  # vLLM's, after a capture: see gather.py
    for name, value in vars(Accelerator).items():
        if not name.startswith("__"):
            setattr(torch.accelerator, name, value)
    type(current_platform).get_global_graph_pool = lambda self: (0, 0)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    alone = SimpleNamespace(
        world_size=1,
        rank=0,
        local_rank=0,
        rank_in_group=0,
        is_first_rank=True,
        is_last_rank=True,
        device_group=group,
        cpu_group=group,
    )
    for name in ("_WORLD", "_TP", "_PP", "_EP", "_DP", "_PCP", "_DCP"):
        setattr(parallel_state, name, alone)
    parallel_state.graph_capture = no_capture
    for name, module in list(sys.modules.items()):  # who imported it by name
        if name.startswith(("vllm.", "graphcap.")) and hasattr(module, "graph_capture"):
            module.graph_capture = no_capture
        if name.startswith("vllm.") and hasattr(module, "lock_workspace"):
            module.lock_workspace = lambda: None


@contextmanager
def no_capture(device: Any = None) -> Iterator[None]:
    with nullcontext():
        yield


def attention_layer(kv_cache: torch.Tensor | None = None) -> SimpleNamespace:
    """A layer that attends, as far as graphcap looks at it."""
    return SimpleNamespace(kv_cache=kv_cache, impl=SimpleNamespace())


def make_slots(tokens: int) -> dict[str, torch.Tensor]:
    """Cache slots of the engine's largest batch, all padding."""
    return {LAYER: torch.full((tokens,), -1, dtype=torch.int64)}


def attention_metadata(**changes: Any) -> dict[str, Any]:
    """Attention metadata of a step, as far as graphcap reads it."""
    return {LAYER: SimpleNamespace(**{"max_query_len": 1, "use_cascade": False, **changes})}
