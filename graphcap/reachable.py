"""What a step can reach by name: the tensors that a recording of it depends on, and where they hang."""

from __future__ import annotations

import dis
import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, MethodType, ModuleType
from typing import Any

import torch

_MAX_DEPTH = 64  # far below Python's own limit; cycles are seen by identity
_ABSENT = object()
GONE = (IndexError, ValueError)  # a list that became shorter, a closure variable that was deleted
_MODULE_INNARDS = frozenset(vars(torch.nn.Module()))
_NOT_LOOKED_INTO = (
    "builtins",
    "graphcap.inputs",
    "graphcap.life",
    "graphcap.manager",
    "graphcap.pool",
    "graphcap.recorders",
    "logging",
    "numpy",
    "threading",
    "torch",
    "triton",
)
"""Modules whose objects hold no tensor of a step, or hold it under a name of its own."""


@dataclass(frozen=True)
class Watched:
    """What a step reaches by name, and where it was when the step was recorded.

    Attributes:
        value: a tensor, or an object through which one is reached (a module, a list of weights).
        address: of a tensor; None for other objects.
        storage: keeps the recorded memory alive, whatever becomes of the tensor.
        geometry: shape, strides and dtype of a dense tensor: it can be resized or transposed in place.
    """

    name: str
    holder: Any
    key: Any
    value: Any
    address: int | None = None
    storage: Any = None
    geometry: tuple[Any, ...] | None = None

    def finder(self) -> Callable[[], Any]:
        """Looks the value up where it was found; runs in C. Raises where the place is gone."""
        if isinstance(self.holder, dict):
            return functools.partial(self.holder.get, self.key, _ABSENT)
        if self.key in getattr(self.holder, "__dict__", ()) and not hasattr(
            type(self.holder), self.key
        ):  # an ordinary attribute: its dictionary answers faster than getattr
            return functools.partial(vars(self.holder).get, self.key, _ABSENT)
        if isinstance(self.holder, (list, tuple)):
            return functools.partial(operator.getitem, self.holder, self.key)
        return functools.partial(getattr, self.holder, self.key, _ABSENT)

    def found(self) -> Any:
        try:
            return self.finder()()
        except GONE:
            return _ABSENT

    def fault(self) -> str | None:
        if self.found() is not self.value:
            kind = "object" if self.address is None else "tensor"
            return f"is another {kind} now, expected the one"
        if self.address is not None and self.value.data_ptr() != self.address:
            return "has moved to another address, expected the tensor"
        if self.geometry is not None and _geometry(self.value) != self.geometry:
            shape, strides, dtype = _geometry(self.value) or ((), (), None)
            return f"has shape {shape}, strides {strides} and {dtype} now, expected the tensor"
        return None

    def recorded(self) -> str:
        if self.address is None:
            return f"of type {type(self.value).__name__}"
        return f"of shape {tuple(self.value.shape)} at {self.address:#x}"

    @property
    def identity(self) -> tuple[str, int, int | None]:
        return self.name, id(self.value), self.address


def watch(name: str, holder: Any, key: Any, tensor: torch.Tensor) -> Watched:
    return Watched(
        name, holder, key, tensor, tensor.data_ptr(), tensor.untyped_storage(), _geometry(tensor)
    )


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    if tensor.layout != torch.strided:
        return None
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def module_tensors(root: torch.nn.Module) -> list[Watched]:
    """Parameters and buffers of `root` and its submodules, each once: what a host's model reads.

    Narrower than `reachable`: an engine's modules also hold its configuration and its schedulers, whose
    objects change without changing what a recording reads.
    """
    seen: set[int] = set()
    found: list[Watched] = []
    for path, module in root.named_modules():
        for members in (module._parameters, module._buffers):
            for key, tensor in members.items():
                if tensor is None or id(tensor) in seen or tensor.device.type == "meta":
                    continue
                seen.add(id(tensor))
                found.append(watch(f"{path}.{key}" if path else key, members, key, tensor))
    return found


