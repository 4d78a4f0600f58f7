"""What is asked of a worker besides steps: it may touch the weights, so the next replay looks at all.

`collective_rpc`, `apply_model`, weight transfer and sleep all reach the worker through
``WorkerWrapperBase.__getattr__``, by name or from a function that is sent to it. A weight that such a
call rebinds is found before the next replay, not within some replays.
"""

from __future__ import annotations

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
        worker = vars(self).get("worker")
        engine = engine_of(getattr(worker, "model_runner", None))
        if engine is not None:
            engine.expect_change()
    return original(self, attr)


def install() -> None:
    """Wrap the worker's look-up. Idempotent."""
    wrap(WorkerWrapperBase, "__getattr__", _getattr)
