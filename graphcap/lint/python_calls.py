"""torch's Python functions, seen before they reach an operation: host reads, host copies, CUDA's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from graphcap.lint.finding import CUDA, RECORDERS, WEAKENS
from graphcap.lint.host_memory import (
    FROM_VALUES,
    HOST_COPY,
    MAKE_BEFORE,
    device_named,
    is_host_name,
)
from graphcap.recorders.host_reads import ITEMS, SET_DATA, HostReadGuard

if TYPE_CHECKING:
    from graphcap.lint.trace import LintTrace


class Refusal(Exception):
    """What the guard would have raised as a `CaptureError`, in its parts."""

    def __init__(self, what: str, why: str, cure: str) -> None:
        super().__init__(what)
        self.what, self.why, self.cure = what, why, cure


class NotingHostReads(HostReadGuard):
    """Notes what the recorders' guard refuses, and copies between host and device, and lets them pass."""

    def __init__(self, trace: LintTrace) -> None:
        super().__init__(trace)
        self._trace = trace

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        keywords: dict[str, Any] = kwargs or {}
        trace = self._trace
        if trace.is_inside:
            return func(*args, **keywords)
        trace.calls.append((func, keywords.get("generator")))
        try:
            to_device = self._note_copies(func, args, keywords)
            try:
                result = super().__torch_function__(func, types, args, keywords)
            except Refusal as refusal:  # of the guard, which had not run `func` yet
                kind = "rebinding" if func == SET_DATA else "host read"
                trace.note_refusal(refusal, kind, RECORDERS)
                with trace.inside():
                    result = func(*args, **keywords)
        finally:
            trace.calls.pop()
        if _is_pinning(func, keywords):
            trace.host.pin(result)
        elif to_device:
            trace.host.moved(result)
        else:
            trace.host.made(func, keywords, result)
        return result

    def _note_copies(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Notes what copies between host and device. Returns whether the result is the device's."""
        host = self._trace.host
        if _is_pinning(func, kwargs):
            self._trace.notes.note(
                "host copy",
                "pin_memory",
                "replays do not run it; the driver waits where it has to page-lock memory",
                "allocate the pinned tensor once, before the step",
                severity=WEAKENS,
            )
            return False
        if func in ITEMS and len(args) > 1 and _holds_values(args[1]):
            self._note("indexing with a Python list", HOST_COPY, MAKE_BEFORE)
            return False
        named = device_named(func, args, kwargs)
        if named is not None:
            spelt = ".cuda()" if func is torch.Tensor.cuda else f".to({_spelt(named)})"
            if is_host_name(named):
                if host.active and not host.holds(args[0]):
                    self._note(
                        spelt,
                        "it copies a tensor to the host",
                        "keep the step's tensors on the device",
                    )
                return False
            if host.holds(args[0]):
                self._note(f"{spelt} of a tensor made on the host", HOST_COPY, MAKE_BEFORE)
            return True
        from_values = func in FROM_VALUES and kwargs.get("device") is not None
        if func is torch.Tensor.new_tensor:
            from_values, values = True, args[1:2]
        else:
            values = args[:1]
        if from_values and not is_host_name(kwargs.get("device")):
            if values and not isinstance(values[0], torch.Tensor):
                self._note(f"torch.{func.__name__} on the step's device", HOST_COPY, MAKE_BEFORE)
            elif values and host.holds(values[0]):
                self._note(f"torch.{func.__name__} of a host tensor", HOST_COPY, MAKE_BEFORE)
            return True
        return False

    def _note(self, what: str, why: str, cure: str) -> None:
        self._trace.notes.note("host copy", what, why, cure, breaks=(CUDA,))


class CudaNames(TorchFunctionMode):
    """CUDA devices that a step or its maker names are the device of lint."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        keywords: dict[str, Any] = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        if func is torch.Tensor.pin_memory:  # which needs a driver
            return args[0].clone()
        keywords.pop("pin_memory", None)
        if _names_cuda(keywords.get("device")):
            keywords["device"] = self._device
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], self._device, *args[2:])
        return func(*args, **keywords)


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, int):
        return not isinstance(device, bool)
    return isinstance(device, str) and device.startswith("cuda")


def _is_pinning(func: Any, kwargs: dict[str, Any]) -> bool:
    return func is torch.Tensor.pin_memory or bool(kwargs.get("pin_memory"))


def _holds_values(index: Any) -> bool:
    """Whether an index is, or has in it, a list of numbers."""
    if isinstance(index, tuple):
        return any(_holds_values(item) for item in index)
    if isinstance(index, list):
        return not any(isinstance(item, (torch.Tensor, slice)) for item in index)
    return type(index).__module__ == "numpy" and getattr(index, "ndim", 0) > 0


def _spelt(device: Any) -> str:
    return repr(device) if isinstance(device, (str, int)) else "device"
