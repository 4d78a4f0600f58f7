"""PointerReader: the addresses in the nodes of a CUDA graph, read through the driver (``cuda-bindings``).

A kernel node keeps a copy of its kernel's parameters. The driver says where each parameter lies and how
large it is (cuFuncGetParamInfo, cuKernelGetParamInfo: CUDA 12.4), but not what it is: every eight bytes of
it at a place where an address may lie are taken, and who asks decides whether they are one. The driver
permits all queries while the graph is being captured (see `graph_nodes`).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

from graphcap.errors import BackendError
from graphcap.graph_addresses import GraphAddresses, Node, Word
from graphcap.live_memory import Range
from graphcap.pointer_check import DriverRange

_LOWEST, _HIGHEST = 1 << 20, 1 << 57
"""No device memory lies outside: neither small integers nor masks are addresses."""

_MOST_PARAMETERS = (
    1 << 12
)  # what a kernel may have (4 KiB, or 32,764 bytes) at a byte and more each
_BUFFER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE
_NAME_LENGTH = 160
_NO_ADDRESS = frozenset({"empty", "host", "event_record", "wait_event", "graph", "mem_free"})
"""Kinds of nodes that use no address of the device, or whose nodes are read themselves."""


class PointerReader:
    """Reads addresses out of graphs, and asks whose memory one is.

    Args:
        driver: ``cuda.bindings.driver``, or what answers as it does.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._kind_names = {
            value: name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
            for name, value in driver.CUgraphNodeType.__members__.items()
        }

    def read(self, graph: Any) -> GraphAddresses:
        """Every word of the nodes of `graph` that may be an address, nodes of child graphs included.

        Raises:
            BackendError: the nodes cannot be listed. What fails for one node is counted as unread.
        """
        found = GraphAddresses()
        # Of this call only: a function that is unloaded may leave its handle to another one.
        self._walk(graph, "", found, {})
        return found

    def range_of(self, address: int) -> DriverRange | None:
        """The memory around `address`, as the driver knows it; None: it knows none there."""
        kinds = self._driver.CUpointer_attribute
        wanted = [
            kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            kinds.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            kinds.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        ]
        pointer = self._driver.CUdeviceptr(address)
        kind, start, size = self._ask("cuPointerGetAttributes", len(wanted), wanted, pointer)
        if not int(kind):  # no error, but attributes of nothing
            return None
        first = int(start) or address
        host = int(self._driver.CUmemorytype.CU_MEMORYTYPE_HOST)
        return DriverRange(first, first + max(int(size), 1), int(kind) == host)

    # -- nodes -----------------------------------------------------------------------------------

    def _walk(
        self, graph: Any, prefix: str, found: GraphAddresses, kernels: dict[int, Any]
    ) -> None:
        _, number = self._ask("cuGraphGetNodes", graph, 0)
        handles = self._ask("cuGraphGetNodes", graph, number)[0] if int(number) else ()
        for index, handle in enumerate(handles):
            path = f"{prefix}{index}"
            kind = self._ask("cuGraphNodeGetType", handle)
            name = self._kind_names.get(kind, str(kind))
            if name == "graph":
                child = self._ask("cuGraphChildGraphNodeGetGraph", handle)
                self._walk(child, f"{path}.", found, kernels)
            if name in _NO_ADDRESS:
                continue
            found.total += 1
            try:
                if name == "kernel":
                    self._kernel(handle, path, found, kernels)
                elif name == "memcpy":
                    self._copy(handle, path, found)
                elif name == "memset":
                    self._memset(handle, path, found)
                elif name == "mem_alloc":
                    made = self._ask("cuGraphMemAllocNodeGetParams", handle)
                    start = int(made.dptr)
                    found.own.append(Range(start, start + int(made.bytesize)))
                else:
                    found.unread[f"nodes of kind {name} are not read"] += 1
            except BackendError as error:
                found.unread[str(error.args[0])] += 1

    def _kernel(
        self, handle: Any, path: str, found: GraphAddresses, kernels: dict[int, Any]
    ) -> None:
        params = self._ask("cuGraphKernelNodeGetParams", handle)
        # A node holds either a CUfunction or, for kernels loaded as a library, a CUkernel.
        function = int(params.func) or int(params.kern)
        if function not in kernels:
            kernels[function] = self._described(params)
        kernel: _Kernel = kernels[function]
        pointers, packed = int(params.kernelParams or 0), int(params.extra or 0)
        if not kernel.offsets:
            if pointers:
                raise BackendError("the driver names no parameters of a kernel that was given some")
            values: Sequence[int] = ()
        elif pointers:
            places = kernel.places_at(pointers)
            joined = places == [places[0] + offset for offset in kernel.offsets]
            values = kernel.values(places[0]) if joined else kernel.scattered(places)
        elif packed:
            values = kernel.values(_packed_start(packed))
        else:
            raise BackendError("a kernel node has no parameters, its kernel has")
        where = len(found.nodes)
        found.nodes.append(Node(path, f"kernel {kernel.name}"))
        for value, word in zip(values, kernel.words, strict=True):
            if _LOWEST <= value < _HIGHEST:
                found.words.append(Word(where, *word, value))

    def _described(self, params: Any) -> _Kernel:
        if int(params.func):
            name = self._ask("cuFuncGetName", params.func)
            layout = self._layout("cuFuncGetParamInfo", params.func)
        else:
            name = self._ask("cuKernelGetName", params.kern)
            layout = self._layout("cuKernelGetParamInfo", params.kern)
        text = name.decode() if isinstance(name, bytes) else str(name)
        return _Kernel(text if len(text) <= _NAME_LENGTH else f"{text[:_NAME_LENGTH]}…", layout)

    def _layout(self, function: str, kernel: Any) -> list[tuple[int, int]]:
        call = getattr(self._driver, function, None)
        if call is None:
            raise BackendError(f"this cuda-bindings has no {function}; install 12.4 or later")
        layout: list[tuple[int, int]] = []
        while len(layout) < _MOST_PARAMETERS:
            try:
                error, offset, size = call(kernel, len(layout))
            except RuntimeError as missing:
                raise BackendError(f"this driver has no {function}: {missing}") from missing
            if error == self._driver.CUresult.CUDA_ERROR_INVALID_VALUE:  # past the last one
                return layout
            if error != self._driver.CUresult.CUDA_SUCCESS:
                raise BackendError(f"{function} failed: {error}")
            layout.append((int(offset), int(size)))
        raise BackendError(f"{function} names no last parameter")

    def _copy(self, handle: Any, path: str, found: GraphAddresses) -> None:
        params = self._ask("cuGraphMemcpyNodeGetParams", handle)
        kinds = self._driver.CUmemorytype
        where = len(found.nodes)
        found.nodes.append(Node(path, "memcpy"))
        shape = (int(params.WidthInBytes), int(params.Height), int(params.Depth))
        for role, side in (("source", "src"), ("target", "dst")):
            try:
                kind = getattr(params, f"{side}MemoryType")
            except ValueError as error:
                raise BackendError(
                    f"a copy has a kind of memory that is not known: {error}"
                ) from error
            if kind == kinds.CU_MEMORYTYPE_ARRAY:
                continue  # an opaque handle
            base = getattr(
                params, f"{side}Host" if kind == kinds.CU_MEMORYTYPE_HOST else f"{side}Device"
            )
            x, y, z, pitch, height = (
                int(getattr(params, f"{side}{part}"))
                for part in ("XInBytes", "Y", "Z", "Pitch", "Height")
            )
            start = int(base or 0) + x + y * pitch + z * pitch * height
            _extent(found, where, role, start, shape, pitch, pitch * height)

    def _memset(self, handle: Any, path: str, found: GraphAddresses) -> None:
        params = self._ask("cuGraphMemsetNodeGetParams", handle)
        found.nodes.append(Node(path, "memset"))
        shape = (int(params.width) * int(params.elementSize), int(params.height), 1)
        where = len(found.nodes) - 1
        _extent(found, where, "target", int(params.dst), shape, int(params.pitch), 0)

    def _ask(self, function: str, *arguments: Any) -> Any:
        call = getattr(self._driver, function, None)
        if call is None:
            raise BackendError(f"this cuda-bindings has no {function}")
        try:
            error, *results = call(*arguments)
        except RuntimeError as missing:  # a driver that is older than the bindings lacks the symbol
            raise BackendError(f"{function} cannot be called: {missing}") from missing
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"{function} failed: {error}")
        return results[0] if len(results) == 1 else results


