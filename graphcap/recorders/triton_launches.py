"""Triton launches as a tape holds them: the compiled kernel, its grid and its arguments, launched again
without the Python that found them.

Triton's own launch of a kernel that is compiled costs 20 µs and more of Python (binding, the key of the
cache, the grid); of that only the last call is needed again. Triton makes it through
``CompiledKernel.run``, which is where a launch is seen here, with the very arguments of the driver.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

_BEFORE_ARGUMENTS = 9
"""Grid (3), stream, function, packed metadata, launch metadata, hooks before and after."""
_STREAM = 3


class TritonLaunch:
    """One launch with fixed arguments. Keeps its tensors alive.

    Attributes:
        kernel: the kernel's name.
        tensors: whose memory it reads or writes.
    """

    __slots__ = ("_arguments", "_fixed", "_grid", "_held", "_launcher", "kernel", "tensors")

    def __init__(
        self, kernel: Any, launcher: Callable[..., object], given: tuple[Any, ...]
    ) -> None:
        self.kernel = str(getattr(kernel, "name", "?"))
        self._launcher = launcher
        self._grid = given[:_STREAM]
        # No launch metadata and no hooks: they are for profilers, and built anew for each launch.
        self._fixed = (*given[_STREAM + 1 : _BEFORE_ARGUMENTS - 3], None, None, None)
        arguments = given[_BEFORE_ARGUMENTS:]
        self._held = (kernel, arguments)
        self.tensors = tuple(t for a in arguments if (t := _tensor_of(a)) is not None)
        # An address costs the launcher less than a tensor, which it asks for its own.
        self._arguments = tuple(
            a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments
        )

    def on(self, stream: int) -> Callable[[], object]:
        """The call that launches it on `stream`, a raw handle."""
        return partial(self._launcher, *self._grid, stream, *self._fixed, *self._arguments)

    def __call__(self) -> None:
        self.on(current_stream())()


def current_stream() -> int:
    """The handle of the stream on which Triton launches now."""
    from triton.runtime import driver

    active: Any = driver.active
    return int(active.get_current_stream(active.get_current_device()))


def _tensor_of(argument: Any) -> torch.Tensor | None:
    if isinstance(argument, torch.Tensor):
        return argument
    base = getattr(argument, "base", None)  # a TMA descriptor, or another view of a tensor
    return base if isinstance(base, torch.Tensor) else None


# -- seeing them ---------------------------------------------------------------------------------

Seen = Callable[[Any, Callable[..., object], "tuple[Any, ...]"], None]
"""What happens with a launch: (compiled kernel, launcher, the launcher's arguments). It launches."""


class _ThreadState(threading.local):
    seen_by: Seen | None = None


_state = _ThreadState()
_lock = threading.Lock()
_watchers = 0


def _compiled_kernel() -> Any:
    """Triton's class, whose `run` is a property that gives the launcher; None: this Triton has another
    way (before 3.5), or was not imported, and cannot launch."""
    if "triton" not in sys.modules:
        return None
    try:
        from triton.compiler.compiler import CompiledKernel
    except ImportError:
        return None
    return CompiledKernel if isinstance(vars(CompiledKernel).get("run"), property) else None


def triton_is_recorded() -> bool:
    """Whether a tape on a GPU records the launches of the Triton that was imported here."""
    return _compiled_kernel() is not None


def launches_can_be_seen(device: torch.device) -> bool:
    """Whether `triton_launches_given_to` sees what Triton launches on `device`: not if it is an old Triton,
    nor its interpreter, which launches nothing."""
    if device.type != "cuda":
        return False
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    interprets = bool(getattr(getattr(knobs, "runtime", None), "interpret", False))
    return not interprets and _compiled_kernel() is not None


@contextmanager
def triton_launches_given_to(seen: Seen) -> Iterator[None]:
    """Give every Triton launch of this thread to `seen` in place of launching it.

    Raises:
        RuntimeError: `launches_can_be_seen` is False.
    """
    owner = _compiled_kernel()
    if owner is None:
        raise RuntimeError("this Triton does not launch through CompiledKernel.run")
    before = _state.seen_by
    _state.seen_by = seen
    _watch(owner)
    try:
        yield
    finally:
        _state.seen_by = before
        _watch_no_more(owner)


def _watch(owner: Any) -> None:
    """Other threads, which may launch or record meanwhile, find the same property."""
    global _watchers
    with _lock:
        _watchers += 1
        if _watchers == 1:
            owner.run = _Watching(vars(owner)["run"])


def _watch_no_more(owner: Any) -> None:
    global _watchers
    with _lock:
        _watchers -= 1
        if _watchers == 0:
            owner.run = vars(owner)["run"].original


class _Watching(property):
    """`CompiledKernel.run` while some thread records."""

    def __init__(self, original: property) -> None:
        super().__init__(self._found)
        self.original = original

    def _found(self, kernel: Any) -> Any:
        launcher = self.original.__get__(kernel)
        seen = _state.seen_by
        if seen is None:
            return launcher

        def launch(*given: Any) -> None:
            seen(kernel, launcher, given)

        return launch
