"""GraphLoop: a CUDA graph that the device runs again and again by itself, as the body of a WHILE node.

A conditional node (CUDA 12.4, driver 550) runs its body graph as long as a value is not 0 that only a
kernel in the body can set, by the device function ``cudaGraphSetConditional``. The kernel here is
written in PTX: the driver compiles it and knows that function, so neither a compiler nor a library is
needed. Sources: CUDA Programming Guide, "Conditional Graph Nodes"; driver API, cuGraphAddNode,
cuGraphConditionalHandleCreate.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from graphcap.errors import BackendError, StateError
from graphcap.recorders.base import Loop

KERNEL = "graphcap_go_on"

PTX = f"""
.version 6.4
.target sm_70
.address_size 64

.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);

// One warp. left -= 1; the loop goes on while left > 0 and any of live[0 .. rows) is set.
.visible .entry {KERNEL} (
    .param .u64 handle, .param .u64 left, .param .u64 live, .param .u32 rows
)
{{
    .reg .pred  %p<5>;
    .reg .b32   %r<8>;
    .reg .b64   %d<6>;

    ld.param.u64    %d1, [handle];
    ld.param.u64    %d2, [left];
    ld.param.u64    %d3, [live];
    ld.param.u32    %r1, [rows];
    cvta.to.global.u64  %d2, %d2;
    cvta.to.global.u64  %d3, %d3;

    mov.u32         %r2, %tid.x;
    mov.u32         %r3, 0;
    mov.u32         %r4, %r2;
NEXT:
    setp.ge.u32     %p1, %r4, %r1;
    @%p1 bra        SEEN;
    cvt.u64.u32     %d4, %r4;
    add.u64         %d5, %d3, %d4;
    ld.global.u8    %r5, [%d5];
    or.b32          %r3, %r3, %r5;
    add.u32         %r4, %r4, 32;
    bra             NEXT;
SEEN:
    setp.ne.u32     %p2, %r3, 0;
    vote.sync.any.pred  %p3, %p2, 0xffffffff;
    setp.ne.u32     %p4, %r2, 0;
    @%p4 bra        DONE;
    ld.global.u32   %r6, [%d2];
    sub.u32         %r6, %r6, 1;
    st.global.u32   [%d2], %r6;
    setp.gt.and.s32 %p3, %r6, 0, %p3;
    selp.u32        %r7, 1, 0, %p3;
    {{
    .param .b64 to;
    .param .b32 value;
    st.param.b64    [to], %d1;
    st.param.b32    [value], %r7;
    call.uni        cudaGraphSetConditional, (to, value);
    }}
DONE:
    ret;
}}
"""

_WARP = 32


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

    def kernel(self, context: Any) -> Any:
        """The kernel that decides, compiled by the driver once per context. It stays loaded: a graph that
        still runs may need it."""
        key = int(context)
        if key not in self._modules:
            self._modules[key] = self._ask("cuModuleLoadData", PTX.encode() + b"\0")
        return self._ask("cuModuleGetFunction", self._modules[key], KERNEL.encode())

    def create(self) -> Any:
        """An empty graph."""
        return self._ask("cuGraphCreate", 0)

    def destroy(self, graph: Any) -> None:
        self._ask("cuGraphDestroy", graph)

    def add_while(self, graph: Any, context: Any) -> tuple[Any, Any]:
        """A WHILE node, whose value is 1 at each launch: its handle and its empty body graph."""
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
        self._ask(self._add_node, graph, None, None, 0, params)
        # A copy of the handle: the array belongs to the node's parameters.
        return handle, driver.CUgraph(int(params.conditional.phGraph_out[0]))

    def add_child(self, graph: Any, child: int) -> Any:
        """A node that runs a copy of the graph `child`."""
        return self._ask("cuGraphAddChildGraphNode", graph, None, 0, self._driver.CUgraph(child))

    def add_kernel(
        self, graph: Any, after: Any, function: Any, threads: int, arguments: tuple[Any, ...]
    ) -> None:
        """A node of one block behind the node `after`. `arguments` are ctypes values; they are copied."""
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        params = self._driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = function
        params.gridDimX = params.gridDimY = params.gridDimZ = 1
        params.blockDimX, params.blockDimY, params.blockDimZ = threads, 1, 1
        params.sharedMemBytes = 0
        params.kernelParams = ctypes.addressof(pointers)
        self._ask("cuGraphAddKernelNode", graph, [after], 1, params)

    def instantiate(self, graph: Any) -> Any:
        return self._ask("cuGraphInstantiate", graph, 0)

    def upload(self, executable: Any, stream: int) -> None:
        """Bring the graph to the device now, and not at its first launch."""
        self._ask("cuGraphUpload", executable, self._driver.CUstream(stream))

    def launcher(self, executable: Any) -> Callable[[int], None]:
        """A call that launches `executable` on a raw stream, at the least cost on the host."""
        launch, make_stream = self._driver.cuGraphLaunch, self._driver.CUstream
        success = self._driver.CUresult.CUDA_SUCCESS

        def call(stream: int) -> None:
            (error,) = launch(executable, make_stream(stream))
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
    """A graph of one WHILE node, whose body is a copy of `graph` and then the kernel that decides.

    Args:
        driver: makes it.
        graph: raw handle of the body's graph: kernels, copies, memsets and child graphs only. Its memory
            has to outlive the loop.
        left, live: see `Recording.repeated`; kept alive.
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
    ) -> None:
        self._kept = (left, live)
        self._driver = driver
        self._stream = stream
        self._undo: list[tuple[Callable[[Any], None], Any]] = []
        try:
            self._launch = self._made(graph, left, live)
        except BackendError:
            self.close()
            raise

    def _made(self, graph: int, left: torch.Tensor, live: torch.Tensor) -> Callable[[int], None]:
        driver = self._driver
        context = driver.context()
        kernel = driver.kernel(context)
        outer = driver.create()
        self._undo.append((driver.destroy, outer))
        handle, body = driver.add_while(outer, context)
        step = driver.add_child(body, graph)
        driver.add_kernel(
            body,
            step,
            kernel,
            _WARP,
            (
                ctypes.c_uint64(int(handle)),
                ctypes.c_void_p(left.data_ptr()),
                ctypes.c_void_p(live.data_ptr()),
                ctypes.c_uint32(live.numel()),
            ),
        )
        executable = driver.instantiate(outer)
        self._undo.append((driver.destroy_executable, executable))
        driver.upload(executable, self._stream())
        return driver.launcher(executable)

    def launch(self) -> None:
        if not self._undo:
            raise StateError("this loop is closed and cannot be launched; capture again")
        self._launch(self._stream())

    def close(self) -> None:
        while self._undo:
            give_back, what = self._undo.pop()
            give_back(what)
