"""Named ranges around the parts of the MoE layer, for a profiler's timeline: ``GRAPHCAP_NVTX=1``.

A range lies where Python starts kernels: in eager steps, warm-ups, and once while a step is recorded. A
replay runs no Python, so it has no ranges; its kernels are told by their names, and the census gives the
order of a graph's nodes. What cannot be had from the host side is left out, and not made up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from graphcap.explain import warn
from graphcap.settings import Settings

logger = logging.getLogger(__name__)

ROUTER = "router"
TOP_K = "top-k"
FUSED_MOE = "fused MoE"
FUSED_MOE_WITH_TOP_K = "fused MoE with top-k"
"""The layer by pair: its first kernel chooses the experts and multiplies, so that nothing lies between."""


class Ranges:
    """Opens and closes ranges on the calling thread.

    Args:
        push: opens a range of that name inside those that are open.
        pop: closes the innermost.
    """

    def __init__(self, push: Callable[[str], object], pop: Callable[[], object]) -> None:
        self._push = push
        self._pop = pop

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` in a range called `name`, which is closed also where it raises."""
        push, pop = self._push, self._pop

        @wraps(function)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            push(name)
            try:
                return function(*args, **kwargs)
            finally:
                pop()

        return ranged


def nvtx_ranges(settings: Settings, nvtx: Any = None) -> Ranges | None:
    """What ``GRAPHCAP_NVTX`` asks for; None: no ranges. Asked once, when a step is built.

    A torch without NVTX (a CPU build) gives none, with one WARNING.

    Args:
        nvtx: has range_push(name) and range_pop(); None: torch.cuda.nvtx.
    """
    if not settings.nvtx:
        return None
    if nvtx is None:
        import torch

        nvtx = torch.cuda.nvtx
    try:
        nvtx.range_push("graphcap")
        nvtx.range_pop()
    except RuntimeError as error:
        _warn_once(" ".join(str(error).split()))
        return None
    return Ranges(nvtx.range_push, nvtx.range_pop)


@cache
def _warn_once(why: str) -> None:
    warn(logger, "nvtx", "GRAPHCAP_NVTX=1 has no effect: torch has no NVTX here: %s", why)
