"""OutputViews: the views of a recording's outputs that are handed out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch


class HandedOut:
    """Tensors that are made once and handed out at every call.

    A caller owns them for as long as they are valid and may do what it likes to them. What changes a
    tensor itself and not its contents (``squeeze_``, ``t_``, ``.data =``) must not be met again at the
    next call: `intact` tells.
    """

    __slots__ = ("_as_made",)

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._as_made = tuple((t, t.data_ptr(), t.stride(), t.shape) for t in tensors)

    def intact(self) -> bool:
        """Whether every tensor is still what it was when it was made."""
        for tensor, address, stride, shape in self._as_made:
            if tensor.data_ptr() != address or tensor.stride() != stride or tensor.shape != shape:
                return False
        return True


class OutputViews(HandedOut):
    """The first `rows` rows of the outputs of a recording; read-only, handed out at every run."""

    __slots__ = ("outputs",)

    def __init__(self, outputs: Mapping[str, torch.Tensor], rows: int) -> None:
        self.outputs = MappingProxyType({name: tensor[:rows] for name, tensor in outputs.items()})
        super().__init__(self.outputs.values())
