"""Kernels of what hybrids have beyond other models: gated delta nets, gated attention, shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from graphcap.operations import KernelChoice, Operation, kernel_choices


@dataclass(frozen=True)
class HybridKernels:
    """The operations, with signatures as in `reference_hybrid`.

    A row with a negative row id is padding: it changes no state, and what convolution and delta rule give
    it is zero. A row at position 0 starts from a state of zeros.
    """

    rms_norm: Operation
    fused_add_rms_norm: Operation
    conv_update: Operation
    delta_rule: Operation
    gated_rms_norm: Operation
    output_gate: Operation
    shared_gate: Operation

    def choices(self) -> tuple[KernelChoice, ...]:
        """Which kernel each operation runs on."""
        return kernel_choices(self, {})


def hybrid_kernels(backend: str) -> HybridKernels:
    """The operations of backend ``reference`` or ``triton``."""
    module = import_module(f"graphcap.decode.kernels.{backend}_hybrid")
    return HybridKernels(
        module.rms_norm,
        module.fused_add_rms_norm,
        module.conv_update,
        module.delta_rule,
        module.gated_rms_norm,
        module.output_gate,
        module.shared_gate,
    )