def reachable(step: Callable[..., Any]) -> list[Watched]:
    """Tensors that `step` can reach by name, each once, and the objects on the way to them."""
    seen: dict[int, Any] = {}  # holds the values, so that no id is used again

    def walk(value: Any, name: str, holder: Any, key: Any, depth: int) -> Iterator[Watched]:
        if isinstance(value, torch.Tensor):
            if id(value) not in seen and value.device.type != "meta":
                seen[id(value)] = value
                yield watch(name, holder, key, value)
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
    return not isinstance(holder, (tuple, functools.partial)) and not isinstance(value, MethodType)


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
    elif isinstance(value, MethodType):  # a bound method; it shows its function's __code__ as well
        yield value.__self__, "", value, "__self__"
        yield value.__func__, "", value, "__func__"
    elif _has_code(value):
        for free, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield cell.cell_contents, f".{free}", cell, "cell_contents"
            except ValueError:  # not assigned yet
                continue
        for used in _names_used(value.__code__):
            if used in value.__globals__:
                yield value.__globals__[used], f".{used}", value.__globals__, used
        yield from _named_in_modules(value)
        yield value.__defaults__, ".defaults", value, "__defaults__"
        yield value.__kwdefaults__, ".defaults", value, "__kwdefaults__"
    elif isinstance(value, torch.nn.Module):
        for members in (value._parameters, value._buffers, value._modules):
            for key, child in list(members.items()):
                yield child, f".{key}", members, key
        for key, child in list(vars(value).items()):
            if key not in _MODULE_INNARDS:
                yield child, f".{key}", value, key
        yield from _of_class(type(value))
        yield from _code_of(type(value), "forward")
    else:
        for key, child in list(getattr(value, "__dict__", {}).items()):
            yield child, f".{key}", value, key
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, key):
                    yield getattr(value, key), f".{key}", value, key
        yield from _of_class(type(value))
        yield from _code_of(type(value), "__call__")


def _of_class(kind: type) -> Iterator[tuple[Any, str, Any, Any]]:
    """Tensors, and lists and dictionaries of them, that are attributes of a class and of its bases."""
    for base in kind.__mro__:
        if not _belongs_elsewhere(base.__module__):
            for key, child in list(vars(base).items()):
                if _holds_tensors(child):
                    yield child, f".{key}", base, key


def _named_in_modules(function: Any) -> Iterator[tuple[Any, str, Any, Any]]:
    """Tensors, and lists and dictionaries of them, that a function's code names in other modules, as
    ``weights.table`` or ``package.weights.table``."""
    for path in _dotted_names(function.__code__):
        holder: Any = function.__globals__.get(path[0])
        for depth, key in enumerate(path[1:], start=1):
            if not isinstance(holder, ModuleType) or _belongs_elsewhere(holder.__name__):
                break
            if key not in vars(holder):
                break
            child = vars(holder)[key]
            if _holds_tensors(child):  # not functions, whose own modules lead anywhere
                yield child, "." + ".".join(path[: depth + 1]), vars(holder), key
            holder = child


def _holds_tensors(value: Any) -> bool:
    """Whether `value` is a tensor, or a list or dictionary with tensors in it and not deeper."""
    if isinstance(value, torch.Tensor):
        return True
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list, tuple)) and any(
        isinstance(item, torch.Tensor) for item in list(items)
    )


def _dotted_names(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Each ``name.attribute…`` that starts at a global, in a function and in the functions inside it."""
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and path:
            path = (*path, instruction.argval)
            continue
        if len(path) > 1:
            yield path
        path = (instruction.argval,) if instruction.opname == "LOAD_GLOBAL" else ()
    if len(path) > 1:
        yield path
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _dotted_names(constant)


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


def _has_code(value: Any) -> bool:
    try:
        return hasattr(value, "__code__")
    except Exception:  # an object that makes up attributes as they are asked for
        return False


def _is_container(value: Any) -> bool:
    """Whether tensors that belong to a step may lie inside `value`."""
    if isinstance(value, (dict, list, tuple, functools.partial, torch.nn.Module)):
        return True
    if isinstance(value, type) or type(value).__name__ == "module":
        return False
    if isinstance(value, MethodType):
        return True
    home = value.__module__ or "" if _has_code(value) else type(value).__module__
    return not _belongs_elsewhere(home)


def _belongs_elsewhere(home: str) -> bool:
    """Whether a module of this name holds no tensor of a step, or holds it under a name of its own."""
    return any(home == name or home.startswith(f"{name}.") for name in _NOT_LOOKED_INTO)
