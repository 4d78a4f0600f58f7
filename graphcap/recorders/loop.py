"""GraphLoop: a CUDA graph that the device runs again and again by itself, as the body of a WHILE node.

A conditional node (CUDA 12.4, driver 550) runs its body graph as long as a value is not 0 that only a
kernel in the body can set; see `loop_kernels`. Sources: CUDA Programming Guide, "Conditional Graph
Nodes"; driver API, cuGraphAddNode, cuGraphConditionalHandleCreate.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from graphcap.errors import BackendError, StateError
from graphcap.recorders.base import Loop
from graphcap.recorders.loop_kernels import BEGIN, GO_ON, PTX, WARP


class LoopDriver:
    """The driver calls that make, launch and give back a graph with a WHILE node.

    Args:
        driver: ``cuda.bindings.driver`` of CUDA 12.4 or later, or what answers as it does.

    Raises:
        BackendError: `driver` knows no conditional nodes.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._modules: dict[int, Any] = {}
        if not hasattr(driver, "cuGraphConditionalHandleCreate"):
            raise BackendError(
                "this cuda-bindings knows no conditional graph nodes; install 12.4 or later"
            )
        # With edge data, as CUDA 13 has it under the plain name.
        self._add_node = (
            "cuGraphAddNode_v2" if hasattr(driver, "cuGraphAddNode_v2") else "cuGraphAddNode"
        )

    @staticmethod
    @cache
    def loaded() -> LoopDriver:
        """The one of this process.

        Raises:
            BackendError: cuda-bindings cannot be imported; says how to install it.
        """
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise BackendError(
                f"a loop on the device needs cuda-bindings, which cannot be imported ({error}); "
                f"install it with: pip install 'vllm-graphcap[cuda]'"
            ) from error
        return LoopDriver(driver)

    def context(self) -> Any:
        """The CUDA context of this thread."""
        context = self._ask("cuCtxGetCurrent")
        if not int(context):
            raise BackendError("this thread has no CUDA context; use the device once before")
        return context

    @contextmanager
    def inside(self, context: Any) -> Iterator[None]:
        """`context` is for a while that of this thread, which may have none or another device's."""
        self._ask("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._ask("cuCtxPopCurrent")

    def kernel(self, context: Any, name: str) -> Any:
        """One of `loop_kernels`, compiled by the driver once per context. It stays loaded: a graph that
        still runs may need it."""
        key = int(context)
        if key not in self._modules:
            self._modules[key] = self._ask("cuModuleLoadData", PTX.encode() + b"\0")
        return self._ask("cuModuleGetFunction", self._modules[key], name.encode())

    def create(self) -> Any:
        """An empty graph."""
        return self._ask("cuGraphCreate", 0)

    def destroy(self, graph: Any) -> None:
        self._ask("cuGraphDestroy", graph)

    def add_while(self, graph: Any, context: Any, after: Sequence[Any]) -> tuple[Any, Any]:
        """A WHILE node behind the nodes `after`, whose value is 1 at each launch: its handle and its empty
        body graph."""
        driver = self._driver
        handle = self._ask(
            "cuGraphConditionalHandleCreate",
            graph,
            context,
            1,
            driver.CU_GRAPH_COND_ASSIGN_DEFAULT,
        )
        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = handle
        params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        params.conditional.size = 1
        params.conditional.ctx = context
        edges = [driver.CUgraphEdgeData() for _ in after]  # all zero: the whole node before
        self._ask(self._add_node, graph, after or None, edges or None, len(after), params)
        # A copy of the handle: the array belongs to the node's parameters.
        return handle, driver.CUgraph(int(params.conditional.phGraph_out[0]))

    def add_child(self, graph: Any, child: int) -> Any:
        """A node that runs a copy of the graph `child`."""
        return self._ask("cuGraphAddChildGraphNode", graph, None, 0, self._driver.CUgraph(child))

    def add_kernel(
        self, graph: Any, after: Sequence[Any], function: Any, arguments: tuple[Any, ...]
    ) -> Any:
        """A node of one warp behind the nodes `after`. `arguments` are ctypes values; they are copied."""
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        params = self._driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = function
        params.gridDimX = params.gridDimY = params.gridDimZ = 1
        params.blockDimX, params.blockDimY, params.blockDimZ = WARP, 1, 1
        params.sharedMemBytes = 0
        params.kernelParams = ctypes.addressof(pointers)
        return self._ask("cuGraphAddKernelNode", graph, after or None, len(after), params)

    def instantiate(self, graph: Any) -> Any:
        return self._ask("cuGraphInstantiate", graph, 0)

    def upload(self, executable: Any, stream: int) -> None:
        """Bring the graph to the device now, and not at its first launch."""
        self._ask("cuGraphUpload", executable, self._driver.CUstream(stream))

    def launcher(
        self, executable: Any, stream: Callable[[], int], context: Any
    ) -> Callable[[], None]:
        """A call that launches `executable` on the stream of `stream()`, at the least cost on the host.

        The driver looks for handle 0, torch's default stream, in the context that the thread has: a new
        thread has none until torch does something there, and a thread that works on another device has
        that one's, in whose default stream the graph would not wait for what its own device has to do.
        """
        launch, make_stream = self._driver.cuGraphLaunch, self._driver.CUstream
        current, success = self._driver.cuCtxGetCurrent, self._driver.CUresult.CUDA_SUCCESS
        own = int(context)
        last = stream()
        wrapped = make_stream(last)

        def call() -> None:
            nonlocal last, wrapped
            now = stream()
            if now != last:
                last, wrapped = now, make_stream(now)
            error, found = current()
            if error == success and int(found) == own:
                (error,) = launch(executable, wrapped)
            else:
                with self.inside(context):
                    (error,) = launch(executable, wrapped)
            if error != success:
                raise BackendError(f"cuGraphLaunch failed: {error}")

        return call

    def destroy_executable(self, executable: Any) -> None:
        self._ask("cuGraphExecDestroy", executable)

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            error, *results = getattr(self._driver, function)(*arguments)
        except RuntimeError as missing:  # a driver that is older than the bindings lacks the symbol
            raise BackendError(f"{function} cannot be called: {missing}") from missing
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"{function} failed: {error}")
        return results[0] if len(results) == 1 else results


