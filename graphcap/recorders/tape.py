"""The tape: a list of device operations with fixed addresses, replayed without the model's Python.

While a step is recorded it runs for real; every dispatcher operation and every call through the
kernel layer becomes an entry that writes where the recorded run wrote. Operations that return new
storage are replayed through their out-variant; where there is none, they run again and their result
is copied to the recorded address, which is counted as an allocation. Views cost nothing at replay.

On a GPU the entries are what reaches the device: a Triton kernel is recorded compiled, with its grid and
its arguments, whoever launched it, and so are those inside an operation of graphcap's own Triton kernels.
An operation that is implemented in Python is called whole at each replay, unless its host has told that
all it launches is seen from here (`opened_as`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from graphcap.census import Call, Census
from graphcap.errors import CaptureError, StateError
from graphcap.operations import Operation, current_observer
from graphcap.recorders.base import BoundStep, Recorder, Recording, autocast_casts_not_kept
from graphcap.recorders.bindings import opened, repeatable
from graphcap.recorders.dispatched import (
    dispatch_row,
    has_effect,
    storage_key,
    tensors_in,
    written_by,
)
from graphcap.recorders.guard import StepGuard
from graphcap.recorders.out_variants import out_call, run_and_copy
from graphcap.recorders.source import calling_line, is_out_of_memory, raising_line
from graphcap.recorders.triton_launches import (
    TritonLaunch,
    current_stream,
    launches_can_be_seen,
    triton_launches_given_to,
)


@dataclass(frozen=True)
class Entry:
    """One replayable operation."""

    call: Callable[[], object]
    counted: Call


class TapeTrace(StepGuard):
    """Runs a step and writes down its operations.

    Args:
        device: the device that the step runs on. On ``meta`` kernel-layer calls are counted and
            not executed: they own no memory there and return nothing.
        replays_live: see `StepGuard`; False only counts, for a step that will not be replayed.
    """

    def __init__(self, device: torch.device, *, replays_live: bool = True) -> None:
        super().__init__(device, replays_live=replays_live)
        self.entries: list[Entry] = []
        self.own_bytes = 0
        """Bytes of storage that recorded operations returned and the tape now keeps alive."""
        self.inference = False
        """Whether the step made tensors under ``torch.inference_mode``: only there may they be written."""
        self.pinned: dict[int, Any] = {}
        """Storages that the step reads or writes and that were there before it."""
        self._owned: set[int] = set()
        self._records_launches = replays_live and launches_can_be_seen(device)
        self._opened: Operation | None = None

    def _pin(self, inputs: Mapping[int, Any]) -> None:
        for key, storage in inputs.items():
            if key not in self._owned:
                self.pinned.setdefault(key, storage)

    def called(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._pin({storage_key(t): t.untyped_storage() for t in tensors_in((args, kwargs))})
        if self._records_launches and operation.implementation.startswith("triton"):
            before = len(self.entries)
            with self._looking_inside(operation):
                operation.function(*args, **kwargs)
            if len(self.entries) > before:
                return
        elif self.device.type != "meta":
            operation.function(*args, **kwargs)
        self.entries.append(
            Entry(
                partial(operation.function, *args, **kwargs),
                Call(operation.name, operation.implementation),
            )
        )

    def dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = written_by(func, args, kwargs)
        before = [(tensor.data_ptr(), tensor.shape) for tensor in written]
        result = func(*args, **kwargs)
        self.inference = self.inference or any(
            t.is_inference() for t in tensors_in([result, written])
        )
        if [(tensor.data_ptr(), tensor.shape) for tensor in written] != before:
            raise self.refusal(
                str(func),
                "it resized the tensor that it writes to, which changes its shape or address",
                "give it an output of the right shape",
            )
        inputs = {storage_key(t): t.untyped_storage() for t in tensors_in((args, kwargs))}
        is_constant = func.overloadpacket.__name__ == "lift_fresh"
        if is_constant and _is_torchs_own(result):
            self._owned |= inputs.keys()
        self._pin(inputs)
        fresh = [t for t in tensors_in(result) if storage_key(t) not in inputs]
        for tensor in fresh:
            if storage_key(tensor) not in self._owned:
                self._owned.add(storage_key(tensor))
                self.own_bytes += tensor.untyped_storage().nbytes()
        if written or func._schema.is_mutable:
            if fresh:  # it changes an argument and returns new storage as well
                again = partial(run_and_copy, func, args, kwargs, _results(_kept(result)))
                self._append(func, again, allocates=True)
            else:
                self._append(func, repeatable(func, args, kwargs), allocates=False)
            return result
        if is_constant:
            # A constant that torch.tensor() made from Python values. The step may write into it, so
            # each replay has to see the values of now. Memory that is not torch's own (a numpy array,
            # whose storage cannot be resized) belongs to somebody else: it is read as it is.
            if _is_torchs_own(result):
                self._append(func, partial(result.copy_, result.clone()), allocates=False)
            return result
        if not fresh and func.namespace == "aten" and not has_effect(func):
            return result  # a view, or a query
        call, allocates = out_call(func, args, kwargs, _kept(result))
        if call is not None:
            self._append(func, call, allocates=allocates)
        return result

    def looks_inside(self, func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        return opened(func, args) if self._records_launches else None

    @contextmanager
    def _looking_inside(self, operation: Operation) -> Iterator[None]:
        depth, opened = self._depth, self._opened
        self._depth, self._opened = 0, operation
        try:
            yield
        finally:
            self._depth, self._opened = depth, opened

    def _triton_launches(self) -> AbstractContextManager[None]:
        if not self._records_launches:
            return super()._triton_launches()
        return triton_launches_given_to(self._launched)

    def _launched(
        self, kernel: Any, launcher: Callable[..., object], given: tuple[Any, ...]
    ) -> None:
        launcher(*given)
        if self.is_inside:
            return
        launch = TritonLaunch(kernel, launcher, given)
        self._pin({storage_key(t): t.untyped_storage() for t in launch.tensors})
        opened = self._opened
        row = launch.kernel if opened is None else opened.name
        self.entries.append(Entry(launch, Call(row, f"triton: {launch.kernel}")))

    def _append(self, func: Any, call: Callable[[], object], *, allocates: bool) -> None:
        self.entries.append(Entry(call, Call(dispatch_row(func), "torch", allocates)))


class TapeRecording(Recording):
    def __init__(self, trace: TapeTrace, outputs: Mapping[str, torch.Tensor]) -> None:
        self.outputs = outputs
        self.nbytes = trace.own_bytes
        self.pinned = tuple(trace.pinned.values())
        self._mode = torch.inference_mode if trace.inference else torch.no_grad
        self._entries: tuple[Callable[[], object], ...] | None = tuple(
            e.call for e in trace.entries
        )
        self._calls: tuple[Callable[[], object], ...] = ()
        self._launches = any(isinstance(e.call, TritonLaunch) for e in trace.entries)
        self._stream: int | None = None
        self._names = tuple(e.counted.operation for e in trace.entries)
        self._census = Census.of(entry.counted for entry in trace.entries)

    def replay(self) -> None:
        calls = self._current()
        with self._mode():
            for call in calls:
                call()

    def timed_replay(self) -> list[tuple[str, float, float]]:
        """As `replay`, on the clock of the host: (operation, start, end) of each entry, in seconds of
        ``time.perf_counter``. On a device that is when the host started it."""
        calls = self._current()
        clock, times = time.perf_counter, []
        with self._mode():
            for name, call in zip(self._names, calls, strict=True):
                started = clock()
                call()
                times.append((name, started, clock()))
        return times

    def _current(self) -> tuple[Callable[[], object], ...]:
        """The entries as calls; those of Triton kernels on the current stream, as torch's are by nature."""
        if self._entries is None:
            raise StateError("this recording is closed and cannot be replayed; capture again")
        stream = current_stream() if self._launches else 0
        if stream != self._stream:
            self._calls = tuple(
                e.on(stream) if isinstance(e, TritonLaunch) else e for e in self._entries
            )
            self._stream = stream
        return self._calls

    def census(self) -> Census:
        return self._census

    def close(self) -> None:
        self._entries, self._calls = None, ()
        self.outputs = {}
        self.pinned = ()


