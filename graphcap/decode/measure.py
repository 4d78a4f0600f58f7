"""Counts of what a call makes the host and the device do, from the profiler and the allocator."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

LAUNCHES = (
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cudaMemcpy",
    "cudaMemset",
    "cudaGraphLaunch",
    "cuGraphLaunch",
)
_ALLOCATIONS = ("cudaMalloc", "cuMemAlloc", "cuMemCreate")


@dataclass(frozen=True)
class Activity:
    """What one call did on a CUDA device.

    Attributes:
        launches: host calls that started device work.
        operations: kernels, copies and memsets that ran on the device.
        allocations: requests to torch's allocator plus the driver's own.
        calls: the launches by name of the driver or runtime call.
    """

    launches: int
    operations: int
    allocations: int
    calls: dict[str, int]


def activity(call: Callable[[], object], device: torch.device) -> Activity:
    """Run `call` under torch's profiler (CUPTI) and count. CUDA devices only."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device).get("allocation.all.allocated", 0)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize(device)
    requested = torch.cuda.memory_stats(device).get("allocation.all.allocated", 0) - before
    calls: Counter[str] = Counter()
    operations = driver_allocations = 0
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            operations += 1
        elif event.name.startswith(LAUNCHES):
            calls[event.name] += 1
        elif event.name.startswith(_ALLOCATIONS):
            driver_allocations += 1
    return Activity(calls.total(), operations, requested + driver_allocations, dict(calls))


@dataclass(frozen=True)
class HostTimes:
    """Host times of one call in µs, the device's work not waited for.

    Attributes:
        queued: while the device still works on calls before it, as in steady decoding; the median.
        idle: the first call after the device (and with it the host) had nothing to do; the median.
        least: of the queued calls; what disturbs a measurement only adds to it.
        calls: how many queued calls these are.
    """

    queued: float
    idle: float
    least: float
    calls: int


def host_times(
    call: Callable[[], object],
    device: torch.device,
    bursts: int = 10,
    queue: int = 8,
    before: Callable[[], object] | None = None,
) -> HostTimes:
    """Time `bursts` bursts of `queue` calls, at least 2, each after the device has become idle.

    The bursts are short, so that no call waits for room in the driver's queue. A call that did would take
    as long as the device takes for one: `least` is then far below `queued`.

    Args:
        before: brings back what calls use up; run in front of each burst, not timed.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    queued, idle = [], []
    for _ in range(bursts):
        if before is not None:
            before()
        wait(device)
        times = []
        for _ in range(queue):
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e6)
        idle.append(times[0])
        queued += times[1:]
    wait(device)
    return HostTimes(statistics.median(queued), statistics.median(idle), min(queued), len(queued))
