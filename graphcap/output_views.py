"""OutputViews: the views of a recording's outputs that are handed out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch


class OutputViews:
    """The first `rows` rows of the outputs of a recording; read-only, handed out at every run.

    A caller owns the tensors for as long as they are valid and may do what it likes to them. What
    changes a tensor itself and not its contents (``squeeze_``, ``t_``, ``.data =``) must not be met
    again at the next run: `intact` tells.
    """

    __slots__ = ("_handed_out", "outputs")

    def __init__(self, outputs: Mapping[str, torch.Tensor], rows: int) -> None:
        self.outputs = MappingProxyType({name: tensor[:rows] for name, tensor in outputs.items()})
        self._handed_out = tuple(
            (view, view.data_ptr(), view.stride(), view.shape) for view in self.outputs.values()
        )

    def intact(self) -> bool:
        """Whether every view is still what it was when it was made."""
        for view, address, stride, shape in self._handed_out:
            if view.data_ptr() != address or view.stride() != stride or view.shape != shape:
                return False
        return True
