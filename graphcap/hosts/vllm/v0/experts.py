"""vLLM's ``fused_experts`` on graphcap's pool and kernels, wherever vLLM holds it by name.

Up to as many rows as the largest bucket has; larger batches, quantised weights and whatever else the
kernels do not take go to vLLM's own function, with its three caches and its chunk loop, and are counted.

In a step of graphcap's the intermediates are the pool's, the routing is graphcap's as well, and padding
reaches no expert. In a decode step that runs eagerly the same kernels run with buffers of the allocator.
A prefill, however short, keeps vLLM's path.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from graphcap.hosts.vllm.experts import PooledExperts
from graphcap.hosts.vllm.patching import wrap
from graphcap.hosts.vllm.v0.operations import FUSED_MOE, as_operation
from graphcap.moe import ranges
from graphcap.moe.grouped import GroupedExperts
from graphcap.moe.kernels.constants import constant
from graphcap.operations import BufferSpec, KernelChoice, kernel_choices, operation
from graphcap.pool import BufferPool
from graphcap.settings import Settings

_DTYPES = (torch.bfloat16, torch.float16)


class _ThreadState(threading.local):
    step: tuple[FusedExperts, torch.Tensor] | None = None
    """Whose step runs in this thread, and the cache slot of each of its rows."""


_state = _ThreadState()
_engine: weakref.ref[FusedExperts] | None = None
"""The experts of the engine that runs in this process; None before there is one."""


def serve(experts: FusedExperts) -> None:
    """From here on `experts` are those of this process's engine, outside of its steps as well."""
    global _engine
    _engine = weakref.ref(experts)


def _serving() -> tuple[FusedExperts | None, torch.Tensor | None]:
    if _state.step is not None:
        return _state.step
    return (None if _engine is None else _engine()), None


