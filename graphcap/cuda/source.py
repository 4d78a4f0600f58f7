"""CUDA C++ of this package: compiled at run time by NVRTC, which torch brings along, and launched through
the driver (``cuda-bindings``). No compiler has to be installed; nothing is built before it is used."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union

import torch

from graphcap.errors import BackendError

Argument = Union[torch.Tensor, float, None]  # noqa: UP007 - evaluated, also by Python 3.10
"""Of a kernel: a tensor's address, a float of 32 bits, or no address."""

Constants = tuple[tuple[str, str], ...]
"""Name -> value of what is compiled into a kernel."""

HERE = Path(__file__).parent

UNASKED_SHARED_MEMORY = 48 * 1024
"""Bytes of dynamic shared memory that a block of any kernel may have (CUDA C++ programming guide)."""

_NEWEST = ("cuLaunchKernelEx", "CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID")
"""What is used of the driver that came last, with CUDA 11.8."""

_PROBE: dict[str, int | str] = {
    **dict.fromkeys(("HALF", "NORM", "DELTA", "NORMED", "BIAS", "RESIDUAL", "FLOAT_OUT"), 0),
    **{"OUTPUTS": 1, "COLUMNS": 256, "ROWS": 1, "PDL": 1},
}
"""Constants of the smallest kernel."""

_CURE = "take a plan without kernels in CUDA C++, such as --schedule plain, and report this"

_LEAST_NVRTC = {"gate_up.cu": (12, 4)}
"""Source -> the NVRTC that it needs, of which `_PROBE` tells nothing: 12.4 brought ``__maxnreg__``."""

CAPABILITY = (9, 0)
"""The least compute capability: of bulk copies, and of programmatic dependent launch."""


def obstacle(device: torch.device) -> str:
    """Why no kernel of this package can be compiled for `device`; empty where they can."""
    if device.type != "cuda" or torch.version.cuda is None or "corex" in torch.__version__:
        return f"they need an NVIDIA device, found {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return "they need compute capability 9.0, found {}.{}".format(*capability)
    try:
        compiled(
            "linear.cu", as_constants(_PROBE), capability
        )  # an NVRTC may be older than the device
    except BackendError as error:
        return str(error.args[0])
    except Exception as error:  # bindings unlike those known: no reason to lose the step
        return f"NVRTC cannot be used through these cuda-bindings: {type(error).__name__}: {error}"
    return ""


def too_old_for(source: str) -> str:
    """Why NVRTC compiles nothing of `source` though `obstacle` found none; empty where it can."""
    needed = _LEAST_NVRTC.get(source, (0, 0))
    try:
        _, nvrtc = libraries()
    except BackendError:  # `obstacle` tells of that
        return ""
    found = tuple(nvrtc.nvrtcVersion()[1:])
    if found < needed:
        return "it needs NVRTC {}.{}, found {}.{}".format(*needed, *found)
    return ""


@cache
def libraries() -> tuple[Any, Any]:
    """(driver, nvrtc) of cuda-bindings.

    Raises:
        BackendError: one of them cannot be loaded; says how to install them.
    """
    try:
        from cuda.bindings import driver, nvrtc

        asked(nvrtc.nvrtcVersion(), "nvrtcVersion")  # the first call loads the library itself
        for name in _NEWEST:  # old bindings lack them: told here, and not by the first launch
            getattr(driver, name)
    except Exception as error:  # cuda-bindings raises whatever its search for the library raises
        raise BackendError(
            f"kernels in CUDA C++ need cuda-bindings and NVRTC, which cannot be loaded "
            f"({' '.join(str(error).split())}); install them with: pip install 'vllm-graphcap[cuda]'"
        ) from error
    return driver, nvrtc


class _ThreadState(threading.local):
    held = False


_state = _ThreadState()


@contextmanager
def not_launched() -> Iterator[None]:
    """Inside, this thread compiles and loads kernels of this package, and launches none: for whoever wants
    them ready and has no weights that they could read."""
    before, _state.held = _state.held, True
    try:
        yield
    finally:
        _state.held = before


