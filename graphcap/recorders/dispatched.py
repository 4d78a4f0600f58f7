"""What an operation of torch's dispatcher is called, reads, writes and where its tensors lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def has_effect(func: Any) -> bool:
    """Whether an operation that returns nothing new does something all the same."""
    return func.overloadpacket.__name__.startswith("_assert")


def dispatch_row(func: Any) -> str:
    """Copies are one row whatever their overload; other dispatcher operations keep their names."""
    packet = func.overloadpacket.__name__
    return "copies" if packet in ("copy_", "_to_copy", "clone", "copy") else str(func)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that `func` writes into, as its schema says."""
    written: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written.append(value)
    return list(tensors_in(written))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of arguments or results, at any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def storage_key(tensor: torch.Tensor) -> int:
    """The same for all tensors of one storage, while it lives."""
    return tensor.untyped_storage()._cdata
