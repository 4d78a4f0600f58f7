"""Looks into a CUDA graph, also while it is being captured, through the driver (``cuda-bindings``).

The driver permits every query of a graph under capture (cuStreamGetCaptureInfo: "all operations
other than destroy and node removal are permitted on the graph while the capture is in progress").
"""

from __future__ import annotations

from typing import Any

from graphcap.census import GraphNode
from graphcap.errors import BackendError


class GraphReader:
    """Reads the graph that a stream is capturing into.

    Raises:
        BackendError: ``cuda-bindings`` cannot be imported; says how to install it.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise BackendError(
                f"the census of a CUDA graph needs cuda-bindings, which cannot be imported ({error}); "
                f"install it with: pip install 'vllm-graphcap[cuda]'"
            ) from error
        self.driver: Any = driver
        self._kind_names = {
            value: name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
            for name, value in driver.CUgraphNodeType.__members__.items()
        }

    def graph_under_capture(self, stream: int) -> Any:
        """The graph that `stream` (a raw handle) is capturing into."""
        # (status, id, graph, …): what follows the graph differs between CUDA versions.
        status, _, graph, *_ = self._ask("cuStreamGetCaptureInfo", self.driver.CUstream(stream))
        active = self.driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        if status != active:
            raise BackendError(f"the stream is not capturing: {status}")
        return graph

    def is_invalidated(self, stream: int) -> bool | None:
        """Whether the driver has given up what `stream` is capturing; None: it is not capturing."""
        status = self._ask("cuStreamIsCapturing", self.driver.CUstream(stream))
        known = self.driver.CUstreamCaptureStatus
        if status == known.CU_STREAM_CAPTURE_STATUS_NONE:
            return None
        return bool(status == known.CU_STREAM_CAPTURE_STATUS_INVALIDATED)

    def count(self, graph: Any) -> int:
        _, number = self._ask("cuGraphGetNodes", graph, 0)
        return int(number)

    def nodes(self, graph: Any) -> list[GraphNode]:
        """Every node, child graphs' nodes included, in the order in which they were created."""
        number = self.count(graph)
        if number == 0:
            return []
        handles, _ = self._ask("cuGraphGetNodes", graph, number)
        found: list[GraphNode] = []
        for handle in handles:
            kind = self._ask("cuGraphNodeGetType", handle)
            name = self._kind_names.get(kind, str(kind))
            if name == "kernel":
                found.append(self._kernel(handle))
            elif name == "graph":
                found.extend(self.nodes(self._ask("cuGraphChildGraphNodeGetGraph", handle)))
            else:
                found.append(GraphNode(name))
        return found

    def _kernel(self, handle: Any) -> GraphNode:
        params = self._ask("cuGraphKernelNodeGetParams", handle)
        # A node holds either a CUfunction or, for kernels loaded as a library, a CUkernel.
        if int(params.func):
            name = self._ask("cuFuncGetName", params.func)
        else:
            name = self._ask("cuKernelGetName", params.kern)
        return GraphNode(
            "kernel",
            name.decode() if isinstance(name, bytes) else str(name),
            (params.gridDimX, params.gridDimY, params.gridDimZ),
            (params.blockDimX, params.blockDimY, params.blockDimZ),
        )

    def _ask(self, function: str, *arguments: Any) -> Any:
        error, *results = getattr(self.driver, function)(*arguments)
        if error != self.driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"{function} failed: {error}")
        return results[0] if len(results) == 1 else results
