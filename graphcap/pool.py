"""BufferPool: one fixed arena for the intermediates of a step; planned from lifetimes, then frozen.

While *open*, a request is served by the allocator and its lifetime is observed; warming up a step
is what plans the pool. `freeze()` places every buffer in one arena, and from then on the same
requests get views of it: no allocation, the same addresses at every step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from graphcap.errors import PoolError, PoolFrozenError, PoolLimitError, StateError
from graphcap.lifetimes import Lifetimes, PoolLayout
from graphcap.operations import Operation
from graphcap.plan import Plan, aligned, plan_arena

Shape = tuple[int, ...]


@dataclass
class _Request:
    """What has been asked under one name: the most bytes, and the names alive at the same time."""

    nbytes: int
    conflicts: set[str]


class BufferPool:
    """Serves the named buffers of a step.

    A step brackets itself with ``with pool.step():``, takes buffers by name and releases each after
    its last use; what it still holds at the end (its outputs) is released then, and keeps its
    contents until the next step. Layers use the same names again, so they share bytes; buckets do
    too, because every view starts at the buffer's fixed address.

    A pool belongs to one step function run by one thread at a time.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.allocations = 0
        """Requests that went to the device allocator so far (none once frozen, fallbacks aside)."""
        self._requests: dict[str, _Request] = {}
        self._held: dict[str, int] = {}  # name -> aligned bytes
        self._live_bytes = 0
        self._peak_bytes = 0
        self._step_peak_bytes = 0
        self._lifetimes = Lifetimes()
        self._in_step = False
        self._outside = 0
        self._plan: Plan | None = None
        self._arena: torch.Tensor | None = None
        self._overlapping: dict[str, frozenset[str]] = {}
        self._views: dict[tuple[str, Shape, torch.dtype], torch.Tensor] = {}

    # -- a step's side ---------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """One run of the step. Whatever is held when it ends, also by an error, is released. A GPU is the
        current device meanwhile: Triton launches on that one, wherever its tensors lie.

        Inside another ``step()`` of the same pool this does nothing: the outer one is the step.
        """
        if self._in_step:
            yield
            return
        before = None if self._plan is not None or self._outside else self._observed()
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        self._in_step = True
        try:
            with on_device:
                yield
        except BaseException:
            if before is not None:
                # A step that failed plans nothing: what it ran out of would be asked for again.
                self._requests, self._peak_bytes = before
                self._step_peak_bytes = 0
            raise
        finally:
            self._in_step = False
            self._held.clear()
            self._live_bytes = 0
            if self._plan is None:
                self._lifetimes.ended(self._step_peak_bytes)
                self._step_peak_bytes = 0

    def take(self, name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of `shape` and `dtype` with undefined contents, owned by the pool.

        Raises:
            PoolError: `name` is held already.
            PoolFrozenError: frozen, and the request is unknown, larger than planned, or would
                overlap a buffer that is held. Names the caller, what it asked and what is held.
        """
        if self._plan is not None and not self._outside:
            view = self._views.get((name, shape, dtype))
            if view is None:
                view = self._new_view(name, shape, dtype)
            held = self._held
            if name in held or not self._overlapping[name].isdisjoint(held):
                raise self._conflict(name, shape, dtype)
            held[name] = 0
            return view
        if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise PoolError(
                f"buffer {name!r} was asked for by {_caller()} with shape {shape!r}, expected a tuple of "
                f"integers of at least 0; give tuple(x.shape), or numbers that the host knows"
            )
        nbytes = _nbytes(shape, dtype)
        if name in self._held:
            raise PoolError(
                f"buffer {name!r} was taken by {_caller()} while it is still held; release it after "
                f"its last use or take the second one under another name"
            )
        if self._outside:
            self._held[name] = 0
        else:
            self._observe(name, nbytes)
            self._held[name] = aligned(nbytes)
        self.allocations += 1
        return torch.empty(shape, dtype=dtype, device=self.device)

    def release(self, *names: str) -> None:
        """End the life of buffers; their bytes may be given to others from here on."""
        for name in names:
            try:
                self._live_bytes -= self._held.pop(name)
            except KeyError:
                raise PoolError(
                    f"buffer {name!r} was released by {_caller()} but is not held; "
                    f"held: {self._held_names()}"
                ) from None
            if self._plan is None:
                self._lifetimes.released(name)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """A failure inside releases what was taken since: for whoever then does it in another way."""
        before = set(self._held)
        try:
            yield
        except BaseException:
            self.release(*(name for name in tuple(self._held) if name not in before))
            raise

    def run(self, operation: Operation, *args: Any) -> None:
        """Call `operation`, giving it its scratch buffers from the pool for the length of the call."""
        if operation.scratch is None:
            operation(*args)
            return
        wanted = operation.scratch(*args)
        names = [f"{operation.name}/{key}" for key in wanted]
        scratch = {
            key: self.take(name, shape, dtype)
            for name, (key, (shape, dtype)) in zip(names, wanted.items(), strict=True)
        }
        operation(*args, **scratch)
        self.release(*names)

    # -- the manager's side ----------------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        return self._plan is not None

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            raise StateError("the pool has no plan yet; run the step once and call freeze()")
        return self._plan

    @property
    def layout(self) -> PoolLayout:
        """Where each buffer lies, and when it is alive. Raises `StateError` before the freeze."""
        return self._lifetimes.layout(self.plan)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena; 0 before the freeze."""
        return 0 if self._plan is None else self._plan.total

    @property
    def arena(self) -> torch.Tensor:
        """The whole arena as bytes (uint8). It never moves or grows."""
        if self._arena is None:
            raise StateError("the pool has no arena yet; run the step once and call freeze()")
        return self._arena

    def freeze(self, limit_mib: float | None = None) -> Plan:
        """Plan the arena from what was observed and allocate it. From here on nothing moves or grows.

        Args:
            limit_mib: refuse a larger plan (``GRAPHCAP_POOL_MIB``).

        Raises:
            StateError: frozen already, or called inside a step.
            PoolLimitError: the plan is above `limit_mib`; nothing was allocated.
            PoolError: the device has no memory for it.
        """
        if self._plan is not None:
            raise StateError("the pool is frozen already; a frozen pool is never planned again")
        if self._in_step:
            raise StateError("freeze() was called inside a step; call it after the step has ended")
        plan = plan_arena(
            {name: request.nbytes for name, request in self._requests.items()},
            {name: request.conflicts for name, request in self._requests.items()},
            self._peak_bytes,
        )
        if limit_mib is not None and plan.total > limit_mib * 2**20:
            largest = sorted(plan.sizes, key=lambda n: -plan.sizes[n])[:3]
            raise PoolLimitError(
                f"the pool needs {_mib(plan.total)} MiB and at most {limit_mib:g} MiB are allowed; "
                f"largest buffers: "
                + ", ".join(f"{name} {_mib(plan.sizes[name])} MiB" for name in largest)
                + "; raise GRAPHCAP_POOL_MIB or lower the maximum batch"
            )
        try:
            with torch.inference_mode(False):  # an inference tensor is written only in that mode
                arena = torch.empty(plan.total, dtype=torch.uint8, device=self.device)
        except (RuntimeError, MemoryError) as error:  # torch raises either where memory is out
            raise PoolError(
                f"the arena of the pool, {_mib(plan.total)} MiB, cannot be allocated on "
                f"{self.device}: {error}; lower the maximum batch or leave the device more free memory"
            ) from error
        self._arena = arena
        self._overlapping = {name: plan.overlapping(name) for name in plan.offsets}
        self._plan = plan
        return plan

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Serve requests from the allocator although the pool is frozen: for steps that run eagerly.

        Nothing is planned from such a step and the arena is not touched.
        """
        self._outside += 1
        try:
            yield
        finally:
            self._outside -= 1

    def poison(self) -> None:
        """Fill the arena with 0xFF bytes: NaN in every floating-point dtype, -1 in every integer."""
        if self._arena is not None:
            self._arena.fill_(0xFF)

    # -- inside ----------------------------------------------------------------------------------

    def _observed(self) -> tuple[dict[str, _Request], int]:
        copies = {n: _Request(r.nbytes, set(r.conflicts)) for n, r in self._requests.items()}
        return copies, self._peak_bytes

    def _observe(self, name: str, nbytes: int) -> None:
        request = self._requests.get(name)
        if request is None:
            self._requests[name] = _Request(nbytes, set(self._held))
        else:
            request.nbytes = max(request.nbytes, nbytes)
            request.conflicts.update(self._held)
        self._live_bytes += aligned(nbytes)
        self._step_peak_bytes = max(self._step_peak_bytes, self._live_bytes)
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        if self._in_step:  # outside of one, nothing would ever end what is watched
            self._lifetimes.taken(name)

    def _new_view(self, name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        plan = self.plan
        nbytes = _nbytes(shape, dtype)
        if name not in plan.offsets:
            raise self._refusal(name, shape, dtype, "no such buffer was asked for during warm-up")
        capacity = self._requests[name].nbytes
        if nbytes > capacity:
            raise self._refusal(
                name, shape, dtype, f"{nbytes} bytes, but {capacity} bytes were planned"
            )
        start = plan.offsets[name]
        # Outside inference mode, in which torch 2.1 cannot show a view of another dtype to a recorder.
        with torch.inference_mode(False):
            view = self.arena[start : start + nbytes].view(dtype).view(shape)
        self._views[(name, shape, dtype)] = view
        return view

    def _conflict(self, name: str, shape: Shape, dtype: torch.dtype) -> PoolError:
        if name in self._held:
            return PoolError(
                f"buffer {name!r} was taken by {_caller()} while it is still held; release it after "
                f"its last use or take the second one under another name"
            )
        others = ", ".join(sorted(self._overlapping[name] & self._held.keys()))
        return self._refusal(
            name, shape, dtype, f"it shares bytes with {others}, never held with it during warm-up"
        )

    def _refusal(self, name: str, shape: Shape, dtype: torch.dtype, why: str) -> PoolFrozenError:
        return PoolFrozenError(
            f"the pool is frozen: {_caller()} asked for buffer {name!r} {shape} {dtype}: {why}; "
            f"held: {self._held_names()}; the arena has {self.nbytes} bytes. Warm up with the "
            f"largest shapes before capture(), or run this step eagerly with pool.outside()"
        )

    def _held_names(self) -> str:
        return ", ".join(self._held) or "nothing"


def _nbytes(shape: Shape, dtype: torch.dtype) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f}"


def _caller() -> str:
    """File, line and function of the code outside this module that made the request."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        if frame.f_back is None:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
