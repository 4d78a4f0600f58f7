"""The CUDA runtime that torch has loaded, asked directly whether it starts a capture.

torch cannot ask without a cost: before its `capture_begin` asks the driver, it tells its random
generator to expect a capture, and where the driver then refuses, torch before 2.3 has no way to take
that back; every later random number on the device would raise. The runtime has no such memory.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

_THREAD_LOCAL = 1
"""cudaStreamCaptureModeThreadLocal: what other threads do does not break this capture."""


class CudaRuntime:
    """The few calls that begin and end an empty capture. Their signatures hold since CUDA 10.1.

    Args:
        library: a loaded libcudart, or what answers as it does.

    Raises:
        AttributeError: `library` lacks one of the calls.
    """

    def __init__(self, library: Any) -> None:
        self._begin = _function(library.cudaStreamBeginCapture, ctypes.c_void_p, ctypes.c_int)
        self._end = _function(library.cudaStreamEndCapture, ctypes.c_void_p, ctypes.c_void_p)
        self._destroy = _function(library.cudaGraphDestroy, ctypes.c_void_p)
        self._last_error = _function(library.cudaGetLastError)
        self._name = _function(library.cudaGetErrorName, ctypes.c_int, result=ctypes.c_char_p)
        self._text = _function(library.cudaGetErrorString, ctypes.c_int, result=ctypes.c_char_p)

    @classmethod
    def loaded(cls) -> CudaRuntime | None:
        """The one in this process; None where it is linked statically, is not one, or is several."""
        try:
            lines = Path("/proc/self/maps").read_text().splitlines()
            paths = {line.split(maxsplit=5)[5] for line in lines if "/libcudart" in line}
            if len(paths) != 1:
                return None
            return cls(ctypes.CDLL(paths.pop(), mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW))
        except (OSError, AttributeError, IndexError):
            return None

    def try_capture(self, stream: int) -> None:
        """Begin and end a capture of nothing on `stream`, which is not the default stream.

        Raises:
            RuntimeError: the runtime's name and text of the error. The stream is not capturing.
        """
        self._check(self._begin(stream, _THREAD_LOCAL), "cudaStreamBeginCapture")
        graph = ctypes.c_void_p()
        self._check(self._end(stream, ctypes.byref(graph)), "cudaStreamEndCapture")
        if graph.value:
            self._check(self._destroy(graph), "cudaGraphDestroy")

    def _check(self, code: int, call: str) -> None:
        if code == 0:
            return
        self._last_error()  # or torch finds the error at its next call
        name, text = (ask(code) or b"" for ask in (self._name, self._text))
        raise RuntimeError(f"{call}: {name.decode()} ({code}): {text.decode()}")


def _function(function: Any, *arguments: Any, result: Any = ctypes.c_int) -> Any:
    function.argtypes, function.restype = arguments, result
    return function
