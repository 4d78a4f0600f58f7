"""Small steps and managers that the tests of the core share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch

from graphcap.buckets import BucketLadder
from graphcap.inputs import PadPolicy, Slot, StaticInputs
from graphcap.manager import CaptureManager
from graphcap.moe.experts import RoutedExperts
from graphcap.moe.kernels import choose_backend, expert_kernels
from graphcap.pool import BufferPool
from graphcap.settings import Settings

CPU = torch.device("cpu")
WIDTH = 3

Inputs = Mapping[str, torch.Tensor]


def custom_op(name: str, mutates_args: Iterable[str]) -> Callable[..., Any]:
    """`torch.library.custom_op`, which came with torch 2.4; before, tests that call the operator skip."""
    register = getattr(torch.library, "custom_op", None)
    if register is not None:
        return register(name, mutates_args=mutates_args)

    def skipping(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *_: pytest.skip(f"{name} needs torch.library.custom_op")

    return skipping


def double(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {"y": inputs["x"] * 2}


def floats(rows: int, seed: int = 0, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def manager_of(
    step: Callable[..., Any] = double,
    *,
    max_batch: int = 4,
    buckets: tuple[int, ...] = (2,),
    slots: Mapping[str, Slot] | None = None,
    settings: Settings | None = None,
    **options: Any,
) -> CaptureManager:
    """A manager over ``x``: (max_batch, 3) float32, with buckets 2 and 4 unless told otherwise."""
    chosen = {"x": Slot((WIDTH,), torch.float32)} if slots is None else slots
    return CaptureManager(
        step,
        StaticInputs(max_batch, chosen, CPU),
        ladder=BucketLadder(buckets, max_batch),
        settings=settings or Settings(),
        **options,
    )


class ToyMoe:
    """Two layers of routed experts and a head, with the number of pairs that reached each expert."""

    hidden_size, intermediate, experts, top_k = 8, 6, 5, 2

    def __init__(self, pool: BufferPool, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(7)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        kernels = expert_kernels(choose_backend("reference", CPU))
        size, inner, count = self.hidden_size, self.intermediate, self.experts
        self.pool = pool
        self.head = weight(size, size)
        self.layers = [
            RoutedExperts(
                kernels,
                pool,
                weight(count, size),
                weight(count, 2 * inner, size),
                weight(count, size, inner),
                top_k=self.top_k,
                renormalize=True,
            )
            for _ in range(2)
        ]
        self.hits = torch.zeros(count + 1)
        """By expert; the last entry counts dropped pairs."""
        self._none = torch.zeros((), dtype=torch.int32)
        self._dropped = torch.tensor(count, dtype=torch.int32)
        self.runs = 0

    @property
    def slots(self) -> dict[str, Slot]:
        return {
            "hidden": Slot((self.hidden_size,), self.head.dtype),
            "row_ids": Slot((), torch.int64, PadPolicy.fill(-1)),
        }

    def __call__(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        self.runs += 1
        hidden, row_ids = inputs["hidden"], inputs["row_ids"]
        rows = hidden.shape[0]
        first = self.layers[0]
        with self.pool.step():
            self._count_hits(hidden, row_ids, first.router)
            state = self.pool.take("state", (rows, self.hidden_size), hidden.dtype)
            state.copy_(hidden)
            for layer in self.layers:
                layer(state, row_ids, out=state)
            out = self.pool.take("out", (rows, self.hidden_size), hidden.dtype)
            torch.mm(state, self.head, out=out)
        return {"out": out}

    def _count_hits(
        self, hidden: torch.Tensor, row_ids: torch.Tensor, router: torch.Tensor
    ) -> None:
        kernels = expert_kernels(choose_backend("reference", CPU))
        rows = hidden.shape[0]
        logits = self.pool.take("hit_logits", (rows, self.experts), torch.float32)
        weights = self.pool.take("hit_weights", (rows, self.top_k), torch.float32)
        ids = self.pool.take("hit_ids", (rows, self.top_k), torch.int32)
        self.pool.run(kernels.router_gemm, hidden, router, logits)
        self.pool.run(kernels.topk_softmax, logits, row_ids, weights, ids, True)
        # Tensors rather than Python numbers, for which torch makes a tensor at each call.
        index = torch.where(ids < self._none, self._dropped, ids).long().view(-1)
        self.hits.index_add_(0, index, torch.ones(index.shape))
        self.pool.release("hit_logits", "hit_weights", "hit_ids")

    def example(self, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        hidden = torch.randn(rows, self.hidden_size, generator=generator).to(self.head.dtype)
        return {"hidden": hidden, "row_ids": torch.arange(rows)}

    def batch(self, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
        return self.example(rows, torch.Generator().manual_seed(seed))


def moe_manager(
    max_batch: int = 8,
    buckets: tuple[int, ...] = (1, 2, 4),
    settings: Settings | None = None,
) -> tuple[ToyMoe, CaptureManager]:
    pool = BufferPool(CPU)
    step = ToyMoe(pool)
    manager = CaptureManager(
        step,
        StaticInputs(max_batch, step.slots, CPU),
        pool=pool,
        ladder=BucketLadder(buckets, max_batch),
        settings=settings or Settings(),
        example=step.example,
        state=[step.hits],
    )
    return step, manager


def memory_events(call: Callable[[], object]) -> int:
    """Allocations that torch's profiler sees while `call` runs."""
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    return sum(1 for event in events if event.name() == "[memory]" and event.nbytes() > 0)