class TapeRecorder(Recorder):
    """Records on CPUs, and on devices that refuse graph capture."""

    name = "tape"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm_up(self, step: BoundStep) -> Mapping[str, torch.Tensor]:
        with torch.no_grad(), autocast_casts_not_kept():
            return step()

    def record(self, step: BoundStep, bucket: int) -> TapeRecording:
        if current_observer() is not None:
            raise StateError(
                "a recording was started inside a step that is being recorded; recordings do not "
                "nest: end that one first"
            )
        trace = TapeTrace(self.device)
        try:
            with torch.no_grad(), autocast_casts_not_kept(), trace.watching():
                outputs = step()
        except CaptureError:
            raise
        except Exception as error:
            cure = (
                "record fewer or smaller buckets (GRAPHCAP_BUCKETS) or free some memory"
                if is_out_of_memory(error)
                else "the same step ran when it was warmed up: look for what differs from run to run"
            )
            raise CaptureError(
                f"bucket {bucket}: the step raised {type(error).__name__} at "
                f"{_raised_at(error)} while it was recorded: {error}; {cure}"
            ) from error
        return TapeRecording(trace, dict(outputs))


def count_step(step: BoundStep, device: torch.device) -> Census:
    """Run `step` once and count its operations. On ``meta`` nothing is computed."""
    trace = TapeTrace(device, replays_live=False)
    with torch.no_grad(), trace.watching():
        step()
    return Census.of(entry.counted for entry in trace.entries)


def _raised_at(error: BaseException) -> str:
    return raising_line(error.__traceback__) or calling_line()


def _is_torchs_own(tensor: torch.Tensor) -> bool:
    """Whether torch made the memory: foreign memory (a numpy array's) cannot be resized. Before torch
    2.2 a storage does not tell, and all memory counts as torch's."""
    ask = getattr(tensor.untyped_storage(), "resizable", None)
    return True if ask is None else bool(ask())


def _kept(result: Any) -> Any:
    """`result` for the tape to hold: in inference mode other tensors of the same memory.

    Before torch 2.2 a factory (``torch.zeros``) gives its new tensor a version counter on the way back to
    the step, unless nobody else holds it, and an inference tensor takes none.
    """
    if not torch.is_inference_mode_enabled():
        return result
    return tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def _results(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
