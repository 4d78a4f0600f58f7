"""Checks: what a recording pinned is still in place, and a replay equals the eager step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from graphcap.errors import StaleRecordingError, VerificationError
from graphcap.reachable import GONE, Watched, reachable, watch

_WINDOW = 8
_CHECKED_WHOLE = 32

_MASK = 1e4

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-9}
"""Largest relative difference (to the largest magnitude) where results are not bitwise equal: the
same kernels give the same bits, but a library may choose another algorithm under capture."""


class _Window:
    """Some watched items. Compared before every replay, so each in as few interpreted steps as can be."""

    __slots__ = ("_objects", "_tensors")

    def __init__(self, items: Sequence[Watched]) -> None:
        self._objects = tuple((i.finder(), i.value) for i in items if i.address is None)
        self._tensors = tuple(
            (i.finder(), i.value, i.value.data_ptr, i.address)
            for i in items
            if i.address is not None
        )

    def holds(self) -> bool:
        try:
            for find, value, data_ptr, address in self._tensors:
                if find() is not value or data_ptr() != address:
                    return False
            for find, value in self._objects:
                if find() is not value:
                    return False
        except GONE:
            return False
        return True


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
        found: what to watch instead of what can be reached from the step.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        extra: Mapping[str, torch.Tensor],
        before: Sequence[Watched] | None = None,
        found: Sequence[Watched] | None = None,
    ) -> None:
        found = reachable(step) if found is None else list(found)
        if before is not None:
            settled = {item.identity for item in before}
            found = [item for item in found if item.identity in settled]
        found += [watch(name, dict(extra), name, tensor) for name, tensor in extra.items()]
        self.watched = tuple(found)
        width = len(found) if len(found) <= _CHECKED_WHOLE else _WINDOW
        self._windows = [
            _Window(found[start : start + width]) for start in range(0, len(found), width or 1)
        ]
        self._next = 0
        self._all_due = False
        # nn.Module.__setattr__ announces a new parameter, buffer or module to these hooks, also a
        # rebound one. They are global: held weakly, they go when the fingerprint goes.
        myself = weakref.ref(self)

        def assigned(*_: Any) -> None:
            fingerprint = myself()
            if fingerprint is not None:
                fingerprint._all_due = True

        hooks = [
            nn_module.register_module_parameter_registration_hook(assigned),
            nn_module.register_module_buffer_registration_hook(assigned),
            nn_module.register_module_module_registration_hook(assigned),
        ]
        self._remove_hooks = weakref.finalize(self, _remove, hooks)

    def expect_change(self) -> None:
        """The next check compares all: somebody is known to have touched what is watched."""
        self._all_due = True

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
        self._remove_hooks()
        self._windows = []
        self.watched = ()


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()


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
    worst, found = first_difference(replayed, eager)
    if found is not None:
        raise VerificationError(
            f"{what}: output {found.output!r} differs from the eager step, first in row {found.row} "
            f"(relative difference {found.size:.3g}, allowed {found.allowed:g}); the step reads "
            f"something that is not a slot (list tensors that it changes in state=), or a kernel is "
            f"not deterministic"
        )
    return worst


@dataclass(frozen=True)
class Difference:
    """Where two sets of outputs differ by more than `allowed`, relative to the largest magnitude."""

    output: str
    row: int
    size: float
    allowed: float


def first_difference(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> tuple[float, Difference | None]:
    """The largest relative difference up to the first one that is too large, and that one."""
    worst = 0.0
    for name, a in ours.items():
        b, allowed = theirs[name], TOLERANCE.get(a.dtype, 0.0)
        if a.is_floating_point() and a.element_size() == 1:
            a, b = a.float(), b.float()  # exactly; torch 2.1 cannot compare float8
        if torch.equal(a, b):
            continue
        size = _difference(a, b)
        worst = max(worst, size)
        if not size <= allowed:
            wrong = (a != b).flatten(1).any(1) if a.dim() > 1 else a != b
            return worst, Difference(name, int(wrong.nonzero()[0]), size, allowed)
    return worst, None


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference relative to the largest magnitude. What masks write (-1e9, the lowest float)
    and is equal on both sides does not count as magnitude: it would make anything look small."""
    if not ours.is_floating_point():
        return float("inf")
    a, b = ours.double(), theirs.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).masked_fill(same, 0).abs().max()
    if not gap.isfinite():
        return float("inf")
    beside = b.isnan() | b.isinf() | (same & (b.abs() >= _MASK))
    return float(gap / b.masked_fill(beside, 0).abs().max().clamp(min=1e-30))
