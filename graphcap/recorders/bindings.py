"""The fastest way to call a dispatcher operation again and again.

``torch.ops.aten.mul.out`` and ``torch.mul(out=)`` are one operation, but the second takes half the host
time: its arguments are read by generated code, those of the first by going through the schema. On a tape
of small operations that is a third of the whole step.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BUILTIN = (types.BuiltinFunctionType, types.BuiltinMethodType)
_MISSING = object()
_PYTHON: dict[Any, Callable[..., object]] = {}
_OPENED: dict[Any, tuple[Callable[..., Any], Callable[..., bool]]] = {}


def implemented_by(overload: Any, function: Callable[..., object]) -> None:
    """Tell that `overload` has one kernel and that it is `function`, in Python: a tape calls it without
    the way through the dispatcher and back."""
    _PYTHON[overload] = function


def opened_as(
    overload: Any, function: Callable[..., Any], when: Callable[..., bool] = lambda *args: True
) -> None:
    """Tell that `overload` is implemented by `function`, in Python, and that all that it starts on a GPU
    goes through torch's dispatcher, through Triton or through graphcap's kernel layer: a tape records that
    in place of the operation. What `function` reads on the host is as it was when it was recorded, as in a
    CUDA graph.

    Args:
        when: asked with the positional arguments of a call, whether it holds for that one.
    """
    _OPENED[overload] = (function, when)


def opened(overload: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The function to look into for this call; None: the operation is called whole."""
    function, when = _OPENED.get(overload, (None, None))
    return function if when is not None and when(*args) else None


def repeatable(
    overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[], object]:
    """A call that does what ``overload(*args, **kwargs)`` does, at the least cost on the host.

    `overload` writes into its arguments, or has another effect. Nothing is executed here: whether
    torch's Python binding of the same name means this very overload with these very arguments is seen by
    letting torch dispatch it.
    """
    bound = _binding(overload, args, kwargs)
    if bound is not None and _dispatches(bound, overload, args, kwargs):
        return bound
    direct = _PYTHON.get(overload)
    if direct is None:
        # What OpOverload.__call__ does and nothing else; its subclasses do more.
        direct = overload._op if type(overload) is torch._ops.OpOverload else overload
    return partial(direct, *args, **kwargs)


def _binding(
    overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[], object] | None:
    """The binding that is probably the same operation."""
    if overload.namespace != "aten" or not all(map(_is_plain, (*args, *kwargs.values()))):
        return None
    name = overload.overloadpacket.__name__
    outs = [argument.name for argument in overload._schema.arguments if argument.is_out]
    if not outs:
        method = getattr(args[0], name, None) if args and name.endswith("_") else None
        return partial(method, *args[1:], **kwargs) if isinstance(method, _BUILTIN) else None
    function = getattr(torch, name, None)
    if not isinstance(function, _BUILTIN) or any(out not in kwargs for out in outs):
        return None
    rest = {key: value for key, value in kwargs.items() if key not in outs}
    out = kwargs[outs[0]] if len(outs) == 1 else tuple(kwargs[name] for name in outs)
    return partial(function, *args, **rest, out=out)


def _dispatches(
    call: Callable[[], object], overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether `call` is ``overload(*args, **kwargs)`` and nothing else. Executes neither."""
    wanted = _by_position(overload, args, kwargs)
    outs = [kwargs[a.name] for a in overload._schema.arguments if a.is_out and a.name in kwargs]
    witness = _Witness(args[0] if not outs else outs[0] if len(outs) == 1 else tuple(outs))
    try:
        with witness:
            call()
    except Exception:  # arguments that the binding does not take
        return False
    if len(witness.seen) != 1:
        return False
    func, found_args, found_kwargs = witness.seen[0]
    return func is overload and _same(wanted, _by_position(func, found_args, found_kwargs))


class _Witness(TorchDispatchMode):
    """Writes down what is dispatched and gives `answer` instead of running it."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self._answer = answer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See `StepGuard`."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.append((func, args, kwargs or {}))
        return self._answer


def _by_position(overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The value of each argument of the schema, defaults filled in."""
    values = list(args)
    for argument in overload._schema.arguments[len(args) :]:
        default = argument.default_value if argument.has_default_value() else _MISSING
        values.append(kwargs.get(argument.name, default))
    return values


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _is_plain(value: Any) -> bool:
    """Whether a value is, or holds, no tensor of a class that may mean something else by an operation."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return not isinstance(value, torch.Tensor) or type(value) in _PLAIN
