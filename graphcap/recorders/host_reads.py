"""Host reads that do not pass through torch's dispatcher, seen as calls of torch's Python functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from graphcap.recorders.guard import StepGuard

KEEP_ON_DEVICE = "keep the value on the device: use torch.where, or index with a tensor"

_HOST_READS: Mapping[Any, str] = {
    torch.Tensor.cpu: ".cpu()",
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.__array__: "numpy conversion",
    torch.Tensor.__repr__: "printing a tensor",
    torch.Tensor.__format__: "formatting a tensor",
    torch.Tensor.apply_: ".apply_()",
    torch.Tensor.map_: ".map_()",
}
_FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
ITEMS = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_SPLITS = (torch.tensor_split, torch.Tensor.tensor_split)
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class HostReadGuard(TorchFunctionMode):
    """Host reads that reach no dispatcher on a CPU tensor, and are wrong on every device."""

    def __init__(self, guard: StepGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if not self._guard.is_inside:
            try:
                what = _HOST_READS.get(func)
            except TypeError:  # an unhashable callable is none of ours
                what = None
            if func is torch.Tensor.__dlpack__ and args[0].is_cpu:  # on a device no host sees it
                what = "DLPack export"
            if what is not None:
                raise self._guard.refusal(what, "it copies a tensor to the host", KEEP_ON_DEVICE)
            if func in ITEMS and len(args) > 1 and _lists_tensors(args[1], inside=False):
                raise self._guard.refusal(
                    "indexing with a list of tensors",
                    "it reads their values on the host",
                    "index with one tensor: torch.stack(list)",
                )
            if func in _SPLITS and any(isinstance(a, torch.Tensor) for a in args[1:2]):
                raise self._guard.refusal(
                    "tensor_split at the values of a tensor",
                    "it reads them on the host",
                    "split at fixed positions",
                )
            if func == SET_DATA:  # a new object at each look
                raise self._guard.refusal(
                    "assigning to .data",
                    "it moves a tensor to another address",
                    "copy into it in place: tensor.copy_(new)",
                )
            values = args[1:] if func is torch.Tensor.new_tensor else args
            if func in _FROM_VALUES and values and _lists_tensors(values[0]):
                raise self._guard.refusal(
                    f"torch.{func.__name__} of a list of tensors",
                    "it copies their values through the host",
                    "use torch.stack, which stays on the device",
                )
        return func(*args, **(kwargs or {}))


def _lists_tensors(data: Any, inside: bool = True) -> bool:
    """Whether `data` is a list with tensors in it, or, with `inside` False, a tuple of such lists: an
    index is a tuple of tensors by right."""
    if not isinstance(data, (list, tuple)):
        return False
    if not inside and isinstance(data, tuple):
        return any(_lists_tensors(item, inside=False) for item in data)
    return any(isinstance(item, torch.Tensor) or _lists_tensors(item) for item in data)
