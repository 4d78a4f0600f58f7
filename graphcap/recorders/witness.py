"""StepWitness: sees a step's operations one by one and keeps copies of what they write.

It works the same where the step is recorded and where it runs eagerly. Under a recorder the copies
become part of the recording, so that each replay fills them: this is how the inside of a CUDA graph can
be looked at, whose intermediates are overwritten before a replay has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap.operations import Observer, Operation, current_observer, observed_by
from graphcap.recorders.dispatched import storage_key, tensors_in, written_by
from graphcap.recorders.out_variants import UNWRITTEN
from graphcap.recorders.source import calling_line

_LARGEST = 2**26


@dataclass(frozen=True)
class Witnessed:
    """One operation of a step.

    Attributes:
        name, line: what it is, and ``file:line (function)`` of the step's code.
        results: copies of what it wrote; empty where none were to be kept.
    """

    name: str
    line: str
    results: tuple[torch.Tensor, ...] = ()


class StepWitness(TorchDispatchMode):
    """Enter it around one run of a step by `around`.

    Memory that the step leaves unwritten (`torch.empty`) is filled, with NaN where it can be: two runs
    would find different garbage there and seem to differ.

    Args:
        first: copies are kept from the operation of this index on.
        budget: bytes of copies; the first operation that does not fit ends them. One operation is always
            kept, but for tensors above 64 MiB: of these (caches) nothing is.
        known: storages that kernel-layer operations read and do not write (weights).

    Attributes:
        seen: all operations, in order.
        end: index behind the last one whose results were kept.
    """

    def __init__(self, first: int, budget: int, known: Iterable[int]) -> None:
        super().__init__()
        self.seen: list[Witnessed] = []
        self.end = first
        self._first = first
        self._left = budget
        self._known = frozenset(known)
        self._depth = 0
        self._observer: Observer | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See `StepGuard`."""
        return False

    def around(
        self, step: Callable[[], Mapping[str, torch.Tensor]]
    ) -> Callable[[], Mapping[str, torch.Tensor]]:
        """`step`, watched. Its outputs count as the last operations, one each: a kernel that is launched
        behind torch's back is seen by what it leaves there."""

        def run() -> Mapping[str, torch.Tensor]:
            self._observer = current_observer()
            with observed_by(self), self:
                outputs = step()
                self._depth += 1  # copies of outputs are no operations of the step
                for name, output in outputs.items():
                    self._note(f"output {name!r}", "", [output])
            return outputs

        return run

    # -- the two ways to the device --------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords: dict[str, Any] = kwargs or {}
        if self._depth:
            return func(*args, **keywords)
        self._depth += 1
        try:
            result = func(*args, **keywords)
            if func.overloadpacket.__name__ in UNWRITTEN:
                for tensor in tensors_in(result):
                    _fill(tensor)
                return result
            inputs = {storage_key(tensor) for tensor in tensors_in((args, keywords))}
            changed = written_by(func, args, keywords)
            changed += [t for t in tensors_in(result) if storage_key(t) not in inputs]
            if changed:
                self._note(str(func), calling_line(), changed)
            return result
        finally:
            self._depth -= 1

    def operation(
        self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._depth:
            operation.function(*args, **kwargs)
            return
        self._depth += 1
        try:
            if self._observer is None:
                operation.function(*args, **kwargs)
            else:
                self._observer.operation(operation, args, kwargs)
            # Which of its arguments it writes is not known; scratch may hold anything afterwards.
            scratch = () if operation.scratch is None else operation.scratch(*args)
            given = [args, {key: value for key, value in kwargs.items() if key not in scratch}]
            changed = [t for t in tensors_in(given) if storage_key(t) not in self._known]
            self._note(f"{operation.name} ({operation.implementation})", calling_line(), changed)
        finally:
            self._depth -= 1

    def _note(self, name: str, line: str, changed: Iterable[torch.Tensor]) -> None:
        index = len(self.seen)
        results: tuple[torch.Tensor, ...] = ()
        if index == self.end:
            kept = [t for t in changed if t.layout == torch.strided and t.nbytes <= _LARGEST]
            nbytes = sum(tensor.nbytes for tensor in kept)
            if nbytes <= self._left or index == self._first:
                results = tuple(tensor.clone() for tensor in kept)
                self._left -= nbytes
                self.end = index + 1
        self.seen.append(Witnessed(name, line, results))


def _fill(tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        tensor.zero_()  # it may become an index
    elif tensor.element_size() > 1:  # float8 knows no fill_ before torch 2.2
        tensor.fill_(float("nan"))