class FusedExperts(PooledExperts):
    """The pool and the kernels that all MoE layers of one model runner share.

    Attributes:
        most: rows up to which they serve: those of the largest bucket.
        calls: calls of ``fused_experts`` so far, by what ran them: ``graphcap``, or why vLLM's own did.
    """

    def __init__(
        self, pool: BufferPool, settings: Settings, device: torch.device, most: int
    ) -> None:
        super().__init__(pool, settings, device)
        self.most = most
        self.calls: Counter[str] = Counter()
        self._grouped = None if self.kernels is None else GroupedExperts(self.kernels, pool)
        self._routed: torch.Tensor | None = None
        if self._ranges is not None:  # the router is vLLM's own, which marks nothing
            self.route = self._ranges.around(ranges.TOP_K, self.route)  # type: ignore[method-assign]
            self.run_routed = self._ranges.around(  # type: ignore[method-assign]
                ranges.FUSED_MOE, self.run_routed
            )

    def choices(self) -> tuple[KernelChoice, ...]:
        """As for newer versions of vLLM; the router is vLLM's own here, and pairs are always grouped."""
        if self.kernels is None:
            return ()
        found = kernel_choices(self.kernels, self.kernels.notes)
        return tuple(c for c in found if c.operation != self.kernels.router_gemm.name)

    @contextmanager
    def in_step(self, slots: torch.Tensor) -> Iterator[None]:
        """A step of graphcap's runs inside, whose rows have the cache slots `slots` (rows,) int64;
        -1 marks padding."""
        before = _state.step
        _state.step = (self, slots)
        try:
            yield
        finally:
            _state.step = before
            self._routed = None

    def obstacle(
        self,
        hidden: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        others: Mapping[str, Any],
    ) -> str | None:
        """Why a call goes to vLLM's own function; None: graphcap's kernels can run it."""
        if self.kernels is None:
            return self.why
        given = [name for name, value in others.items() if value is not None and value is not False]
        if given:
            quantised = any("scale" in name or name.startswith("use_") for name in given)
            return f"{'quantised' if quantised else 'asked for'} ({', '.join(sorted(given))})"
        if hidden.dtype not in _DTYPES or {w1.dtype, w2.dtype} != {hidden.dtype}:
            return f"its dtypes ({hidden.dtype}, {w1.dtype}, {w2.dtype})"
        if weights.dtype != torch.float32 or weights.shape != ids.shape:
            return f"its routing ({weights.dtype}, {tuple(weights.shape)}, {tuple(ids.shape)})"
        if not all(t.is_contiguous() for t in (hidden, w1, w2, weights, ids)):
            return "its tensors are not contiguous"
        experts, inner2, width = w1.shape
        if tuple(w2.shape) != (experts, width, inner2 // 2) or hidden.shape[1:] != (width,):
            return f"its shapes ({tuple(w1.shape)}, {tuple(w2.shape)})"
        if hidden.shape[0] > self.most:
            return f"more than {self.most} rows"
        return None if hidden.shape[0] else "no rows"

    def run_routed(
        self,
        hidden: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
        slots: torch.Tensor | None,
    ) -> None:
        """out (M, H) = the experts of `hidden` (M, H) by the routing `weights`, `ids` (M, K).

        `slots` (M,) int64: of a step of graphcap's, negative for padding; None: outside of one.
        """
        assert self._grouped is not None
        pool = self.pool
        if slots is None:
            with pool.outside(), pool.step():
                self._grouped(hidden, w1, w2, weights, _int32(ids), out)
        elif ids is self._routed:  # padding is left out already
            self._grouped(hidden, w1, w2, weights, ids, out)
        else:
            real = pool.take("topk_ids", tuple(ids.shape), torch.int32)
            if self._grouped.drops:
                pool.run(_leave_padding_out, ids, slots, real)
            else:  # padding keeps the experts that it was routed to; nobody reads its rows
                pool.run(_copied, ids, real)
            self._grouped(hidden, w1, w2, weights, real, out)
            pool.release("topk_ids")

    def route(
        self, logits: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> bool:
        """Softmax and top-k of a step's router logits (M, E) float32 into `weights` (M, K) float32 and
        `ids` (M, K) int32, padding with no expert. False: left to vLLM."""
        plain = logits.dtype == weights.dtype == torch.float32 and ids.dtype == torch.int32
        rows = logits.shape[0] == slots.shape[0] == ids.shape[0]
        if self.kernels is None or not (plain and rows and logits.is_contiguous()):
            return False
        self.pool.run(self.kernels.topk_softmax, logits, slots, weights, ids, False)
        self._routed = ids
        return True


def _prefills() -> bool:
    """Whether vLLM runs a prefill now, alone or with decode steps."""
    from vllm.forward_context import get_forward_context

    return (getattr(get_forward_context(), "num_prefills", 0) or 0) > 0


def _int32(ids: torch.Tensor) -> torch.Tensor:
    return ids if ids.dtype == torch.int32 else ids.to(torch.int32)


def _padding_scratch(
    ids: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
) -> Mapping[str, BufferSpec]:
    return {"is_pad": ((ids.shape[0], 1), torch.bool)}


@operation("padding", scratch=_padding_scratch)
def _leave_padding_out(
    ids: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, *, is_pad: torch.Tensor
) -> None:
    """out (M, K) int32 = ids (M, K), -1 in rows whose slot is negative."""
    torch.lt(slots[:, None], 0, out=is_pad)
    out.copy_(ids)
    torch.where(is_pad, constant(-1, ids.device, torch.int32), out, out=out)


@operation("padding")
def _copied(ids: torch.Tensor, out: torch.Tensor) -> None:
    """out (M, K) int32 = ids (M, K)."""
    out.copy_(ids)


# -- what is wrapped, one function each ----------------------------------------------------------


def _fused_experts(
    original: Any,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    inplace: bool = False,
    *args: Any,
    **others: Any,
) -> Any:
    """Why: a function, which vLLM's layers import by name at every call or once and for all."""
    experts, slots = _serving()
    if experts is not None:
        given = {**others, **({"positional arguments": args} if args else {})}
        call = (hidden_states, w1, w2, topk_weights, topk_ids)
        why = "a prefill" if slots is None and _prefills() else experts.obstacle(*call, given)
        if why is None and slots is not None and slots.shape[0] != hidden_states.shape[0]:
            why = "its rows are not those of the step"
        experts.calls["graphcap" if why is None else why] += 1
        if why is None:
            assert experts.kernels is not None
            name = experts.kernels.name
            experts.note(w1, f"graphcap's {name} kernels up to {experts.most} rows")
            out = hidden_states if inplace else torch.empty_like(hidden_states)
            experts.run_routed(*call, out, slots)
            return out
        if slots is not None:
            experts.note(w1, f"vLLM's kernels: {why}")
    return original(hidden_states, w1, w2, topk_weights, topk_ids, inplace, *args, **others)


def _topk_softmax(
    original: Any,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    token_expert_indicies: torch.Tensor,
    gating_output: torch.Tensor,
) -> None:
    """Why: where a step is routed it is known which of its rows are padding. And some images lack the
    operation behind vLLM's."""
    if _state.step is not None:
        experts, slots = _state.step
        if experts.route(gating_output, slots, topk_weights, topk_ids):
            return
    _vllms_topk_softmax(original, topk_weights, topk_ids, token_expert_indicies, gating_output)


_vllms_topk_softmax = as_operation("topk_softmax", "vllm._custom_ops")


def install() -> str:
    """Put the pooled experts in the place of vLLM's, in every module that holds them. Idempotent.

    Returns:
        What was done, for ``graphcap doctor``.
    """
    from vllm import _custom_ops

    fused_moe = import_module(FUSED_MOE)
    original = fused_moe.fused_experts
    wrap(fused_moe, "fused_experts", _fused_experts)
    wrap(_custom_ops, "topk_softmax", _topk_softmax)
    holders = 1
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("fused_experts") is original:
            module.fused_experts = fused_moe.fused_experts  # type: ignore[attr-defined]
            holders += 1
    return f"fused_experts replaced in {holders} modules"
