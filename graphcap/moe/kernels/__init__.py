"""Kernel backends of the routed experts, and which one a step is built with."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature

import torch

from graphcap.errors import BackendError
from graphcap.operations import Operation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PairKernels:
    """What takes the (token, expert) pairs of few tokens one by one; signatures as in `triton_pairs`.

    After `router_gemm` the two are the whole layer.
    """

    gate_up: Operation
    down: Operation


@dataclass(frozen=True)
class ExpertKernels:
    """The operations that `RoutedExperts` is built from; signatures as in `reference`.

    A backend without `pairs` groups the pairs by expert whatever the number of tokens.
    """

    name: str
    router_gemm: Operation
    topk_softmax: Operation
    align: Operation
    expert_gemm: Operation
    silu_and_mul: Operation
    merge: Operation
    pairs: PairKernels | None = None


@dataclass(frozen=True)
class Backend:
    """A chosen kernel backend, and why it was chosen."""

    name: str
    why: str


@cache
def _triton_version() -> str | None:
    """Triton's version; None where it is missing, too old or its import fails. The last two are logged."""
    if find_spec("triton") is None:
        return None
    try:
        found = str(import_module("triton").__version__)
        dot = import_module("triton.language").dot
    except Exception as error:
        logger.warning("Triton is installed but cannot be imported: %s", error)
        return None
    if "input_precision" not in signature(dot).parameters:
        logger.warning(
            "Triton %s is too old for graphcap's kernels: its tl.dot has no input_precision, expected "
            "Triton 3.0 or newer",
            found,
        )
        return None
    return found


def has_triton() -> bool:
    """Whether graphcap's Triton kernels can be imported here."""
    return _triton_version() is not None


def choose_backend(wanted: str, device: torch.device) -> Backend:
    """The backend for ``GRAPHCAP_KERNELS=wanted`` on `device`. Asked once, when a step is built.

    Raises:
        BackendError: the backend cannot run here; says what is missing and what can be used.
    """
    if wanted in ("vllm", "ixformer"):
        raise BackendError(
            f"GRAPHCAP_KERNELS={wanted}: this version of graphcap has no {wanted} kernels for its own "
            f"decode step; use auto, triton or reference"
        )
    version = _triton_version()
    if wanted == "reference":
        return Backend("reference", "asked for")
    if wanted == "triton":
        if version is None:
            raise BackendError(
                "GRAPHCAP_KERNELS=triton: Triton is missing, broken or older than 3.0; "
                "pip install triton, or use auto or reference"
            )
        if device.type == "cpu" and not _interpreting():
            raise BackendError(
                "GRAPHCAP_KERNELS=triton: Triton kernels do not run on a CPU (but for "
                "TRITON_INTERPRET=1, which is for tests); use auto or reference"
            )
        return Backend("triton", f"asked for (Triton {version})")
    if device.type != "cuda":
        return Backend("reference", f"the device is {device.type}, which Triton does not serve")
    if version is None:
        logger.warning(
            "Triton is missing, broken or older than 3.0, so %s runs the reference kernels, which are "
            "made to be right, not fast; pip install triton",
            device,
        )
        return Backend("reference", "Triton is missing, broken or older than 3.0")
    return Backend("triton", f"Triton {version} is there and the device is CUDA")


def expert_kernels(backend: Backend) -> ExpertKernels:
    module = import_module(f"graphcap.moe.kernels.{backend.name}")
    pairs = None
    if hasattr(module, "pair_gate_up"):
        pairs = PairKernels(module.pair_gate_up, module.pair_down)
    return ExpertKernels(
        backend.name,
        module.router_gemm,
        module.topk_softmax,
        module.align,
        module.expert_gemm,
        module.silu_and_mul,
        module.merge,
        pairs,
    )


def _interpreting() -> bool:
    import os

    return os.environ.get("TRITON_INTERPRET") == "1"
