"""How long one replay takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def least_ms(
    call: Callable[[], object],
    device: torch.device,
    *,
    before: Callable[[], object],
    repeats: int = 3,
) -> float:
    """The least of `repeats` times of `call` in ms: what disturbs a measurement only adds to it.

    On CUDA from one event on the current stream to another, the device idle before: its own time, with
    the launch of the call. Elsewhere the host's.

    Args:
        before: brings back what `call` changes; run in front of each one, not timed.
    """
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            before()
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e3)
        return min(times)
    stream = torch.cuda.current_stream(device)
    pairs = []
    for _ in range(repeats):
        before()
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize(device)  # what `before` has queued is not part of it
        pair[0].record(stream)
        call()
        pair[1].record(stream)
        pairs.append(pair)
    torch.cuda.synchronize(device)
    return min(float(first.elapsed_time(last)) for first, last in pairs)
