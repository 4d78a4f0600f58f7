"""StepGuard: sees every operation of a step while it is recorded, and refuses what no recording can
replay faithfully *before* it runs.

Refusing first is what keeps a CUDA capture intact: the forbidden call never reaches the driver, so
the capture can be ended in order and the device stays usable. Three ways lead to the device, and all
are watched: torch's dispatcher, graphcap's kernel layer, and Triton launches behind their back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap.errors import CaptureError
from graphcap.operations import Operation, observed_by
from graphcap.recorders.host_reads import KEEP_ON_DEVICE, HostReadGuard
from graphcap.recorders.source import calling_line
from graphcap.recorders.triton_hook import triton_launches_seen_by

_FIXED_SHAPE = "compute a fixed number of rows and mask: use torch.where or masked_fill"
_CURES = {
    "_local_scalar_dense": KEEP_ON_DEVICE,
    "item": KEEP_ON_DEVICE,
    "equal": "compare with torch.eq(a, b).all() and keep the result on the device",
    "nonzero": _FIXED_SHAPE,
    "masked_select": _FIXED_SHAPE,
    "index": _FIXED_SHAPE,
    "index_put_": _FIXED_SHAPE,
    "bincount": "use torch.zeros(E).scatter_add_(0, ids, ones), whose length is fixed",
    "repeat_interleave": "pass output_size=, so that the length is known on the host",
}
_SPOKEN = {"_local_scalar_dense": ".item() (or bool(), int(), float() of a tensor)"}

_MASKS = (torch.bool, torch.uint8)
COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
"""Namespaces of the operators of torch.distributed."""
_METADATA = frozenset({"is_same_size", "is_pinned", "promote_types", "result_type", "can_cast"})
"""Return no tensor, but read none either."""
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_MOVES_STORAGE = frozenset({"resize_", "resize_as_", "resize_as_sparse_", "set_", "set_data"})


class StepGuard(TorchDispatchMode):
    """Enter it around one run of a step.

    Args:
        device: the device that the step runs on.
        replays_live: each operation is called again at replay (tape). Otherwise the device work
            is captured (CUDA graph), and copies from pinned memory may be part of it.
    """

    def __init__(self, device: torch.device, *, replays_live: bool) -> None:
        super().__init__()
        self.device = device
        self.replays_live = replays_live
        self._thread = threading.get_ident()
        self._depth = 0  # above 0: inside an operation that was seen and allowed
        self._refused: CaptureError | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports its compiler at the first operation, which takes seconds."""
        return False

    # -- what subclasses do with what they see ---------------------------------------------------

    def dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One allowed dispatcher operation. Runs it and returns its result."""
        return func(*args, **kwargs)

    def called(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One call through the kernel layer. Runs it."""
        operation.function(*args, **kwargs)

    def looks_inside(self, func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """What runs, watched, in place of an operation; None: it is seen as a whole."""
        return None

    # -- the three ways --------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(observed_by(self))
            stack.enter_context(HostReadGuard(self))
            if self.replays_live:
                stack.enter_context(self._triton_launches())
            stack.enter_context(self)
            try:
                yield
            except Exception as error:
                if self._refused is None or error is self._refused:
                    raise
                raise self._refused from error
        if self._refused is not None:  # the step caught it and took another branch
            raise self._refused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords: dict[str, Any] = kwargs or {}
        if self._depth:
            return func(*args, **keywords)
        if func is torch.ops.aten.detach_.default:  # torch.tensor() calls it on its new tensor
            return func(*args, **keywords)
        inside = self.looks_inside(func, args)
        if inside is not None:
            with HostReadGuard(self), self:
                return inside(*args, **keywords)
        if torch.is_inference_mode_enabled() and _can_decompose(func):
            # Composite operations arrive whole in inference mode; see what they are made of.
            with self:
                result = func.decompose(*args, **keywords)
            if result is not NotImplemented:
                return result
        self._refuse_dispatch(func, args, keywords)
        self._depth += 1
        try:
            return self.dispatched(func, args, keywords)
        finally:
            self._depth -= 1

    def operation(
        self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._depth:
            operation.function(*args, **kwargs)
            return
        self._depth += 1
        try:
            self.called(operation, args, kwargs)
        finally:
            self._depth -= 1

    def _triton_launches(self) -> AbstractContextManager[None]:
        """How launches of Triton kernels that no operation contains are seen."""
        return triton_launches_seen_by(self._triton_launch)

    def _triton_launch(self, kernel: str) -> None:
        if not self._depth and threading.get_ident() == self._thread:
            raise self._first(
                f"the Triton kernel {kernel!r} was launched at {calling_line()} where the tape "
                f"cannot see its arguments; wrap the launch with graphcap.operations.operation, or "
                f"register it as a custom operator with torch.library"
            )

    # -- refusals --------------------------------------------------------------------------------

    def _refuse_dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        packet = func.overloadpacket.__name__
        returns = func._schema.returns
        tags = func.tags
        on_device = not self.replays_live and _reads_mask_on_host(packet, args)
        if on_device or _is_data_dependent(func, packet, args, kwargs, tags):
            what = _SPOKEN.get(packet, f"aten.{packet}")
            raise self.refusal(
                what,
                "its result's shape or value has to be read by the host",
                _CURES.get(packet, _FIXED_SHAPE),
            )
        if func.namespace in COLLECTIVES and self.replays_live:
            raise self.refusal(
                str(func),
                "a tape cannot wait for a collective",
                "record this step with the cuda recorder, or wrap the collective and its wait in "
                "one graphcap.operations.operation",
            )
        known = packet in _METADATA
        if returns and not known and not any(_is_tensor_type(r.type) for r in returns):
            raise self.refusal(
                str(func), "it returns a value of a tensor to the host", KEEP_ON_DEVICE
            )
        # A graph has the addresses already; a tape holds the tensor whose shape would change.
        if torch.Tag.inplace_view in tags and (self.replays_live or packet in _MOVES_STORAGE):
            raise self.refusal(
                str(func),
                "it changes the shape or storage of a tensor in place",
                "use the out-of-place form, such as t() for t_(), and tensors of a fixed size",
            )
        if packet in ("_to_copy", "copy_", "copy") and not self._copy_stays(packet, args, kwargs):
            raise self.refusal(
                str(func),
                "it copies between the host and the device",
                f"keep the step's tensors on {self.device}; pass what changes as a slot",
            )

    def _copy_stays(self, packet: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        source = args[0] if packet == "_to_copy" else args[1]
        target = kwargs.get("device") if packet == "_to_copy" else args[0].device
        if target is None or torch.device(target).type == source.device.type:
            return True
        host = source if packet == "_to_copy" else (source if source.is_cpu else args[0])
        non_blocking = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        return (
            not self.replays_live
            and non_blocking
            and packet == "copy_"
            and host.is_cpu
            and host.is_pinned()
        )

    def refusal(self, what: str, why: str, cure: str) -> CaptureError:
        return self._first(f"{what} at {calling_line()} cannot be recorded: {why}; {cure}")

    def _first(self, text: str) -> CaptureError:
        error = CaptureError(text)
        if self._refused is None:
            self._refused = error
        return error

    @property
    def is_inside(self) -> bool:
        """Whether an operation is running that was seen and allowed as a whole."""
        return self._depth > 0


def _can_decompose(func: Any) -> bool:
    ask = getattr(func, "_can_decompose", None)
    if ask is not None:
        return bool(ask())
    # torch before 2.4
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE))


def _is_data_dependent(
    func: Any, packet: str, args: tuple[Any, ...], kwargs: dict[str, Any], tags: Any
) -> bool:
    if packet == "index":
        indices = args[1] if len(args) > 1 else kwargs.get("indices", ())
        return any(isinstance(i, torch.Tensor) and i.dtype in _MASKS for i in indices)
    if packet == "repeat_interleave":
        return kwargs.get("output_size") is None
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def _reads_mask_on_host(packet: str, args: tuple[Any, ...]) -> bool:
    """Whether a masked assignment counts the mask on the host, as any but of one value does on CUDA."""
    if packet not in ("index_put", "index_put_") or args[2].numel() == 1:
        return False
    return any(isinstance(i, torch.Tensor) and i.dtype in _MASKS for i in args[1])


def _is_tensor_type(kind: Any) -> bool:
    return "Tensor" in str(kind)
