"""vLLM's kernels as operations of the kernel layer, so that a tape sees each call.

vLLM 0.6.3 calls its kernels through Python functions that write into their arguments. Behind them are
operators of torch's dispatcher on NVIDIA cards, and functions of ``ixformer`` on Iluvatar's, which a
tape would not see. A call of such a function is one operation, whatever is behind it; its own Triton
kernel for experts, which a tape refuses as a bare launch, likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from graphcap.hosts.vllm.patching import wrap
from graphcap.operations import Operation, current_observer

WRITE_INTO_ARGUMENTS = (
    "batched_rotary_embedding",
    "fused_add_rms_norm",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "moe_align_block_size",
    "paged_attention_rocm",
    "paged_attention_v1",
    "paged_attention_v2",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
)
"""Functions of ``vllm._custom_ops`` that return nothing and that a decode step may call; for
``topk_softmax`` see `experts`."""

FUSED_MOE = "vllm.model_executor.layers.fused_moe.fused_moe"
"""A module; its package has a function of the same name, which hides it from ``from … import``."""


def as_operation(name: str, where: str) -> Callable[..., Any]:
    """For `wrap`: a call of the function is one operation where somebody watches the step."""
    operations: dict[Any, Operation] = {}

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Why: the tape writes down operations, and this is where vLLM's begin."""
        if current_observer() is None:
            return original(*args, **kwargs)
        if original not in operations:
            operations[original] = Operation(name, f"{where}.{name}", original)
        operations[original](*args, **kwargs)
        return None

    return around


def install() -> None:
    """Wrap the functions, those of them that this build has. Idempotent."""
    from vllm import _custom_ops

    for name in WRITE_INTO_ARGUMENTS:
        if callable(getattr(_custom_ops, name, None)):
            wrap(_custom_ops, name, as_operation(name, "vllm._custom_ops"))


def install_experts() -> None:
    """The same for the Triton kernel of vLLM's own experts."""
    name = "invoke_fused_moe_kernel"
    wrap(import_module(FUSED_MOE), name, as_operation(name, "vllm triton"))
