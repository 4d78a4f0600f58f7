"""A driver that runs graphs with a WHILE node on the host, and a recorder whose recordings use it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

from graphcap.recorders.loop import GraphLoop, LoopDriver
from graphcap.recorders.tape import TapeRecorder, TapeRecording


class CUresult(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NOT_SUPPORTED = 801


CONTEXT = 7
FUNCTIONS = {"graphcap_begin": 54, "graphcap_go_on": 55}


class FakeDriver:
    """What `LoopDriver` needs of ``cuda.bindings.driver``. Graphs and functions are integers.

    Attributes:
        bodies: raw handle of a graph outside -> what running it does.
        fails: the calls that answer "not supported".
        open: what was made and not given back, by kind.
        contexts: thread -> its stack of contexts; a thread that is not named has none.
        default_streams: of the launches on stream 0, the context whose stream that is.
        calls: names of the calls, in order.
    """

    CUresult = CUresult
    CU_GRAPH_COND_ASSIGN_DEFAULT = 1
    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_CONDITIONAL=13)
    CUgraphConditionalNodeType = SimpleNamespace(CU_GRAPH_COND_TYPE_WHILE=1)
    CUgraph = CUstream = staticmethod(int)
    CUgraphEdgeData = SimpleNamespace

    def __init__(self) -> None:
        self.bodies: dict[int, Callable[[], None]] = {}
        self.fails: set[str] = set()
        self.open: dict[str, set[int]] = {"graph": set(), "executable": set()}
        self.calls: list[str] = []
        self.nodes: dict[int, list[Any]] = {}
        self.values: dict[int, int] = {}
        self.streams: list[int] = []
        self.runs = 0
        self.contexts = {threading.get_ident(): [CONTEXT]}
        self.default_streams: list[int] = []
        self._next = 100
        self._last = 0  # the node that was made last

    def CUgraphNodeParams(self) -> Any:
        return SimpleNamespace(type=None, conditional=SimpleNamespace())

    def CUDA_KERNEL_NODE_PARAMS(self) -> Any:
        return SimpleNamespace()

    def _answer(self, name: str, *results: Any) -> tuple[Any, ...]:
        self.calls.append(name)
        if name in self.fails:
            return (CUresult.CUDA_ERROR_NOT_SUPPORTED, *(None for _ in results))
        return (CUresult.CUDA_SUCCESS, *results)

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _new_node(self) -> int:
        self._last = self._new()
        return self._last

    @property
    def _stack(self) -> list[int]:
        return self.contexts.setdefault(threading.get_ident(), [])

    def cuCtxGetCurrent(self) -> Any:
        return self._answer("cuCtxGetCurrent", self._stack[-1] if self._stack else 0)

    def cuCtxPushCurrent(self, context: int) -> Any:
        self._stack.append(context)
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> Any:
        return CUresult.CUDA_SUCCESS, self._stack.pop()

    def cuModuleLoadData(self, image: bytes) -> Any:
        assert image.endswith(b"\0")
        assert image.isascii()
        assert b"cudaGraphSetConditional" in image
        return self._answer("cuModuleLoadData", self._new())

    def cuModuleGetFunction(self, module: int, name: bytes) -> Any:
        return self._answer("cuModuleGetFunction", FUNCTIONS[name.decode()])

    def cuGraphCreate(self, flags: int) -> Any:
        assert flags == 0
        answer = self._answer("cuGraphCreate", graph := self._new())
        if answer[0] is CUresult.CUDA_SUCCESS:
            self.open["graph"].add(graph)
            self.nodes[graph] = []
        return answer

    def cuGraphDestroy(self, graph: int) -> Any:
        assert self._stack
        self.open["graph"].remove(graph)
        return self._answer("cuGraphDestroy")

    def cuGraphConditionalHandleCreate(self, graph: int, ctx: int, value: int, flags: int) -> Any:
        assert (ctx, value, flags) == (CONTEXT, 1, 1)
        assert graph in self.open["graph"]
        return self._answer("cuGraphConditionalHandleCreate", 2**40 + self._new())

    def cuGraphAddNode(self, graph: int, nodes: Any, data: Any, count: int, params: Any) -> Any:
        # Behind the kernel that starts, where there is one; edge data are all zero.
        assert (nodes, data, count) in ((None, None, 0), ([self._last], [SimpleNamespace()], 1))
        assert count == len(self.nodes[graph])
        condition = params.conditional
        assert (params.type, condition.type, condition.size, condition.ctx) == (13, 1, 1, CONTEXT)
        body = self._new()
        self.nodes[body] = []
        condition.phGraph_out = [body]
        self.nodes[graph].append(("while", condition.handle, body))
        return self._answer("cuGraphAddNode", self._new_node())

    def cuGraphAddChildGraphNode(self, graph: int, nodes: Any, count: int, child: int) -> Any:
        assert (nodes, count) == (None, 0)
        self.nodes[graph].append(("child", child))
        return self._answer("cuGraphAddChildGraphNode", self._new_node())

    def cuGraphAddKernelNode(self, graph: int, nodes: Any, count: int, params: Any) -> Any:
        assert (params.gridDimX, params.blockDimX, params.sharedMemBytes) == (1, 32, 0)
        begins = params.func == FUNCTIONS["graphcap_begin"]
        assert (nodes, count) == ((None, 0) if begins else ([self._last], 1))
        # Copied now, as the driver does: the caller's memory may be gone at the launch.
        pointers = ctypes.cast(params.kernelParams, ctypes.POINTER(ctypes.c_void_p))
        kinds = (*(ctypes.c_uint64,) * (2 if begins else 3), ctypes.c_uint32)
        values = [kind.from_address(pointers[i]).value for i, kind in enumerate(kinds)]
        self.nodes[graph].append(("begin" if begins else "go on", *values))
        return self._answer("cuGraphAddKernelNode", self._new_node())

    def cuGraphInstantiate(self, graph: int, flags: int) -> Any:
        assert flags == 0
        answer = self._answer("cuGraphInstantiate", executable := self._new())
        if answer[0] is CUresult.CUDA_SUCCESS:
            self.open["executable"].add(executable)
            self.nodes[executable] = list(self.nodes[graph])
        return answer

    def cuGraphExecDestroy(self, executable: int) -> Any:
        assert self._stack
        self.open["executable"].remove(executable)
        return self._answer("cuGraphExecDestroy")

    def cuGraphUpload(self, executable: int, stream: int) -> Any:
        assert executable in self.open["executable"]
        return self._answer("cuGraphUpload")

    def cuGraphLaunch(self, executable: int, stream: int) -> Any:
        assert executable in self.open["executable"]
        if not self._stack:
            self.calls.append("cuGraphLaunch")
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if stream == 0:
            self.default_streams.append(self._stack[-1])
        answer = self._answer("cuGraphLaunch")
        if answer[0] is CUresult.CUDA_SUCCESS:
            self.streams.append(stream)
            for kind, *values in self.nodes[executable]:
                if kind == "begin":
                    place, source, words = values
                    ctypes.memmove(place, source, 8 * words)
                    continue
                handle, body = values
                self.values[handle] = 1
                while self.values[handle]:
                    self.runs += 1
                    for node in self.nodes[body]:
                        if node[0] == "child":
                            self.bodies[node[1]]()
                        else:
                            self._go_on(*node[1:])
        return answer

    def _go_on(self, handle: int, left: int, live: int, rows: int) -> None:
        """What the kernel of `graphcap.recorders.loop` does."""
        remaining = ctypes.c_int32.from_address(left)
        remaining.value -= 1
        flags = (ctypes.c_uint8 * rows).from_address(live)
        self.values[handle] = int(remaining.value > 0 and any(flags))


class LoopingRecording(TapeRecording):
    """A tape that gives itself out as a graph which `driver` can repeat."""

    driver: FakeDriver

    def repeated(self, left: torch.Tensor, live: torch.Tensor, begin: Any = None) -> GraphLoop:
        assert live.is_contiguous()
        assert begin is None or all(t.is_contiguous() and t.dtype == torch.int64 for t in begin)
        self.driver.bodies[id(self)] = self.replay
        return GraphLoop(LoopDriver(self.driver), id(self), left, live, lambda: 3, begin)


class LoopingRecorder(TapeRecorder):
    name = "looping"

    def __init__(self, driver: FakeDriver | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.driver = driver or FakeDriver()

    def record(self, step: Any, bucket: int) -> TapeRecording:
        recording = super().record(step, bucket)
        if not self.repeatable:
            return recording
        recording.__class__ = LoopingRecording
        recording.driver = self.driver  # type: ignore[attr-defined]
        return recording
