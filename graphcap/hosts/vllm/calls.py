"""What is asked of a worker besides steps: it may touch the weights, so the next replay looks at all.

`collective_rpc`, `apply_model`, weight transfer and sleep all reach the worker through
``WorkerWrapperBase.__getattr__``, by name or from a function that is sent to it, which may also ask for the
wrapper's ``worker``. A weight that such a call rebinds is found before the next replay, not within some.
"""

from __future__ import annotations

import sys
from typing import Any

from vllm.v1.worker.worker_base import WorkerWrapperBase

from graphcap.hosts.vllm.engine import EngineCapture
from graphcap.hosts.vllm.patching import wrap

OF_EVERY_STEP = frozenset(
    {
        "execute_model",
        "sample_tokens",
        "take_draft_token_ids",
        "execute_dummy_batch",
        "get_kv_connector_handshake_metadata",
        "check_health",
    }
)
"""What vLLM calls on a worker while it serves, and that writes no weight."""


def engine_of(runner: Any) -> EngineCapture | None:
    """What graphcap holds for a model runner, first or second; None where it serves none."""
    engine = getattr(getattr(runner, "model", None), "engine", None)
    if isinstance(engine, EngineCapture):
        return engine
    held = getattr(getattr(runner, "cudagraph_manager", None), "graphcap_model", None)
    return getattr(held, "engine", None)


def _getattr(original: Any, self: Any, attr: str) -> Any:
    """Why: whoever has weights changed goes through here, whatever the executor."""
    if attr not in OF_EVERY_STEP and not attr.startswith("__"):
        _expect_change(vars(self).get("worker"))
    return original(self, attr)


def _expect_change(worker: Any) -> None:
    engine = engine_of(getattr(worker, "model_runner", None))
    if engine is not None:
        engine.expect_change()


class _Worker:
    """The wrapper's attribute ``worker``. Why: a function that is sent to the wrapper may reach the model
    through it, past the look-up. vLLM itself asks for it at every step."""

    def __get__(self, wrapper: Any, owner: Any = None) -> Any:
        if wrapper is None:
            return self
        try:
            worker = vars(wrapper)["worker"]
        except KeyError:
            raise AttributeError("worker") from None
        asking = sys._getframe(1).f_globals.get("__name__") or ""
        if not asking.startswith("vllm."):
            _expect_change(worker)
        return worker

    def __set__(self, wrapper: Any, worker: Any) -> None:
        vars(wrapper)["worker"] = worker

    def __delete__(self, wrapper: Any) -> None:
        try:
            del vars(wrapper)["worker"]
        except KeyError:
            raise AttributeError("worker") from None


def install() -> None:
    """Wrap the worker's look-up. Idempotent."""
    wrap(WorkerWrapperBase, "__getattr__", _getattr)
    if "worker" not in vars(WorkerWrapperBase):
        WorkerWrapperBase.worker = _Worker()
