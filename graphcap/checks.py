"""Checks: what a recording pinned is still in place, and a replay equals the eager step."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from graphcap.errors import StaleRecordingError, VerificationError

_MAX_DEPTH = 12
_WINDOW = 8
_CHECKED_WHOLE = 32
_ABSENT = object()
_GONE = (IndexError, ValueError)  # a list that became shorter, a closure variable that was deleted
_MODULE_INNARDS = frozenset(vars(torch.nn.Module()))
_NOT_LOOKED_INTO = (
    "builtins",
    "graphcap.inputs",
    "graphcap.manager",
    "graphcap.pool",
    "graphcap.recorders",
    "logging",
    "threading",
    "torch",
    "triton",
)
"""Modules whose objects hold no tensor of a step, or hold it under a name of its own."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-9}
"""Largest relative difference (to the largest magnitude) where results are not bitwise equal: the
same kernels give the same bits, but a library may choose another algorithm under capture."""


@dataclass(frozen=True)
class Watched:
    """What a step reaches by name, and where it was when the step was recorded.

    Attributes:
        value: a tensor, or an object through which one is reached (a module, a list of weights).
        address: of a tensor; None for other objects.
        storage: keeps the recorded memory alive, whatever becomes of the tensor.
    """

    name: str
    holder: Any
    key: Any
    value: Any
    address: int | None = None
    storage: Any = None

    def finder(self) -> Callable[[], Any]:
        """Looks the value up where it was found; runs in C. Raises where the place is gone."""
        if isinstance(self.holder, dict):
            return functools.partial(self.holder.get, self.key, _ABSENT)
        if isinstance(self.holder, (list, tuple)):
            return functools.partial(operator.getitem, self.holder, self.key)
        return functools.partial(getattr, self.holder, self.key, _ABSENT)

    def found(self) -> Any:
        try:
            return self.finder()()
        except _GONE:
            return _ABSENT

    def fault(self) -> str | None:
        if self.found() is not self.value:
            kind = "object" if self.address is None else "tensor"
            return f"is another {kind} now, expected the one"
        if self.address is not None and self.value.data_ptr() != self.address:
            return "has moved to another address, expected the tensor"
        return None

    def recorded(self) -> str:
        if self.address is None:
            return f"of type {type(self.value).__name__}"
        return f"of shape {tuple(self.value.shape)} at {self.address:#x}"

    @property
    def identity(self) -> tuple[str, int, int | None]:
        return self.name, id(self.value), self.address


class _Window:
    """Some watched items, compared in loops that run in C: this happens before every replay."""

    def __init__(self, items: Sequence[Watched]) -> None:
        tensors = [item for item in items if item.address is not None]
        self.items = tuple(items)
        self._finders = tuple(item.finder() for item in items)
        self._values = tuple(item.value for item in items)
        self._addresses = [item.address for item in tensors]
        self._data_ptrs = tuple(item.value.data_ptr for item in tensors)

    def holds(self) -> bool:
        try:
            found = [find() for find in self._finders]
        except _GONE:
            return False
        return (
            all(map(operator.is_, found, self._values))
            and [data_ptr() for data_ptr in self._data_ptrs] == self._addresses
        )


class Fingerprint:
    """Finds out before a replay whether something the recording points at was rebound or moved.

    What is watched: every tensor that can be reached by name from the step (its object, modules,
    closure, default arguments and the globals it names), the objects on the way to them, and `extra`.
    Up to 32 names are all compared at each check. Of more, each check compares the next 8, so a
    moved one is found within count / 8 replays; a parameter, buffer or module that is *assigned* on
    any `torch.nn.Module` makes the next check compare all. The memory itself stays alive as long as
    the fingerprint.

    Args:
        step, extra: see above.
        before: `reachable(step)` from before it last ran. What the step itself rebinds at each run
            (a result that it keeps) differs and is not watched. None: all is watched.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        extra: Mapping[str, torch.Tensor],
        before: Sequence[Watched] | None = None,
    ) -> None:
        found = reachable(step)
        if before is not None:
            settled = {item.identity for item in before}
            found = [item for item in found if item.identity in settled]
        found += [_watch(name, dict(extra), name, tensor) for name, tensor in extra.items()]
        self.watched = tuple(found)
        width = len(found) if len(found) <= _CHECKED_WHOLE else _WINDOW
        self._windows = [
            _Window(found[start : start + width]) for start in range(0, len(found), width or 1)
        ]
        self._next = 0
        self._all_due = False
        # nn.Module.__setattr__ announces a new parameter or buffer to these hooks, also a rebound one.
        self._hooks = [
            nn_module.register_module_parameter_registration_hook(self._assigned),
            nn_module.register_module_buffer_registration_hook(self._assigned),
            nn_module.register_module_module_registration_hook(self._assigned),
        ]

    def check(self) -> None:
        """Raises `StaleRecordingError` with the name of what changed."""
        if self._all_due:
            self._check_all()
        elif self._windows:
            due = self._next
            self._next = due + 1 if due + 1 < len(self._windows) else 0
            if not self._windows[due].holds():
                self._check_all()

    def _check_all(self) -> None:
        self._all_due = False
        for item in self.watched:
            fault = item.fault()
            if fault is not None:
                self._all_due = True  # it stays wrong: say so at every replay
                raise StaleRecordingError(
                    f"{item.name} {fault} {item.recorded()} that was recorded; replaying "
                    f"would use the old one. Copy new values into it in place "
                    f"(tensor.copy_(new)), or close() this manager and capture again"
                )

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are watched."""
        return [item.value for item in self.watched if item.address is not None]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._windows = []
        self.watched = ()

    def _assigned(self, *_: Any) -> None:
        self._all_due = True