class _Kernel:
    """A kernel and the layout of its parameter block.

    Attributes:
        offsets: of the parameters in the block.
        words: argument, offset in it and size of it, of each word of the block that may be an address.
    """

    def __init__(self, name: str, layout: list[tuple[int, int]]) -> None:
        self.name = name
        self.offsets = [offset for offset, _ in layout]
        self.words: list[tuple[int, int, int]] = []
        picked = []
        for argument, (offset, size) in enumerate(layout):
            # An address lies at a multiple of eight of the whole block.
            for at in range(-offset % 8, size - 7, 8):
                self.words.append((argument, at, size))
                picked.append((offset + at) // 8)
        self._count = max((index + 1 for index in picked), default=0)
        self._places = ctypes.c_uint64 * len(layout)
        self._block = struct.Struct(f"{self._count}Q")
        self._picked = picked if picked != list(range(self._count)) else None

    def places_at(self, pointers: int) -> list[int]:
        """Where each parameter lies, by the array of pointers at `pointers`."""
        return list(self._places.from_address(pointers))

    def values(self, block: int) -> Sequence[int]:
        """The values of `words`, of a block that lies at `block` in one piece."""
        values = self._block.unpack(ctypes.string_at(block, self._count * 8))
        return values if self._picked is None else [values[index] for index in self._picked]

    def scattered(self, places: list[int]) -> Sequence[int]:
        """The values of `words`, of parameters that lie apart."""
        return [
            ctypes.c_uint64.from_address(places[argument] + at).value
            for argument, at, _ in self.words
        ]


def _extent(
    found: GraphAddresses,
    node: int,
    role: str,
    start: int,
    shape: tuple[int, int, int],
    pitch: int,
    slice_pitch: int,
) -> None:
    """The first byte that a copy or memset touches, and the last."""
    width, rows, slices = (max(n, 1) for n in shape)
    last = start + (slices - 1) * slice_pitch + (rows - 1) * pitch + width - 1
    if start >= _LOWEST:
        found.words.append(Word(node, role, 0, 8, start))
        if last != start:
            found.words.append(Word(node, f"end of the {role}", last - start, 8, last))


def _packed_start(extra: int) -> int:
    """Where the parameters lie that were handed to the driver as one buffer."""
    entries = (ctypes.c_uint64 * 5).from_address(extra)
    for key in (0, 2):
        if entries[key] == _BUFFER:
            return int(entries[key + 1])
        if entries[key] != _BUFFER_SIZE:
            break
    raise BackendError("a kernel node keeps its parameters in a way that is not known")
