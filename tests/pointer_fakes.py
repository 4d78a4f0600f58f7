"""A driver whose graphs are lists of nodes, with parameter blocks in memory as a real driver keeps them."""

from __future__ import annotations

import ctypes
import struct
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any


class CUresult(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_SUPPORTED = 801


class CUgraphNodeType(IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_HOST = 3
    CU_GRAPH_NODE_TYPE_GRAPH = 4
    CU_GRAPH_NODE_TYPE_EMPTY = 5
    CU_GRAPH_NODE_TYPE_MEM_ALLOC = 10
    CU_GRAPH_NODE_TYPE_CONDITIONAL = 13


class CUmemorytype(IntEnum):
    CU_MEMORYTYPE_HOST = 1
    CU_MEMORYTYPE_DEVICE = 2
    CU_MEMORYTYPE_ARRAY = 3
    CU_MEMORYTYPE_UNIFIED = 4


class CUpointer_attribute(IntEnum):
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2
    CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11
    CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12


def words(*values: int) -> bytes:
    return struct.pack(f"{len(values)}Q", *values)


def ints(*values: int) -> bytes:
    return struct.pack(f"{len(values)}i", *values)


class GraphDriver:
    """What `PointerReader` needs of ``cuda.bindings.driver``. Graphs and nodes are objects of the test.

    Attributes:
        known: start, end and kind of memory that the driver knows.
        fails: names of calls that answer "not supported".
        calls: how often each was called.
    """

    CUresult = CUresult
    CUgraphNodeType = CUgraphNodeType
    CUmemorytype = CUmemorytype
    CUpointer_attribute = CUpointer_attribute
    CUdeviceptr = staticmethod(int)

    def __init__(self) -> None:
        self.known: list[tuple[int, int, CUmemorytype]] = []
        self.fails: set[str] = set()
        self.calls: dict[str, int] = {}
        self._alive: list[Any] = []
        self._kernels: dict[int, tuple[bytes, list[tuple[int, int]]]] = {}

    # -- made by a test --------------------------------------------------------------------------

    def kernel(
        self,
        name: str,
        *parameters: bytes,
        offsets: list[int] | None = None,
        library: bool = False,
        packed: bool = False,
        scattered: bool = False,
    ) -> Any:
        """A node of a kernel with these parameters, each behind the one before at a multiple of its size,
        at most 8."""
        places, end = [], 0
        for index, data in enumerate(parameters):
            align = min(8, 1 << (len(data) - 1).bit_length()) if len(data) < 8 else 8
            start = -(-end // align) * align if offsets is None else offsets[index]
            places.append((start, len(data)))
            end = start + len(data)
        block = ctypes.create_string_buffer(max(end, 1) + 8)
        base = -(-ctypes.addressof(block) // 8) * 8
        for (start, size), data in zip(places, parameters, strict=True):
            ctypes.memmove(base + start, data, size)
        starts = [base + start for start, _ in places]
        if scattered:  # each parameter in memory of its own
            copies = [ctypes.create_string_buffer(data, len(data)) for data in parameters]
            starts = [ctypes.addressof(copy) for copy in copies]
            self._alive += copies
            ctypes.memset(base, 0, end)
        handle = 0x1000 + len(self._kernels)
        self._kernels[handle] = (name.encode(), places)
        pointers = (ctypes.c_uint64 * max(len(places), 1))(*starts)
        size = ctypes.c_uint64(end)
        extra = (ctypes.c_uint64 * 5)(1, base, 2, ctypes.addressof(size), 0)
        self._alive += [block, pointers, size, extra]
        params = SimpleNamespace(
            func=0 if library else handle,
            kern=handle if library else 0,
            kernelParams=0 if packed or not places else ctypes.addressof(pointers),
            extra=ctypes.addressof(extra) if packed else 0,
        )
        return SimpleNamespace(kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL, params=params)

    @staticmethod
    def copy(source: int, target: int, nbytes: int, *, host: bool = False, **more: int) -> Any:
        from_kind = CUmemorytype.CU_MEMORYTYPE_HOST if host else CUmemorytype.CU_MEMORYTYPE_DEVICE
        fields: dict[str, Any] = {"WidthInBytes": nbytes, "Height": 1, "Depth": 1}
        for side, kind, address in (
            ("src", from_kind, source),
            ("dst", CUmemorytype.CU_MEMORYTYPE_UNIFIED, target),
        ):
            on_host = kind == CUmemorytype.CU_MEMORYTYPE_HOST
            fields[f"{side}MemoryType"] = kind
            fields[f"{side}Host"] = address if on_host else 0
            fields[f"{side}Device"] = 0 if on_host else address
            fields |= {f"{side}{part}": 0 for part in ("XInBytes", "Y", "Z", "Pitch", "Height")}
        return SimpleNamespace(
            kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY, params=SimpleNamespace(**fields | more)
        )

    @staticmethod
    def memset(
        target: int, width: int, *, element: int = 1, height: int = 1, pitch: int = 0
    ) -> Any:
        params = SimpleNamespace(
            dst=target, width=width, elementSize=element, height=height, pitch=pitch
        )
        return SimpleNamespace(kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET, params=params)

    @staticmethod
    def alloc(start: int, nbytes: int) -> Any:
        return SimpleNamespace(
            kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEM_ALLOC,
            params=SimpleNamespace(dptr=start, bytesize=nbytes),
        )

    @staticmethod
    def child(*nodes: Any) -> Any:
        return SimpleNamespace(
            kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH, nodes=list(nodes), params=None
        )

    @staticmethod
    def other(kind: str) -> Any:
        return SimpleNamespace(kind=CUgraphNodeType[f"CU_GRAPH_NODE_TYPE_{kind}"], params=None)

    # -- asked by graphcap -----------------------------------------------------------------------

    def _answer(self, name: str, *results: Any) -> tuple[Any, ...]:
        self.calls[name] = self.calls.get(name, 0) + 1
        if name in self.fails:
            return (CUresult.CUDA_ERROR_NOT_SUPPORTED, *(None for _ in results))
        return (CUresult.CUDA_SUCCESS, *results)

    def cuGraphGetNodes(self, graph: Any, number: int) -> Any:
        nodes = graph if isinstance(graph, list) else graph.nodes
        return self._answer("cuGraphGetNodes", nodes if number else [], len(nodes))

    def cuGraphNodeGetType(self, node: Any) -> Any:
        return self._answer("cuGraphNodeGetType", node.kind)

    def cuGraphChildGraphNodeGetGraph(self, node: Any) -> Any:
        return self._answer("cuGraphChildGraphNodeGetGraph", node)

    def cuGraphKernelNodeGetParams(self, node: Any) -> Any:
        return self._answer("cuGraphKernelNodeGetParams", node.params)

    def cuGraphMemcpyNodeGetParams(self, node: Any) -> Any:
        return self._answer("cuGraphMemcpyNodeGetParams", node.params)

    def cuGraphMemsetNodeGetParams(self, node: Any) -> Any:
        return self._answer("cuGraphMemsetNodeGetParams", node.params)

    def cuGraphMemAllocNodeGetParams(self, node: Any) -> Any:
        return self._answer("cuGraphMemAllocNodeGetParams", node.params)

    def cuFuncGetName(self, function: int) -> Any:
        return self._answer("cuFuncGetName", self._kernels[function][0])

    def cuKernelGetName(self, kernel: int) -> Any:
        return self._answer("cuKernelGetName", self._kernels[kernel][0])

    def cuFuncGetParamInfo(self, function: int, index: int) -> Any:
        return self._parameter("cuFuncGetParamInfo", function, index)

    def cuKernelGetParamInfo(self, kernel: int, index: int) -> Any:
        return self._parameter("cuKernelGetParamInfo", kernel, index)

    def _parameter(self, call: str, handle: int, index: int) -> Any:
        places = self._kernels[handle][1]
        if index >= len(places) and call not in self.fails:
            return (CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0)
        return self._answer(call, *(places[index] if index < len(places) else (0, 0)))

    def cuPointerGetAttributes(self, number: int, kinds: list[int], address: int) -> Any:
        assert number == len(kinds) == 3
        for start, end, kind in self.known:
            if start <= address < end:
                return self._answer("cuPointerGetAttributes", [int(kind), start, end - start])
        return self._answer("cuPointerGetAttributes", [0, 0, 0])


def segment(start: int, pool: tuple[int, int], *blocks: tuple[int, str]) -> dict[str, Any]:
    """A segment as ``torch.cuda.memory_snapshot()`` gives it; blocks are sizes and ``live``, ``free`` or
    ``pending``."""
    states = {"live": "active_allocated", "free": "inactive", "pending": "active_pending_free"}
    return {
        "address": start,
        "total_size": sum(size for size, _ in blocks),
        "segment_pool_id": pool,
        "blocks": [{"size": size, "state": states[state]} for size, state in blocks],
    }
