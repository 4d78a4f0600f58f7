"""RMS norms of an uncompiled engine on a CPU by vLLM's own C kernels.

vLLM has them, but its CPU platform offers them to no model: it counts on torch.compile to fuse the
eight to eleven small operations of a norm. Without the compiler those are half of what a decode step
costs on the host. They are offered here under a provider of graphcap's, through vLLM's own registration;
which provider a model takes is `kernel_config.ir_op_priority`, the user's to set.

Like the compiler's code, and unlike the small operations, they round once.
"""

from __future__ import annotations

from typing import Any

import torch

PROVIDER = "graphcap_cpu"
OPERATIONS = ("rms_norm", "fused_add_rms_norm")
CHOSEN = "RMS norms by vLLM's C kernels"

_VECTOR = 16
"""Elements that the kernels take at once, on the widest CPU; a row must be a multiple."""


def register() -> str:
    """Register the provider. Idempotent. Returns what was done, for ``graphcap doctor``."""
    try:
        return _register()
    except Exception as error:  # another vLLM: its own norms work as well
        return f"RMS norms stay vLLM's choice: {type(error).__name__}: {error}"


def _register() -> str:
    from vllm import ir
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    missing = [name for name in OPERATIONS if not hasattr(torch.ops._C, name)]
    if missing:
        return f"RMS norms stay vLLM's choice: this build has no {', '.join(missing)}"
    if PROVIDER not in ir.ops.rms_norm.impls:
        ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_takes)(_rms_norm)
        fused = ir.ops.fused_add_rms_norm.register_impl(
            PROVIDER, supports_args=_takes_sum, inplace=True
        )
        fused(_fused_add_rms_norm)
    return "RMS norms registered"


def undecided(config: Any) -> tuple[str, ...]:
    """The operations for which a `VllmConfig` leaves the provider open and there is one here."""
    priority = _priority(config)
    return tuple(
        n for n in OPERATIONS if not getattr(priority, n, "no such field") and _is_registered(n)
    )


def user_set(config: Any) -> tuple[str, ...]:
    """What the user chose for the others, in vLLM's words."""
    priority = _priority(config)
    chosen = {name: getattr(priority, name, None) for name in OPERATIONS}
    return tuple(f"ir_op_priority.{n}={','.join(p)}" for n, p in chosen.items() if p)


def choose(config: Any) -> None:
    """Put the provider first for the undecided operations; vLLM appends its own."""
    for name in undecided(config):
        setattr(_priority(config), name, [PROVIDER])


def _priority(config: Any) -> Any:
    return getattr(getattr(config, "kernel_config", None), "ir_op_priority", None)


def _is_registered(name: str) -> bool:
    try:
        from vllm import ir
    except ImportError:
        return False
    return PROVIDER in getattr(getattr(ir.ops, name, None), "impls", ())


# vLLM checks names, defaults and annotations of these against its own implementations.


def _takes(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return (
        variance_size is None
        and weight is not None
        and weight.dtype == x.dtype
        and x.shape[-1] % _VECTOR == 0
    )


def _takes_sum(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    # The kernel writes in place and takes rows for adjacent.
    return (
        _takes(x, weight, epsilon, variance_size)
        and x_residual.dtype == x.dtype
        and x.is_contiguous()
        and x_residual.is_contiguous()
    )


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
    return out


def _fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
