"""Kernels of a decode step besides the experts', by backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module

from graphcap.decode.cache_format import CacheFormat
from graphcap.decode.kernels.hybrid import HybridKernels, hybrid_kernels
from graphcap.moe.kernels import Backend, ExpertKernels, expert_kernels
from graphcap.operations import KernelChoice, Operation, kernel_choices


@dataclass(frozen=True)
class FusedLayerKernels:
    """What the fused schedule runs of a layer besides its experts (see `fused_layer`); signatures as in
    `triton_fused_linear` and `triton_fused_attention`."""

    norm_qkv: Operation
    attend: Operation
    output_residual: Operation
    norm_router: Operation
    project: Operation
    gated_gemm: Operation


@dataclass(frozen=True)
class DecodeKernels:
    """The operations that `DecodeStep` is built from; signatures as in `reference`.

    Attributes:
        bound: (slot_mapping, seq_lens, slots, lengths, capacity): what cache write and attention are
            given instead of the slots, for kernels that do not skip padding or stop at the capacity
            by themselves; None: they do.
        cache_format: of the cache that cache write and attention work on.
        takes_views: norm, rotary and attention take views of a fused buffer; otherwise queries and
            keys are copied out of it.
        fused: for the fused schedule; None: the backend has none.
        notes: name of a field -> why it is not the backend's own kernel.
        hybrid: what hybrids need beyond these; None: the backend cannot run them.
    """

    experts: ExpertKernels
    embedding: Operation
    linear: Operation
    rms_norm: Operation
    fused_add_rms_norm: Operation
    rotary_embedding: Operation
    cache_write: Operation
    attention: Operation
    argmax: Operation
    advance: Operation
    bound: Operation | None = None
    cache_format: CacheFormat = CacheFormat()  # noqa: RUF009 - frozen
    takes_views: bool = True
    fused: FusedLayerKernels | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    hybrid: HybridKernels | None = None

    def choices(self) -> tuple[KernelChoice, ...]:
        """Which kernel each operation of the step runs on."""
        return (*kernel_choices(self, self.notes), *self.experts.choices())


def decode_kernels(backend: Backend) -> DecodeKernels:
    """The operations of `backend`.

    Raises:
        BackendError: ixformer cannot be imported, or is of no known generation.
    """
    if backend.name == "ixformer":
        from graphcap.decode.kernels.ixformer import bind
        from graphcap.moe.kernels.ixformer_library import load_library

        return bind(load_library(), decode_kernels(Backend(backend.stand_in, "stands in")))
    module = import_module(f"graphcap.decode.kernels.{backend.name}")
    fused = None
    if hasattr(module, "norm_qkv"):
        fused = FusedLayerKernels(
            module.norm_qkv,
            module.attend,
            module.output_residual,
            module.norm_router,
            module.project,
            module.gated_gemm,
        )
    return DecodeKernels(
        expert_kernels(backend),
        module.embedding,
        module.linear,
        module.rms_norm,
        module.fused_add_rms_norm,
        module.rotary_embedding,
        module.cache_write,
        module.attention,
        module.argmax,
        module.advance,
        fused=fused,
        hybrid=hybrid_kernels(backend.name),
    )
