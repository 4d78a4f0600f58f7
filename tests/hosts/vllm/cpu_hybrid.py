"""A model with recurrent layers in the real engine on the CPU; run by test_cpu_hybrid.py.

    python cpu_hybrid.py

graphcap's experts do not run on vLLM's CPU engine. What tells them rows from padding does, and comes from
vLLM's own runner: each step's forward context is looked at here.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import cpu_engine
from checkpoints import write_checkpoint
from cpu_engine import C_NORMS, decode, requests, start, start_plain
from environments import report


def watch_rows() -> list[dict[str, Any]]:
    """What is to become a list of all steps: how many rows are real, and which look real or like
    padding; by layer, how many have a cache slot."""
    from vllm.forward_context import get_forward_context

    from graphcap.hosts.vllm.wrapper_v1 import StepWrapper, row_slots

    steps: list[dict[str, Any]] = []
    original = StepWrapper.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        context, real = get_forward_context(), self._real_rows()
        slots = row_slots(context)
        assert slots is not None
        steps.append(
            {
                "rows": real,
                "padding": len(slots) - real,
                "look real": int((slots[:real] >= 0).sum()),
                "look like padding": int((slots[real:] == -1).sum()),
                "by layer": {
                    n: int((s[:real] >= 0).sum()) for n, s in context.slot_mapping.items()
                },
            }
        )
        return original(self, *args, **kwargs)

    StepWrapper.__call__ = call  # type: ignore[method-assign]
    return steps


def main() -> None:
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_checkpoint(Path(scratch), "qwen3_next")
        os.environ["GRAPHCAP"] = "1"
        llm = start(model, enable_prefix_caching=False)
        steps = watch_rows()
        tokens = decode(llm, requests())
        found = cpu_engine.capture(llm).managers["decode"].stats()
        cpu_engine.shut_down(llm)
        alone = start_plain(model, enable_prefix_caching=False, norms=C_NORMS)
        report(
            {
                "steps": steps,
                "tokens": tokens,
                "alone": decode(alone, requests()),
                "replays": found.replays,
                "fallbacks": found.fallbacks,
            }
        )


if __name__ == "__main__":
    main()
