"""The kernel layer: every device operation that graphcap itself starts goes through an `Operation`.

An operation writes its results into tensors that the caller owns; it never returns new storage. That
makes one call one entry of a tape and one row of the census, whatever number of launches it makes
inside, and it lets a recorder see kernels that do not pass through torch's dispatcher (Triton's).

Who wants to see the calls of a step (tape, census) installs itself as the thread's observer. Without
one a call costs a single attribute look-up more than calling the function itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

BufferSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a scratch buffer."""

ScratchPlan = Callable[..., Mapping[str, BufferSpec]]
"""Given the arguments of a call: the scratch buffers (keyword name -> spec) it needs."""


@dataclass(frozen=True)
class KernelChoice:
    """Which kernel an operation of a step runs on; chosen when the step is built.

    Attributes:
        operation: the row of the census.
        kernel: what runs.
        note: why it is not the backend's own; empty where it is.
    """

    operation: str
    kernel: str
    note: str = ""


class Observer(Protocol):
    """Sees each outermost operation of this thread instead of its being run directly."""

    def operation(
        self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None: ...


class _ThreadState(threading.local):
    observer: Observer | None = None


_state = _ThreadState()


class Operation:
    """A device operation with out-parameters only.

    Attributes:
        name: the row of the census, a standard term such as ``"rms_norm"``.
        implementation: what runs, such as ``"torch"`` or ``"triton: grouped_gemm"``.
        function: does the work. Called with the arguments of the call and nothing else.
        scratch: names the temporary buffers the function wants as keyword arguments; they are taken
            from the pool for the length of the call (see `BufferPool.run`). None: it needs none.
    """

    __slots__ = ("function", "implementation", "name", "scratch")

    def __init__(
        self,
        name: str,
        implementation: str,
        function: Callable[..., None],
        scratch: ScratchPlan | None = None,
    ) -> None:
        self.name = name
        self.implementation = implementation
        self.function = function
        self.scratch = scratch

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        observer = _state.observer
        if observer is None:
            self.function(*args, **kwargs)
        else:
            observer.operation(self, args, kwargs)

    def named(self, name: str) -> Operation:
        """The same operation under another row of the census (a projection, a router GEMM)."""
        return Operation(name, self.implementation, self.function, self.scratch)

    def __repr__(self) -> str:
        return f"Operation({self.name!r}, {self.implementation!r})"


def operation(
    name: str, implementation: str = "torch", scratch: ScratchPlan | None = None
) -> Callable[[Callable[..., None]], Operation]:
    """Decorator: make a function that writes into its arguments an `Operation`."""

    def decorate(function: Callable[..., None]) -> Operation:
        return Operation(name, implementation, function, scratch)

    return decorate


@contextmanager
def observed_by(observer: Observer | None) -> Iterator[None]:
    """Install `observer` for this thread; None hides the calls from whoever observed before."""
    previous = _state.observer
    _state.observer = observer
    try:
        yield
    finally:
        _state.observer = previous


def current_observer() -> Observer | None:
    return _state.observer


def kernel_choices(kernels: Any, notes: Mapping[str, str]) -> tuple[KernelChoice, ...]:
    """The choice of each operation of a dataclass of operations; `notes` is by name of its field."""
    return tuple(
        KernelChoice(value.name, value.implementation, notes.get(field.name, ""))
        for field in fields(kernels)
        if isinstance(value := getattr(kernels, field.name), Operation)
    )