class GraphLoop(Loop):
    """A graph of one WHILE node, whose body is a copy of `graph` and then the kernel that decides; in front
    of it, where `begin` is given, the kernel that starts.

    Args:
        driver: makes it.
        graph: raw handle of the body's graph: kernels, copies, memsets and child graphs only. Its memory
            has to outlive the loop.
        left, live, begin: see `Recording.repeated`; kept alive.
        stream: raw handle of the current stream, asked for at each launch.

    Raises:
        BackendError: names the call that failed. Nothing is left behind.
    """

    def __init__(
        self,
        driver: LoopDriver,
        graph: int,
        left: torch.Tensor,
        live: torch.Tensor,
        stream: Callable[[], int],
        begin: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self._kept = (left, live, begin)
        self._driver = driver
        self._stream = stream
        self._context: Any = None
        self._undo: list[tuple[Callable[[Any], None], Any]] = []
        try:
            # In place of the method below: one Python frame less a call.
            self.launch = self._made(graph, left, live, begin)  # type: ignore[method-assign]
        except BaseException:
            self.close()
            raise

    def _made(
        self,
        graph: int,
        left: torch.Tensor,
        live: torch.Tensor,
        begin: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> Callable[[], None]:
        driver = self._driver
        context = self._context = driver.context()
        outer = driver.create()
        self._undo.append((driver.destroy, outer))
        first = []
        if begin is not None:
            place, source = begin
            copied = (_pointer(place), _pointer(source), ctypes.c_uint32(source.numel()))
            first = [driver.add_kernel(outer, [], driver.kernel(context, BEGIN), copied)]
        handle, body = driver.add_while(outer, context, first)
        step = driver.add_child(body, graph)
        rows = ctypes.c_uint32(live.numel())
        decides = (ctypes.c_uint64(int(handle)), _pointer(left), _pointer(live), rows)
        driver.add_kernel(body, [step], driver.kernel(context, GO_ON), decides)
        executable = driver.instantiate(outer)
        self._undo.append((driver.destroy_executable, executable))
        driver.upload(executable, self._stream())
        return driver.launcher(executable, self._stream, context)

    def launch(self) -> None:
        raise StateError("this loop is closed and cannot be launched; capture again")

    def close(self) -> None:
        if "launch" in vars(self):
            del self.launch  # the method above answers from here on
        if not self._undo:
            return
        with self._driver.inside(self._context):
            while self._undo:
                give_back, what = self._undo.pop()
                give_back(what)


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
