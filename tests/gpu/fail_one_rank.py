"""A vLLM worker extension for tests: on rank 1 the recording of one bucket fails after its last operation.

Importing this module, which vLLM does in every worker for ``worker_extension_cls``, installs the fault.
"""

from __future__ import annotations

from typing import Any

import torch

from graphcap.life import CaptureLife

BUCKET = 8
_record = CaptureLife.record


def _failing(self: CaptureLife, size: int, step: Any = None) -> bool:
    if torch.distributed.get_rank() != 1 or size != BUCKET:
        return _record(self, size, step)

    def broken() -> Any:
        step()
        raise RuntimeError("injected: rank 1 gives up")

    return _record(self, size, broken)


CaptureLife.record = _failing  # type: ignore[method-assign]


class FailOneRank:
    """Nothing to add to the worker."""