def compare(
    replayed: Mapping[str, torch.Tensor], eager: Mapping[str, torch.Tensor], what: str
) -> float:
    """Hold the outputs of a replay against those of the eager step.

    Returns:
        The largest relative difference; 0 where everything is bitwise equal.

    Raises:
        VerificationError: names the first differing output, its first differing row, and by how much.
    """
    if replayed.keys() != eager.keys():
        raise VerificationError(
            f"{what}: the replay has outputs {sorted(replayed)}, the eager step {sorted(eager)}; "
            f"a step must return the same names at every run"
        )
    worst = 0.0
    for name, ours in replayed.items():
        theirs = eager[name]
        if torch.equal(ours, theirs):
            continue
        difference = _difference(ours, theirs)
        worst = max(worst, difference)
        if not difference <= TOLERANCE.get(ours.dtype, 0.0):
            wrong = (ours != theirs).flatten(1).any(1) if ours.dim() > 1 else ours != theirs
            row = int(wrong.nonzero()[0])
            raise VerificationError(
                f"{what}: output {name!r} differs from the eager step, first in row {row} "
                f"(relative difference {difference:.3g}, allowed {TOLERANCE.get(ours.dtype, 0):g}); "
                f"the step reads something that is not a slot, or a kernel is not deterministic"
            )
    return worst


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if not ours.is_floating_point():
        return float("inf")
    a, b = ours.double(), theirs.double()
    both_nan = a.isnan() & b.isnan()
    same_infinity = (a == b) & a.isinf()
    a, b = a.masked_fill(both_nan | same_infinity, 0), b.masked_fill(both_nan | same_infinity, 0)
    gap = (a - b).abs().max()
    return float("inf") if gap.isnan() else float(gap / b.abs().max().clamp(min=1e-30))


def _watch(name: str, holder: Any, key: Any, tensor: torch.Tensor) -> Watched:
    return Watched(name, holder, key, tensor, tensor.data_ptr(), tensor.untyped_storage())


def reachable(step: Callable[..., Any]) -> list[Watched]:
    """Tensors that `step` can reach by name, each once, and the objects on the way to them."""
    seen: dict[int, Any] = {}  # holds the values, so that no id is used again

    def walk(value: Any, name: str, holder: Any, key: Any, depth: int) -> Iterator[Watched]:
        if isinstance(value, torch.Tensor):
            if id(value) not in seen and value.device.type != "meta":
                seen[id(value)] = value
                yield _watch(name, holder, key, value)
            return
        if depth > _MAX_DEPTH or id(value) in seen or not _is_container(value):
            return
        seen[id(value)] = value
        below = [
            item
            for child, label, child_holder, child_key in _children(value)
            for item in walk(child, f"{name}{label}", child_holder, child_key, depth + 1)
        ]
        if below and holder is not None and _can_be_rebound(value, holder):
            yield Watched(name, holder, key, value)
        yield from below

    return list(walk(step, getattr(step, "__qualname__", "step"), None, None, 0))


def _can_be_rebound(value: Any, holder: Any) -> bool:
    """Whether `value`'s place in `holder` can be given to another object and is not made anew at each
    look, as bound methods are."""
    return not isinstance(holder, (tuple, functools.partial)) and not hasattr(value, "__func__")


def _children(value: Any) -> Iterator[tuple[Any, str, Any, Any]]:
    if isinstance(value, dict):
        for key, child in list(value.items()):
            yield child, f"[{key!r}]", value, key
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield child, f"[{index}]", value, index
    elif isinstance(value, functools.partial):
        yield value.func, "", value, "func"
        yield value.args, ".args", value, "args"
        yield value.keywords, ".keywords", value, "keywords"
    elif hasattr(value, "__func__"):  # a bound method; it shows its function's __code__ as well
        yield value.__self__, "", value, "__self__"
        yield value.__func__, "", value, "__func__"
    elif hasattr(value, "__code__"):
        for free, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield cell.cell_contents, f".{free}", cell, "cell_contents"
            except ValueError:  # not assigned yet
                continue
        for used in _names_used(value.__code__):
            if used in value.__globals__:
                yield value.__globals__[used], f".{used}", value.__globals__, used
        yield value.__defaults__, ".defaults", value, "__defaults__"
        yield value.__kwdefaults__, ".defaults", value, "__kwdefaults__"
    elif isinstance(value, torch.nn.Module):
        for members in (value._parameters, value._buffers, value._modules):
            for key, child in list(members.items()):
                yield child, f".{key}", members, key
        for key, child in list(vars(value).items()):
            if key not in _MODULE_INNARDS:
                yield child, f".{key}", value, key
        yield from _code_of(type(value), "forward")
    else:
        for key, child in list(getattr(value, "__dict__", {}).items()):
            yield child, f".{key}", value, key
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, key):
                    yield getattr(value, key), f".{key}", value, key
        yield from _code_of(type(value), "__call__")


def _code_of(kind: type, name: str) -> Iterator[tuple[Any, str, Any, Any]]:
    function = getattr(kind, name, None)
    if hasattr(function, "__code__"):
        yield function, "", kind, name


def _names_used(code: CodeType) -> Iterator[str]:
    """Names that a function's code looks up, also in the functions and comprehensions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_used(constant)


def _is_container(value: Any) -> bool:
    """Whether tensors that belong to a step may lie inside `value`."""
    if isinstance(value, (dict, list, tuple, functools.partial, torch.nn.Module)):
        return True
    if isinstance(value, type) or type(value).__name__ == "module":
        return False
    if hasattr(value, "__func__"):
        return True
    home = value.__module__ or "" if hasattr(value, "__code__") else type(value).__module__
    return not any(home == name or home.startswith(f"{name}.") for name in _NOT_LOOKED_INTO)
