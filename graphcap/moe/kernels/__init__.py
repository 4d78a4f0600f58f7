"""Kernel backends of the routed experts, and which one a step is built with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature

import torch

from graphcap.errors import BackendError
from graphcap.explain import warn
from graphcap.operations import KernelChoice, Operation, kernel_choices

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PairKernels:
    """What takes the (token, expert) pairs of few tokens one by one; signatures as in `triton_pairs`.

    After `router_gemm` the two are the whole layer.
    """

    gate_up: Operation
    down: Operation


@dataclass(frozen=True)
class FusedGemm:
    """A grouped GEMM of vLLM's fused-MoE interface: it is given the routing itself as well.

    Attributes:
        gemm: (a, weight, out (M, K, N), weights, ids, sorted_ids, expert_ids, padded_count,
            multiplies, pairs_per_row, block): out[pair] = a[pair // pairs_per_row] @
            weight[expert].T, times the pair's weight where it `multiplies`. Writes the rows of all
            M*K pairs: none may be dropped.
        weighs: the second product multiplies by the top-k weights, and `merge` only adds.
    """

    gemm: Operation
    weighs: bool


@dataclass(frozen=True)
class ExpertKernels:
    """The operations that `RoutedExperts` is built from; signatures as in `reference`.

    A backend without `pairs` groups the pairs by expert whatever the number of tokens. With `fused`
    that one takes the place of `expert_gemm`, `align` is given the buffers of its interface (see
    `RoutedExperts`), `topk_softmax` gives padding rows experts that exist, with weight 0, and `merge`
    takes a residual (M, H) or None as its last argument.

    Attributes:
        notes: name of a field -> why it is not the backend's own kernel.
        gated_gemm: `expert_gemm` and `silu_and_mul` in one, where a plan wants it.
        block: rows of a block of `align`; None: `block_size_m`.
    """

    name: str
    router_gemm: Operation
    topk_softmax: Operation
    align: Operation
    expert_gemm: Operation
    silu_and_mul: Operation
    merge: Operation
    pairs: PairKernels | None = None
    fused: FusedGemm | None = None
    gated_gemm: Operation | None = None
    block: int | None = None
    notes: Mapping[str, str] = field(default_factory=dict)

    def choices(self) -> tuple[KernelChoice, ...]:
        """Which kernel each operation runs on."""
        rows = kernel_choices(self, self.notes)
        if self.pairs is not None:
            rows += kernel_choices(self.pairs, {})
        return rows


@dataclass(frozen=True)
class Backend:
    """A chosen kernel backend, and why it was chosen.

    Attributes:
        stand_in: the backend of the operations that this one lacks; only ixformer lacks any.
    """

    name: str
    why: str
    stand_in: str = "reference"


@cache
def _triton_version() -> str | None:
    """Triton's version; None where it is missing, too old or its import fails. The last two are logged."""
    if find_spec("triton") is None:
        return None
    try:
        found = str(import_module("triton").__version__)
        dot = import_module("triton.language").dot
    except Exception as error:
        warn(logger, "triton", "Triton is installed but cannot be imported: %s", error)
        return None
    if "input_precision" not in signature(dot).parameters:
        warn(
            logger,
            "triton",
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
    if wanted == "vllm":
        raise BackendError(
            f"GRAPHCAP_KERNELS={wanted}: this version of graphcap has no {wanted} kernels for its own "
            f"decode step; use auto, triton or reference"
        )
    version = _triton_version()
    if wanted == "ixformer":
        from graphcap.moe.kernels.ixformer_library import load_library

        if device.type != "cuda":
            raise BackendError(
                f"GRAPHCAP_KERNELS=ixformer: ixformer's operations run on a CoreX card, found device "
                f"{device}; use auto or reference"
            )
        return Backend("ixformer", f"asked for ({load_library().title})", _stand_in())
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
    if has_ixformer():
        from graphcap.moe.kernels.ixformer_library import load_library

        try:
            return Backend("ixformer", f"{load_library().title} is there", _stand_in())
        except BackendError as error:
            warn(logger, "ixformer", "ixformer is not used: %s", error)
    if version is None:
        warn(
            logger,
            "triton",
            "Triton is missing, broken or older than 3.0, so %s runs the reference kernels, which are "
            "made to be right, not fast; pip install triton",
            device,
        )
        return Backend("reference", "Triton is missing, broken or older than 3.0")
    return Backend("triton", f"Triton {version} is there and the device is CUDA")


def _stand_in() -> str:
    """The backend of what ixformer lacks: Triton where graphcap's kernels can be imported with it."""
    if _triton_version() is None:
        return "reference"
    try:
        import_module("graphcap.decode.kernels.triton")
    except Exception as error:  # an old Triton, as CoreX images have
        warn(
            logger,
            "triton",
            "graphcap's Triton kernels cannot be imported with this Triton (%s); what ixformer lacks "
            "runs on the reference kernels, which are made to be right, not fast",
            error,
        )
        return "reference"
    return "triton"


def has_ixformer() -> bool:
    """Whether this Python has an ixformer, or a torch built for the cards that come with one."""
    return find_spec("ixformer") is not None or "corex" in torch.__version__


def expert_kernels(backend: Backend) -> ExpertKernels:
    """The operations of `backend`.

    Raises:
        BackendError: ixformer cannot be imported, or is of no known generation.
    """
    if backend.name == "ixformer":
        from graphcap.moe.kernels.ixformer import bind
        from graphcap.moe.kernels.ixformer_library import load_library

        return bind(load_library(), expert_kernels(Backend(backend.stand_in, "stands in")))
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
