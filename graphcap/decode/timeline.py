"""The timeline of one step: when each operation ran, on the host and on the device.

On a CUDA device torch's profiler (CUPTI) tells. On a CPU the profiler would cost more than most
operations: there the clock is read before and after each operation of the kernel layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphcap.decode.measure import LAUNCHES
from graphcap.operations import Operation, observed_by

Times = list[tuple[str, float, float]]
"""(operation, start, end) in seconds of one clock."""


@dataclass(frozen=True)
class Lane:
    """What ran one after the other in one place.

    Attributes:
        names: of operations, each once.
        operations: (index into `names`, start, length), both in µs since the first of the timeline.
    """

    names: tuple[str, ...]
    operations: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True)
class Timeline:
    """One step.

    Attributes:
        clock: ``profiler``, which makes launches longer than they are without, or ``host``.
        host: on a CUDA device the calls that start device work; on a CPU the operations themselves.
        device: kernels, copies and memsets; None on a CPU.
        us: from the start of the first to the end of the last, in µs.
    """

    clock: str
    host: Lane
    device: Lane | None
    us: float


def profiled(step: Callable[[], object], device: torch.device) -> Timeline:
    """Run `step` under torch's profiler, once to attach it and once to be looked at. CUDA devices only."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize(device)
    host: Times = []
    on_device: Times = []
    for event in profiler.events() or ():
        span = (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        if event.device_type == DeviceType.CUDA:
            on_device.append(span)
        elif event.name.startswith(LAUNCHES):
            host.append(span)
    return _timeline("profiler", host, on_device)


def timed(step: Callable[[], object]) -> Timeline:
    """Run an eager `step` on a CPU and time each operation of the kernel layer."""
    stopwatch = _Stopwatch()
    with observed_by(stopwatch):
        step()
    return of_times(stopwatch.times)


def of_times(times: Times) -> Timeline:
    """The timeline of operations that were timed on the host's clock."""
    return _timeline("host", times, None)


class _Stopwatch:
    """An observer of the kernel layer that runs each operation and writes down when."""

    def __init__(self) -> None:
        self.times: Times = []

    def operation(
        self, operation: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        with observed_by(None):
            started = time.perf_counter()
            operation.function(*args, **kwargs)
            self.times.append((operation.name, started, time.perf_counter()))


def _timeline(clock: str, host: Times, device: Times | None) -> Timeline:
    everything = [*host, *(device or ())]
    first = min((start for _, start, _ in everything), default=0.0)
    last = max((end for _, _, end in everything), default=0.0)
    return Timeline(
        clock,
        _lane(host, first),
        None if device is None else _lane(device, first),
        (last - first) * 1e6,
    )


def _lane(times: Iterable[tuple[str, float, float]], first: float) -> Lane:
    names: dict[str, int] = {}
    operations = tuple(
        (
            names.setdefault(name, len(names)),
            round((start - first) * 1e6, 2),
            round((end - start) * 1e6, 2),
        )
        for name, start, end in sorted(times, key=lambda entry: entry[1])
    )
    return Lane(tuple(names), operations)
