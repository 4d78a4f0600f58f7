"""Counts of what a call makes the host and the device do, from the profiler and the allocator."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpy", "cudaMemset", "cudaGraphLaunch")
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
        elif event.name.startswith(_LAUNCHES):
            calls[event.name] += 1
        elif event.name.startswith(_ALLOCATIONS):
            driver_allocations += 1
    return Activity(calls.total(), operations, requested + driver_allocations, dict(calls))


def host_times(call: Callable[[], object], device: torch.device, calls: int) -> list[float]:
    """Host times of `call` in µs, sorted, the device's work not waited for. CUDA devices only.

    Each call is made with an empty queue, so that a full one cannot make it wait.
    """
    times = []
    for _ in range(calls):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    torch.cuda.synchronize(device)
    return sorted(taken * 1e6 for taken in times)


def host_microseconds(call: Callable[[], object], device: torch.device, calls: int = 20) -> float:
    """The median of `host_times`."""
    return statistics.median(host_times(call, device, calls))
