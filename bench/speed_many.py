"""What several tokens by one call cost: the host's part of a call, and the device's of a step.

The host's part is what Python and the driver need to enqueue the call. Two things must not be taken for
it: waiting for the device, and waking up after having waited. So calls are timed in short bursts, each
after the device has become idle, of which the first is kept apart; and the rows are marked as ended, so
that the device runs a single step a call and no queue fills up. The host does not know that they have
ended: it does the same as for a call of which all steps are run. A few of those are timed as well, each
while the device still has a whole call to do: if they cost more, calls wait for the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from speed_ways import HEADROOM, Way, in_turn

from graphcap.decode.measure import host_times
from graphcap.manager import CaptureManager

CALLS = 200
"""Timed calls, at least."""

QUEUE = 8
"""Calls of a burst."""

ROUNDS = 10

NEVER = -1
"""A token id that no row samples: with it as end-of-sequence a ring tells which rows are live."""


def many_times(
    manager: CaptureManager, batch: Mapping[str, torch.Tensor], tokens: int, device: torch.device
) -> dict[str, Any]:
    """Times of ``run_many(tokens)``, which goes on from `batch`.

    Args:
        manager: its ring has a `Stop`. Each sequence may grow by `HEADROOM` tokens.

    Returns:
        ``host_us_per_call``: median of ``host_calls`` calls, each in a queue of less than `QUEUE`.
        ``host_us_least``: the least of them. ``host_us_after_idle``: median of the first calls of the
        bursts. ``host_rows_ended``: whether they were of one step each (see above); False where there
        is no loop on the device, and then they are those of the next figure.
        ``host_us_behind_steps``: median of calls while the device has all steps of the one before to do.
        ``host_waits``: whether those take half as long as the device, which is no time of the host's.
        ``ms``: of a step on the device, median.
    """

    def call() -> Any:
        return manager.run_many(tokens)

    behind, device_ms = [], []
    for _ in range(ROUNDS):
        manager.run(batch)
        call()
        began = time.perf_counter()
        call()
        behind.append((time.perf_counter() - began) * 1e6)
        way = Way("many", lambda: manager.run(batch), call, 1)
        device_ms += in_turn([way], device, 1)["many"]
    ms = statistics.median(device_ms[1:]) / tokens
    found = {
        "host_us_behind_steps": statistics.median(behind[1:]),
        "host_waits": statistics.median(behind[1:]) > tokens * ms * 1e3 / 2,
        "ms": ms,
    }
    rows = next(iter(batch.values())).shape[0]
    if not manager.loops(manager.ladder.bucket_for(rows) or 0):
        return {
            "host_us_per_call": found["host_us_behind_steps"],
            "host_us_least": min(behind[1:]),
            "host_us_after_idle": None,
            "host_calls": len(behind) - 1,
            "host_rows_ended": False,
            **found,
        }

    def start() -> None:
        manager.run(batch)
        many = call()
        assert many.live is not None, "a ring with a Stop"
        many.live.zero_()

    assert 1 + tokens + QUEUE <= HEADROOM
    bursts = -(-CALLS // (QUEUE - 1))
    host = host_times(call, device, bursts, QUEUE, before=start)
    return {
        "host_us_per_call": host.queued,
        "host_us_least": host.least,
        "host_us_after_idle": host.idle,
        "host_calls": host.calls,
        "host_rows_ended": True,
        **found,
    }
