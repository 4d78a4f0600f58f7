"""Kernels of a decode step besides the experts', by backend."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from graphcap.moe.kernels import Backend, ExpertKernels, expert_kernels
from graphcap.operations import Operation


@dataclass(frozen=True)
class DecodeKernels:
    """The operations that `DecodeStep` is built from; signatures as in `reference`."""

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


def decode_kernels(backend: Backend) -> DecodeKernels:
    module = import_module(f"graphcap.decode.kernels.{backend.name}")
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
    )
