"""Fingerprint: finds out before a replay whether what a recording points at is still in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from graphcap.errors import StaleRecordingError
from graphcap.reachable import GONE, Watched, reachable, watch

_WINDOW = 8
_CHECKED_WHOLE = 14
_ROUNDS = 4  # of which one compares versions as well
_WRITTEN_BY_STEPS = 2  # so many new versions, and a tensor's version tells nothing


class _Seen:
    """What is known of one watched item: its version, and how often that was found to be another."""

    __slots__ = ("item", "moves", "version")

    def __init__(self, item: Watched, versioned: bool) -> None:
        self.item = item
        self.version = _version(item.value) if versioned else None
        self.moves = 0

    def settle(self) -> None:
        """Accept the version of now: what was done in place was a copy of new values."""
        if self.version is not None:
            now = _version(self.item.value)
            if now != self.version:
                self.moves += 1
                self.version = None if self.moves >= _WRITTEN_BY_STEPS else now


class _Window:
    """Some of the watched items. Compared before a replay, so each in as few interpreted steps as can be.

    A tensor's version counts what was done to it in place; it moves on by a copy of new values, which is
    allowed, as by a resize, which is not. So another version only says: look closer.
    """

    __slots__ = ("_objects", "_tensors", "_versioned", "seen", "versions")

    def __init__(self, seen: Sequence[_Seen], versions: bool = True) -> None:
        self.seen = seen
        self.versions = versions
        places = [(s, s.item) for s in seen if s.item.address is not None]
        self._objects = tuple(
            (s.item.finder(), s.item.value) for s in seen if s.item.address is None
        )
        self._tensors = tuple(
            (i.finder(), i.value, i.value.data_ptr, i.address)
            for s, i in places
            if s.version is None or not versions
        )
        self._versioned = tuple(
            (i.finder(), i.value, i.value.data_ptr, i.address, s.version)
            for s, i in places
            if s.version is not None and versions
        )

    def holds(self) -> bool:
        try:
            for find, value, data_ptr, address, version in self._versioned:
                if find() is not value or data_ptr() != address or value._version != version:
                    return False
            for find, value, data_ptr, address in self._tensors:
                if find() is not value or data_ptr() != address:
                    return False
            for find, value in self._objects:
                if find() is not value:
                    return False
        except GONE:
            return False
        return True


class _Assigned:
    """Called before a module gets a parameter, buffer or submodule. The one that it has already, where it
    was, is no change: vLLM 0.6.3 assigns its rotary tables so in every eager step."""

    def __init__(self, fingerprint: Fingerprint, members: str) -> None:
        self._fingerprint = weakref.ref(fingerprint)
        self._members = members

    def __call__(self, module: torch.nn.Module, name: str, value: Any) -> None:
        fingerprint = self._fingerprint()
        if fingerprint is None or fingerprint._all_due:
            return
        if vars(module).get(self._members, {}).get(name) is value:
            known = fingerprint._addresses.get(id(value))
            if known is None or value.data_ptr() == known:
                return
        fingerprint._all_due = True


class Fingerprint:
    """Finds out before a replay whether something the recording points at was rebound, moved or resized.

    What is watched: every tensor that can be reached by name from the step (its object, modules,
    closure, default arguments and the globals it names), the objects on the way to them, and `extra`.
    Up to 14 names besides `extra` are all compared at each check. Of more, each check compares the next 8,
    so a moved one is found within count / 8 replays; what moves all (``module.half()``) is found by the next
    one. Another parameter, buffer or module that is *assigned* on any `torch.nn.Module` makes the next check
    compare all. The memory itself stays alive as long as the fingerprint.

    A tensor that is resized or transposed where it lies keeps its identity and its address; its version
    tells of it, in one of four rounds. Copies of new values change the version too and are allowed: the
    tensor is looked at once, and its new version is remembered. Tensors that steps write themselves at
    each run (a cache), and inference tensors, which have no version, are looked at when all are.

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
        named = [watch(name, dict(extra), name, tensor) for name, tensor in extra.items()]
        self.watched = (*found, *named)
        # `extra` is graphcap's own, written at every step.
        self._seen = [*(_Seen(item, True) for item in found), *(_Seen(i, False) for i in named)]
        self._windows: list[_Window] = []
        self._arrange(_WINDOW if len(found) > _CHECKED_WHOLE else len(self._seen))
        self._addresses = {id(i.value): i.address for i in self.watched if i.address is not None}
        self._next = 0
        self._all_due = False
        # nn.Module.__setattr__ announces a new parameter, buffer or module to these hooks, also a
        # rebound one. They are global: held weakly, they go when the fingerprint goes.
        register = (
            ("_parameters", nn_module.register_module_parameter_registration_hook),
            ("_buffers", nn_module.register_module_buffer_registration_hook),
            ("_modules", nn_module.register_module_module_registration_hook),
        )
        hooks = [hook(_Assigned(self, members)) for members, hook in register]
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
                self._look_closer(due)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are watched."""
        return [item.value for item in self.watched if item.address is not None]

    def close(self) -> None:
        self._remove_hooks()
        self._windows, self._seen, self._addresses = [], [], {}
        self.watched = ()

    # -- inside ----------------------------------------------------------------------------------

    def _arrange(self, width: int) -> None:
        """Lay the items into windows, one for each check in turn: some rounds, one of them with versions,
        which take as long as all the rest."""
        seen = self._seen
        parts = [seen[start : start + width] for start in range(0, len(seen), width or 1)]
        often = [_Window(part, versions=False) for part in parts]
        self._windows = [_Window(part) for part in parts] + often * (_ROUNDS - 1)

    def _look_closer(self, due: int) -> None:
        window = self._windows[due]
        if any(seen.item.fault() is not None for seen in window.seen):
            self._check_all()
        for seen in window.seen:
            seen.settle()
        self._windows[due] = _Window(window.seen, window.versions)

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


def _version(value: Any) -> int | None:
    known = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if known else None


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