@dataclass(frozen=True)
class CudaKernel:
    """A function of a source, compiled and loaded on one device.

    Attributes:
        function: the driver's handle.
        grid, threads: blocks, and threads of a block.
        shared: bytes of dynamic shared memory of a block.
        pdl: whether it may start while the kernel before is finishing (programmatic dependent launch).
    """

    name: str
    function: Any
    grid: int
    threads: int
    shared: int = 0
    pdl: bool = True

    def launch(self, device: torch.device, *arguments: Argument) -> None:
        """Launch on the current stream of `device`, unless `not_launched`. All memory is the caller's.

        Raises:
            BackendError: the driver refuses.
        """
        if _state.held:
            return
        driver, _ = libraries()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared
        config.hStream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
        if self.pdl:
            early = driver.CUlaunchAttribute()
            ids = driver.CUlaunchAttributeID
            early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [early], 1
        values, types = zip(*map(_passed, arguments), strict=True)
        answer = driver.cuLaunchKernelEx(config, self.function, (values, types), 0)
        if answer[0] == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            with _context(driver, device):  # this thread has not used the device yet
                answer = driver.cuLaunchKernelEx(config, self.function, (values, types), 0)
        asked(answer, self.name)


def _passed(argument: Argument) -> tuple[float, Any]:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr(), ctypes.c_void_p
    if argument is None:
        return 0, ctypes.c_void_p
    return argument, ctypes.c_float


@cache
def function(
    source: str, name: str, constants: Constants, device: torch.device, shared: int
) -> Any:
    """The function `name` of `source`, a file beside this one, with `constants`; compiled and loaded on
    `device` once, and never unloaded, since graphs hold it.

    Args:
        shared: bytes of dynamic shared memory that a block may have. Multiprocessors that run the
            function give all they can to shared memory: kernels that want different shares cannot be on
            one at a time, and one of these would have to wait for the other.

    Raises:
        BackendError: it cannot be compiled or loaded; says why, and nothing of it stays loaded.
    """
    driver, _ = libraries()
    code = compiled(source, constants, torch.cuda.get_device_capability(device))
    with _context(driver, device):
        module = asked(driver.cuModuleLoadData(code), source)
        try:
            found = asked(driver.cuModuleGetFunction(module, name.encode()), name)
            attributes = driver.CUfunction_attribute
            share = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            asked(driver.cuFuncSetAttribute(found, share, 100), name)
            if shared > UNASKED_SHARED_MEMORY:
                most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                asked(driver.cuFuncSetAttribute(found, most, shared), name)
        except BackendError:
            driver.cuModuleUnload(module)
            raise
    return found


@contextmanager
def _context(driver: Any, device: torch.device) -> Iterator[None]:
    """The context that torch uses on `device` is this thread's: a new thread has none before a call of the
    runtime's, and nothing of torch's that can be asked during a capture is sure to make one."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    of_driver = asked(driver.cuDeviceGet(index), "cuDeviceGet")
    context = asked(driver.cuDevicePrimaryCtxRetain(of_driver), "cuDevicePrimaryCtxRetain")
    try:
        asked(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            driver.cuCtxPopCurrent()
    finally:
        driver.cuDevicePrimaryCtxRelease(of_driver)


@cache
def compiled(source: str, constants: Constants, capability: tuple[int, int]) -> bytes:
    """Machine code of `source`. Needs no device."""
    _, nvrtc = libraries()
    text = (HERE / source).read_bytes()
    program = asked(nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], []), source)
    try:
        options = ["--gpu-architecture=sm_{}{}".format(*capability), f"--include-path={HERE}"]
        options += [f"--define-macro={name}={value}" for name, value in constants]
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status.value:
            log = b" " * asked(nvrtc.nvrtcGetProgramLogSize(program), source)
            asked(nvrtc.nvrtcGetProgramLog(program, log), source)
            raise BackendError(
                f"{source}: expected NVRTC to compile it, found {status.name}: "
                f"{log.decode(errors='replace').strip()}; {_CURE}"
            )
        code = b" " * asked(nvrtc.nvrtcGetCUBINSize(program), source)
        asked(nvrtc.nvrtcGetCUBIN(program, code), source)
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def as_constants(values: Mapping[str, int | str]) -> Constants:
    """Switches as 1 and 0."""
    return tuple(
        (name, value if isinstance(value, str) else str(int(value)))
        for name, value in values.items()
    )


def asked(answer: tuple[Any, ...], what: str) -> Any:
    """The result of a call of cuda-bindings, whose first value is its status.

    Raises:
        BackendError: the status is a failure.
    """
    status, *result = answer
    if status.value:
        raise BackendError(f"{what}: expected the driver to take it, found {status.name}; {_CURE}")
    return result[0] if result else None
