"""Which tensors would lie in the host's memory if the step ran on a GPU.

Lint runs on a CPU, where both are CPU tensors. What was there before the step (slots, weights) counts
as the device's; what the step makes from Python or numpy values without naming a device as the host's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._device import _device_constructors

from graphcap.recorders.dispatched import storage_key, tensors_in

FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)
HOST_COPY = (
    "on a GPU it is copied from the host's pageable memory, for which the driver has to wait; no "
    "capture (nor the tape of a GPU) can hold that"
)
MAKE_BEFORE = "make the tensor once, before the step, or pass it as a slot"

_MIXES = frozenset({"copy_", "index", "index_put", "index_put_", "cat", "stack"})
"""Operations that a host tensor cannot join on a GPU even as one number."""


class HostMemory:
    """The host's tensors of one run of a step.

    A tensor is *certain* where it holds Python or numpy values, or pinned memory. A factory
    (``torch.arange(n)``) without a device is *likely* there: it is on the host unless the default
    device says otherwise, which shows when the step moves it.
    """

    def __init__(self, device: torch.device) -> None:
        # On meta the two have different devices, and the guard sees each copy.
        self.active = device.type != "meta"
        self._certain: dict[int, Any] = {}  # storages are held, so that no key is used again
        self._likely: dict[int, Any] = {}
        self._pinned: set[int] = set()
        self._factories = {*_device_constructors(), *FROM_VALUES}

    def made(self, func: Any, kwargs: dict[str, Any], result: Any) -> None:
        """A Python-level call returned `result`: is it a factory without a device?"""
        try:
            is_factory = func in self._factories
        except TypeError:  # an unhashable callable
            return
        if not self.active or not is_factory:
            return
        named = kwargs.get("device")
        if named is None or is_host_name(named):
            for tensor in tensors_in(result):
                if storage_key(tensor) not in self._certain:
                    self._likely[storage_key(tensor)] = tensor.untyped_storage()

    def add(self, tensor: torch.Tensor) -> None:
        if self.active:
            self._certain[storage_key(tensor)] = tensor.untyped_storage()

    def pin(self, tensor: torch.Tensor) -> None:
        self.add(tensor)
        self._pinned.add(storage_key(tensor))

    def moved(self, result: Any) -> None:
        """`result` is on the device from here on."""
        for tensor in tensors_in(result):
            self._certain.pop(storage_key(tensor), None)
            self._likely.pop(storage_key(tensor), None)

    def holds(self, tensor: Any) -> bool:
        """Whether moving `tensor` to the device would copy."""
        key = storage_key(tensor) if isinstance(tensor, torch.Tensor) else None
        return key in self._certain or key in self._likely

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._pinned

    def joins(self, packet: str, args: Any) -> bool:
        """Whether an operation on `args` brings a host tensor together with one of the device."""
        if not self.active or not self._certain:
            return False
        tensors = list(tensors_in(args))
        host = [t for t in tensors if storage_key(t) in self._certain]
        if not host or all(self.holds(t) for t in tensors):
            return False
        return packet in _MIXES or any(t.dim() > 0 for t in host)

    def follow(self, args: Any, result: Any) -> None:
        """What is computed from host tensors only is on the host as well."""
        tensors = list(tensors_in(args)) if self._certain or self._likely else []
        if not tensors or not all(self.holds(t) for t in tensors):
            return
        certain = any(storage_key(t) in self._certain for t in tensors)
        for tensor in tensors_in(result):
            kept = self._certain if certain else self._likely
            kept.setdefault(storage_key(tensor), tensor.untyped_storage())


def is_host_name(device: Any) -> bool:
    """Whether the step wrote ``"cpu"``: a device that it took from a tensor is the step's own."""
    return isinstance(device, str) and device.startswith("cpu")


def device_named(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The device that ``tensor.to(…)`` or ``tensor.cuda()`` names; None: it names none."""
    if func is torch.Tensor.cuda:
        return "cuda"
    if func is not torch.Tensor.to:
        return None
    if kwargs.get("device") is not None:
        return kwargs["device"]
    for value in (*args[1:2], kwargs.get("other")):
        if isinstance(value, (str, torch.device)) or (
            isinstance(value, int) and not isinstance(value, bool)
        ):
            return value
        if isinstance(value, torch.Tensor):
            return value.device
    return None
