"""Checks: what a recording pinned is still in place, and a replay equals the eager step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from graphcap.errors import StaleRecordingError, VerificationError

_MAX_DEPTH = 12
_WINDOW = 16
_CHECKED_WHOLE = 64
_ABSENT = object()

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-9}
"""Largest relative difference (to the largest magnitude) where results are not bitwise equal: the
same kernels give the same bits, but a library may choose another algorithm under capture."""


@dataclass(frozen=True)
class Watched:
    """A tensor that a step reaches by name, and where it was when the step was recorded."""

    name: str
    holder: Any
    key: Any
    tensor: torch.Tensor
    address: int
    storage: Any  # keeps the recorded memory alive, whatever becomes of the tensor

    def found(self) -> Any:
        if isinstance(self.holder, dict):
            return self.holder.get(self.key, _ABSENT)
        if isinstance(self.holder, (list, tuple)):
            return self.holder[self.key] if self.key < len(self.holder) else _ABSENT
        return getattr(self.holder, self.key, _ABSENT)

    def fault(self) -> str | None:
        now = self.found()
        if now is not self.tensor:
            return "is another tensor now"
        if self.tensor.data_ptr() != self.address:
            return "has moved to another address"
        return None


class Fingerprint:
    """Finds out before a replay whether something the recording points at was rebound or moved.

    What is watched: every tensor that can be reached by name from the step (its object, modules,
    closure, arguments and the globals it names) and `extra`. Up to 64 tensors are all compared at
    each check. Of more, each check compares the next 16, so a moved one is found within
    count / 16 replays; a parameter or buffer that is *assigned* on any `torch.nn.Module` makes the
    next check compare all. The memory itself stays alive as long as the fingerprint.
    """

    def __init__(self, step: Callable[..., Any], extra: Mapping[str, torch.Tensor]) -> None:
        found = list(_reachable(step))
        found += [_watch(name, dict(extra), name, tensor) for name, tensor in extra.items()]
        self.watched = tuple(found)
        self._next = 0
        self._all_due = False
        # nn.Module.__setattr__ announces a new parameter or buffer to these hooks, also a rebound one.
        self._hooks = [
            nn_module.register_module_parameter_registration_hook(self._assigned),
            nn_module.register_module_buffer_registration_hook(self._assigned),
        ]

    def check(self) -> None:
        """Raises `StaleRecordingError` with the name of what changed."""
        watched = self.watched
        if self._all_due or len(watched) <= _CHECKED_WHOLE:
            self._all_due = False
            due = watched
        else:
            start = self._next
            due = watched[start : start + _WINDOW]
            self._next = 0 if start + _WINDOW >= len(watched) else start + _WINDOW
        for item in due:
            if item.found() is not item.tensor or item.tensor.data_ptr() != item.address:
                self._all_due = True  # it stays wrong: say so at every replay
                raise StaleRecordingError(
                    f"{item.name} {item.fault()}, expected the tensor of shape "
                    f"{tuple(item.tensor.shape)} at {item.address:#x} that was recorded; replaying "
                    f"would use the old one. Copy new values into it in place "
                    f"(tensor.copy_(new)), or close() this manager and capture again"
                )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
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


def _reachable(step: Callable[..., Any]) -> Iterator[Watched]:
    """Tensors that `step` can reach by name, each once."""
    seen: set[int] = set()

    def walk(value: Any, name: str, holder: Any, key: Any, depth: int) -> Iterator[Watched]:
        if isinstance(value, torch.Tensor):
            if id(value) not in seen and value.device.type != "meta":
                seen.add(id(value))
                yield _watch(name, holder, key, value)
            return
        if depth > _MAX_DEPTH or id(value) in seen or not _is_container(value):
            return
        seen.add(id(value))
        for child, label, child_holder, child_key in _children(value):
            yield from walk(child, f"{name}{label}", child_holder, child_key, depth + 1)

    yield from walk(step, getattr(step, "__qualname__", "step"), None, None, 0)


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
    elif hasattr(value, "__code__"):
        for free, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield cell.cell_contents, f".{free}", cell, "cell_contents"
            except ValueError:  # not assigned yet
                continue
        for used in value.__code__.co_names:
            if used in value.__globals__:
                yield value.__globals__[used], f".{used}", value.__globals__, used
    elif hasattr(value, "__func__"):
        yield value.__self__, "", value, "__self__"
        yield value.__func__, "", value, "__func__"
    elif isinstance(value, torch.nn.Module):
        for members in (value._parameters, value._buffers, value._modules):
            for key, child in list(members.items()):
                yield child, f".{key}", members, key
        for key, child in list(vars(value).items()):
            if not key.startswith("_"):
                yield child, f".{key}", value, key
    else:
        for key, child in list(getattr(value, "__dict__", {}).items()):
            yield child, f".{key}", value, key
        for key in getattr(type(value), "__slots__", ()):
            if isinstance(key, str) and hasattr(value, key):
                yield getattr(value, key), f".{key}", value, key


def _is_container(value: Any) -> bool:
    """Whether tensors that belong to a step may lie inside `value`."""
    if isinstance(value, (dict, list, tuple, functools.partial, torch.nn.Module)):
        return True
    if isinstance(value, type) or type(value).__name__ == "module":
        return False
    home = type(value).__module__
    if hasattr(value, "__code__"):
        return not value.__module__.startswith(("torch", "triton")) if value.__module__ else True
    if hasattr(value, "__func__"):
        return True
    # Slots and pool are watched under names of their own.
    return not home.startswith(("torch", "builtins", "triton", "graphcap.pool", "graphcap.inputs"))
