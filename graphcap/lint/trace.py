"""LintTrace: the recorders' guard, which notes what they would refuse and lets it pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from graphcap.lint.finding import CUDA, RECORDERS, TAPE, WEAKENS, Notes
from graphcap.lint.host_memory import FROM_VALUES, HostMemory
from graphcap.lint.operator_rules import (
    note_collective,
    note_draw,
    note_host_copy,
    note_wait_inside,
)
from graphcap.lint.places import Site, site_here
from graphcap.lint.python_calls import NotingHostReads, Refusal
from graphcap.lint.signature import signature_of
from graphcap.lint.stand_ins import CudaStandIns
from graphcap.operations import Operation, observed_by
from graphcap.recorders.dispatched import storage_key, tensors_in, written_by
from graphcap.recorders.guard import COLLECTIVES, StepGuard
from graphcap.recorders.out_variants import out_call

_CONTROL_FLOW = {
    "__bool__": "bool() of a tensor (if, while, and, or, not)",
    "__contains__": "in, of a tensor",
    "is_nonzero": "bool() of a tensor",
}
_READS = {
    "item": ".item()",
    "__int__": "int() of a tensor",
    "__float__": "float() of a tensor",
    "__index__": "a tensor as a Python index or length",
    "__getitem__": "a tensor of one number as an index",
    "__setitem__": "a tensor of one number as an index",
}


@dataclass(frozen=True)
class Entry:
    """One operation of a run.

    Attributes:
        signature: shapes, dtypes and values of its arguments; tensors' contents are not in it.
        outside: storages that it reads and that the run did not make.
    """

    name: str
    site: Site
    signature: tuple[Any, ...]
    outside: tuple[int, ...]


@dataclass
class _Allocations:
    site: Site
    count: int = 0
    nbytes: int = 0
    at_replay: int = 0


class LintTrace(StepGuard):
    """Watches one run of a step.

    Args:
        cuda: what stands in for `torch.cuda`.
        recorders: those whose refusals the run tells.
        warming_up: the step is not told that it is captured, as it is for cuda otherwise.

    Attributes:
        notes: what was found.
        entries: the calls of the run, in order, views included.
        operations: how many of them a tape would hold.
        outside: storages that were there before the run and that it read or wrote.
    """

    def __init__(
        self,
        device: torch.device,
        cuda: CudaStandIns,
        recorders: tuple[str, ...] = RECORDERS,
        *,
        warming_up: bool = False,
    ) -> None:
        super().__init__(device, replays_live=True)
        self.notes = Notes(recorders)
        self.entries: list[Entry] = []
        self.outside: dict[int, Any] = {}
        self.host = HostMemory(device)
        self.operations = 0
        self.calls: list[tuple[Any, Any]] = []
        """torch's Python functions that are running, outermost first, and the generator of each."""
        self._cuda = cuda
        self._capturing = CUDA in recorders and not warming_up
        self._made: set[int] = set()
        self._refused_by: dict[str, Refusal] = {}  # the operation that runs now
        self._fresh: dict[Any, _Allocations] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(observed_by(self))
            stack.enter_context(NotingHostReads(self))
            stack.enter_context(self._cuda.noting(self.notes, capturing=self._capturing))
            stack.enter_context(self)
            yield
        self._note_allocations()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What runs in it is part of something that was noted as a whole."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    # -- what the recorders refuse ---------------------------------------------------------------

    def refusal(self, what: str, why: str, cure: str) -> Any:
        return Refusal(what, why, cure)

    def note_refusal(self, refusal: Refusal, kind: str, breaks: tuple[str, ...]) -> None:
        self.notes.note(kind, refusal.what, refusal.why, refusal.cure, breaks=breaks)

    def _refuse_dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refusals: dict[str, Refusal] = {}
        self._refused_by = refusals
        for recorder, self.replays_live in ((CUDA, False), (TAPE, True)):
            try:
                super()._refuse_dispatch(func, args, kwargs)
            except Refusal as refusal:
                refusals[recorder] = refusal
        if not refusals:
            return
        kind, name = self._kind_of(func)
        by_text: dict[tuple[str, str], list[str]] = {}
        for recorder, found in refusals.items():
            found.what = name or found.what
            by_text.setdefault((found.what, found.why), []).append(recorder)
        for names in by_text.values():
            self.note_refusal(refusals[names[0]], kind, tuple(names))

    def _kind_of(self, func: Any) -> tuple[str, str | None]:
        """The kind of a refused operation, and how the step spelt it if that tells more."""
        packet, tags = func.overloadpacket.__name__, func.tags
        spoken = getattr(self.calls[-1][0], "__name__", "") if self.calls else ""
        if func.namespace in COLLECTIVES:
            return "collective", None
        if torch.Tag.inplace_view in tags:
            return "rebinding", None
        if packet in ("_to_copy", "copy_", "copy"):
            return "host copy", None
        if torch.Tag.data_dependent_output in tags:
            if spoken in _CONTROL_FLOW:
                return "control flow", _CONTROL_FLOW[spoken]
            return "host read", _READS.get(spoken)
        if not any("Tensor" in str(returned.type) for returned in func._schema.returns):
            return "host read", None
        return "data-dependent shape", None

    # -- what runs -------------------------------------------------------------------------------

    def called(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._append(operation.name, (args, kwargs))
        self.operations += 1
        if self.device.type != "meta":
            operation.function(*args, **kwargs)

    def dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packet = func.overloadpacket.__name__
        spoken = self.calls[-1][1] if self.calls else None
        is_known = spoken is torch.default_generator or self._cuda.knows(spoken)
        note_draw(self.notes, func, args, kwargs, is_known, self._cuda.seeded)
        note_collective(self.notes, func)
        note_host_copy(self.notes, self.host, func, args, kwargs)
        note_wait_inside(self.notes, func)
        site = self._append(str(func), (args, kwargs), func)
        written = written_by(func, args, kwargs)
        before = [(tensor.data_ptr(), tensor.shape) for tensor in written]
        result = self._run(func, args, kwargs)
        now = [(tensor.data_ptr(), tensor.shape) for tensor in written]
        if now != before and TAPE not in self._refused_by:
            self.notes.note(
                "rebinding",
                str(func),
                "it resized the tensor that it writes to, which changes its shape or address",
                "give it an output of the right shape",
                breaks=(TAPE,),
            )
        inputs = {storage_key(t) for t in tensors_in((args, kwargs))}
        fresh = [t for t in tensors_in(result) if storage_key(t) not in inputs]
        self._made |= {storage_key(t) for t in fresh}
        if packet == "lift_fresh":
            self._made |= inputs
            self._note_values(result)
            self.operations += 1
            return result
        self.host.follow((args, kwargs), result)
        changes = bool(written) or func._schema.is_mutable
        allocates = changes
        if changes:
            self.operations += 1
        elif fresh or func.namespace != "aten":
            call, allocates = out_call(func, args, kwargs, result)
            self.operations += call is not None
        if fresh and not site.in_pool:
            self._count_fresh(fresh, site, allocates)
        return result

    def _append(self, name: str, values: Any, func: Any = None) -> Site:
        self._cuda.launch()
        site = site_here()
        if site.in_pool:  # a view of the arena, made when it is first asked for
            return site
        outside = []
        for tensor in tensors_in(values):
            key = storage_key(tensor)
            if key not in self._made:
                outside.append(key)
                self.outside.setdefault(key, tensor.untyped_storage())
        constant = func is not None and func.overloadpacket.__name__ == "lift_fresh"
        if constant:  # made of Python values just now
            outside = []
        self.entries.append(
            Entry(name, site, signature_of(values, contents=constant), tuple(outside))
        )
        return site

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except NotImplementedError:
            if func.namespace in ("aten", "prims") or self.device.type == "meta":
                raise
            made_up = _zeros_by_meta(func, args, kwargs)
            if made_up is None:
                raise
            self.notes.note(
                "custom operator",
                str(func),
                "it has no CPU kernel; lint went on with zeros of the shapes that its fake (meta) "
                "implementation gives",
                "nothing to do for capture; give it a CPU kernel to have what follows linted on "
                "real values",
            )
            return made_up

    def _note_values(self, result: torch.Tensor) -> None:
        """A tensor of Python or numpy values has come into being."""
        func = self.calls[-1][0] if self.calls else None
        if func is None or func in FROM_VALUES:
            self.host.add(result)

    def _count_fresh(self, fresh: list[torch.Tensor], site: Site, allocates: bool) -> None:
        count = self._fresh.setdefault(site.place, _Allocations(site))
        count.count += 1
        count.nbytes += sum(tensor.untyped_storage().nbytes() for tensor in fresh)
        count.at_replay += allocates

    def _note_allocations(self) -> None:
        for found in self._fresh.values():
            again = f", {found.at_replay} at every replay on the tape" if found.at_replay else ""
            noun = "operation returns" if found.count == 1 else "operations return"
            self.notes.note(
                "allocation",
                f"{found.count} {noun} new storage ({_size(found.nbytes)}){again}",
                "each recording keeps it beside the pool; GRAPHCAP_STRICT=1 refuses what the tape "
                "allocates at every replay",
                "use the out= forms with buffers of a BufferPool where it matters",
                severity=WEAKENS,
                site=found.site,
            )


def _zeros_by_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` returns by its meta implementation, as zeros on the CPU; None: it has none."""
    from torch.utils._pytree import tree_map_only

    try:
        on_meta = tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
        result = func(*on_meta[0], **on_meta[1])
    except (NotImplementedError, RuntimeError):
        return None
    return tree_map_only(torch.Tensor, lambda t: torch.zeros_like(t, device="cpu"), result)


def _size(nbytes: int) -> str:
    return f"{nbytes:,} B" if nbytes < 1024 else f"{nbytes / 1024:,.1f} KiB"
