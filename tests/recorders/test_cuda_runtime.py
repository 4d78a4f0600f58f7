"""The CUDA runtime's own capture calls, against a pretended libcudart."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from graphcap.recorders.cuda_runtime import CudaRuntime


class Library:
    """A libcudart: begins captures unless told otherwise, and counts what is open."""

    def __init__(self, begin: int = 0, end: int = 0) -> None:
        self.codes = {"begin": begin, "end": end}
        self.capturing: set[int] = set()
        self.graphs: set[int] = set()
        self.last = 0
        for name in (
            "cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphDestroy",
            "cudaGetLastError", "cudaGetErrorName", "cudaGetErrorString",
        ):  # fmt: skip
            # Functions, unlike bound methods, take the attributes that ctypes' functions have.
            setattr(self, name, self._function(getattr(self, f"_{name}")))

    @staticmethod
    def _function(method: Any) -> Any:
        return lambda *arguments: method(*arguments)

    def _cudaStreamBeginCapture(self, stream: int, mode: int) -> int:
        assert (stream, mode) == (77, 1)
        self.last = self.codes["begin"]
        if not self.last:
            self.capturing.add(stream)
        return self.last

    def _cudaStreamEndCapture(self, stream: int, graph: Any) -> int:
        self.capturing.remove(stream)
        self.last = self.codes["end"]
        if not self.last:
            graph._obj.value = 5
            self.graphs.add(5)
        return self.last

    def _cudaGraphDestroy(self, graph: ctypes.c_void_p) -> int:
        assert graph.value is not None
        self.graphs.remove(graph.value)
        return 0

    def _cudaGetLastError(self) -> int:
        last, self.last = self.last, 0
        return last

    def _cudaGetErrorName(self, code: int) -> bytes:
        return b"ixErrorNotSupported"

    def _cudaGetErrorString(self, code: int) -> bytes | None:
        return b"operation not supported" if code == 801 else None


def test_the_runtime_begins_and_ends_a_capture_and_keeps_nothing():
    library = Library()
    CudaRuntime(library).try_capture(77)
    assert (library.capturing, library.graphs, library.last) == (set(), set(), 0)


@pytest.mark.parametrize(
    ("codes", "text"),
    [
        ({"begin": 801}, r"BeginCapture: ixErrorNotSupported \(801\): operation not supported"),
        ({"end": 901}, r"cudaStreamEndCapture: ixErrorNotSupported \(901\)"),
    ],
)
def test_what_the_runtime_refuses_is_named_and_not_found_by_torch_later(
    codes: dict[str, int], text: str
):
    library = Library(**codes)
    with pytest.raises(RuntimeError, match=text):
        CudaRuntime(library).try_capture(77)
    assert (library.capturing, library.graphs, library.last) == (set(), set(), 0)


def test_a_runtime_that_lacks_a_call_is_none():
    with pytest.raises(AttributeError, match="cudaStreamBeginCapture"):
        CudaRuntime(object())


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA runtime")
def test_a_process_without_cuda_has_no_runtime():
    assert CudaRuntime.loaded() is None


@pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(),
    reason="needs a torch with a CUDA runtime and a machine without a device",
)
def test_a_real_runtime_without_a_device_gives_its_own_error():
    runtime = CudaRuntime.loaded()
    assert runtime is not None
    with pytest.raises(RuntimeError, match=r"BeginCapture: cudaError\w+ \(\d+\): \w+"):
        runtime.try_capture(0)
