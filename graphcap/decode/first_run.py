"""The first run by a plan: what it asks for may be more than this device, driver or Triton can give.

A plan is a file, or a rule that was measured elsewhere. Nobody is to lose a bucket or an engine by it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from graphcap.errors import BackendError, GraphcapError
from graphcap.explain import warn
from graphcap.pool import BufferPool
from graphcap.recorders.source import is_out_of_memory

logger = logging.getLogger(__name__)

Launch = Callable[[], None]


def first_run(
    pool: BufferPool, by_plan: Launch, without: Launch, what: str, rows: int, source: str
) -> str | None:
    """Run `by_plan`; where it fails and that can be the plan's fault, `without`, and tell of it.

    Args:
        without: does the same from the start; what `by_plan` wrote before it failed must not matter.
        what, rows: what runs, "experts" or "layers", and for how many rows.
        source: where the plan is from.

    Returns:
        Why the plan cannot run; None: it ran.

    Raises:
        Exception: what `by_plan` raised, where memory is out, graphcap refuses something else than a
            kernel, or `without` fails as well, so that the plan is not what is wrong.
    """
    try:
        with pool.attempt():
            by_plan()
        return None
    except Exception as error:
        ours = isinstance(error, GraphcapError) and not isinstance(error, BackendError)
        if ours or is_out_of_memory(error):
            raise
        failed = error
    try:
        without()
    except Exception as again:
        raise failed from again
    text = failed.args[0] if isinstance(failed, GraphcapError) else str(failed)
    why = f"{type(failed).__name__}: {' '.join(str(text).split())[:500]}"
    warn(
        logger,
        "plan-failed",
        "%s of %d rows run without a plan, theirs cannot run here (%s): %s",
        what,
        rows,
        source,
        why,
    )
    return why
