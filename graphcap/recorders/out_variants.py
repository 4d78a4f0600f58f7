"""How an operation that returns new storage is replayed into the storage of its recorded result."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from graphcap.recorders.bindings import repeatable

aten = torch.ops.aten

_TENSOR_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format"})

ReplayCall = tuple["Callable[[], object] | None", bool]
"""The call (None: nothing has to run) and whether it allocates."""


def out_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> ReplayCall:
    """A call that computes `func(*args, **kwargs)` into `result`, the tensors of the recorded run."""
    packet = func.overloadpacket.__name__
    if packet in UNWRITTEN:
        return None, False
    if packet in _IN_PLACE:
        call = _IN_PLACE[packet](args, kwargs, result)
        if call is not None:
            return call, False
    # oneDNN's workspace is not what its out-variant takes for one.
    variant = None if packet == "mkldnn_rnn_layer" else _out_variant(func)
    outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if variant is not None and all(isinstance(output, torch.Tensor) for output in outputs):
        overload, names, generated = variant
        accepted = {argument.name for argument in overload._schema.arguments}
        keywords = {key: value for key, value in kwargs.items() if key in accepted}
        keywords.update(zip(names, outputs, strict=True))
        return repeatable(overload, args, keywords), generated
    if all(isinstance(output, torch.Tensor) and output.numel() == 0 for output in outputs):
        return repeatable(func, args, kwargs), False  # called for its effect: nothing to copy
    return partial(run_and_copy, func, args, kwargs, outputs), True


def run_and_copy(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[Any, ...]
) -> None:
    """Run `func` again and copy its results to the recorded ones, `outputs`."""
    again = func(*args, **kwargs)
    for target, source in zip(
        outputs, again if isinstance(again, (tuple, list)) else (again,), strict=True
    ):
        if isinstance(target, torch.Tensor):
            if target.shape != source.shape:
                raise RuntimeError(
                    f"{func}: the recorded result has shape {tuple(target.shape)}, the replayed one "
                    f"{tuple(source.shape)}; an operation on a tape must give the same shape each time"
                )
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)


@cache
def _out_variant(func: Any) -> tuple[Any, tuple[str, ...], bool] | None:
    """The overload of `func` that writes into given tensors: (overload, names of its out arguments,
    whether it allocates inside, which generated variants do). None if there is none."""
    wanted = func._schema.arguments
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        arguments = overload._schema.arguments
        outs = [a for a in arguments if a.is_out]
        if len(outs) != len(func._schema.returns) or any(str(a.type) != "Tensor" for a in outs):
            continue
        given = {a.name: a for a in arguments if not a.is_out}
        covers = all(
            (a.name in given and str(given[a.name].type) == str(a.type))
            or (a.kwarg_only and a.name in _TENSOR_OPTIONS)
            for a in wanted
        )
        names = {a.name for a in wanted}
        rest_has_defaults = all(a.name in names or a.has_default_value() for a in given.values())
        in_order = [a for a in given if a in names] == [a.name for a in wanted if a.name in given]
        if covers and rest_has_defaults and in_order:
            tags = getattr(overload, "tags", ())
            return overload, tuple(a.name for a in outs), torch.Tag.generated in tags
    return None


def _copy(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Callable[[], object]:
    return repeatable(aten.copy_.default, (result, args[0]), {})


def _fill(value: Any) -> Callable[..., Callable[[], object]]:
    def build(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Callable[[], object]:
        return repeatable(aten.fill_.Scalar, (result, value), {})

    return build


def _fill_with(index: int) -> Callable[..., Callable[[], object]]:
    def build(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Callable[[], object]:
        value = args[index] if len(args) > index else kwargs["fill_value"]
        return repeatable(aten.fill_.Scalar, (result, value), {})

    return build


def _embedding(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """What torch does itself where no gradient is wanted; its generated out-variant allocates."""
    weight, indices = args[:2]
    if not (indices.is_contiguous() and result.is_contiguous() and weight.dim() == 2):
        return None
    out = result.view(indices.numel(), weight.shape[1])
    return repeatable(aten.index_select.out, (weight, 0, indices.view(-1)), {"out": out})


UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)
"""Factories whose result has undefined contents: there is nothing to run."""

_IN_PLACE: dict[str, Callable[..., Callable[[], object] | None]] = {
    "clone": _copy,
    "embedding": _embedding,
    "_to_copy": _copy,
    "zeros_like": _fill(0),
    "new_zeros": _fill(0),
    "ones_like": _fill(1),
    "new_ones": _fill(1),
    "full_like": _fill_with(1),
    "new_full": _fill_with(2),
    "scalar_tensor": lambda args, kwargs, result: repeatable(
        aten.fill_.Scalar, (result, args[0]), {}
    ),
}
"""Operations without a real out-variant that are one other operation into their result; its builder
gives None where that holds for other arguments only."""
