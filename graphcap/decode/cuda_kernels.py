"""Which kernels in CUDA C++ can serve a model on a device, and those of a plan that cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphcap.cuda.source import too_old_for
from graphcap.decode.kernels import cuda_attend, cuda_linear
from graphcap.decode.layer_plan import CUDA_TILES, LayerPlan
from graphcap.decode.model_shape import ModelShape
from graphcap.decode.plan_key import ExpertSizes
from graphcap.moe.kernels import cuda_down, cuda_gate_up

_OF_EXPERTS: Mapping[str, tuple[Callable[..., str], str]] = {
    "pair_gate_up": (cuda_gate_up.why_not, "gate_up.cu"),
    "pair_down": (cuda_down.why_not, "down.cu"),
}
"""Why a kernel cannot serve, and its source."""


def cuda_obstacles(
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    plan: LayerPlan | None = None,
) -> Mapping[str, str]:
    """Name of a kernel of `plan` that it wants in CUDA C++ -> why that cannot serve. Without a plan: of
    every kernel that there is in CUDA C++, with a tile of its own."""
    tiles = {} if plan is None else plan.tiles
    found = {}
    for name in CUDA_TILES if plan is None else plan.in_cuda:
        if rows != 1:
            reason = f"they take one row, found {rows}"
        elif plan is not None and plan.layers != "fused":
            reason = f"they are of schedule 'fused', found {plan.layers!r}"
        elif name in _OF_EXPERTS:
            reason = _experts_obstacle(name, shape, dtype, device, tiles.get(name))
        elif name == "attend":
            reason = cuda_attend.why_not(
                shape.head_dim,
                shape.rotated,
                shape.num_heads,
                shape.num_kv_heads,
                dtype,
                device,
                tiles.get(name),
            )
        else:
            heads = shape.num_heads * shape.head_dim
            columns = heads if name == "output_residual" else shape.hidden_size
            reason = cuda_linear.why_not(columns, dtype, device, tiles.get(name))
        if reason:
            found[name] = reason
    return found


def expert_obstacles(
    sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, rows: int, plan: LayerPlan
) -> Mapping[str, str]:
    """As `cuda_obstacles`, of the kernels of routed experts, whatever the rest of the layer is."""
    found = {}
    for name in plan.in_cuda:
        if name in _OF_EXPERTS:
            if rows != 1:
                reason = f"they take one row, found {rows}"
            else:
                reason = _experts_obstacle(name, sizes, dtype, device, plan.tiles[name])
            if reason:
                found[name] = reason
    return found


def _experts_obstacle(
    name: str,
    sizes: ModelShape | ExpertSizes,
    dtype: torch.dtype,
    device: torch.device,
    tile: Any,
) -> str:
    why_not, source = _OF_EXPERTS[name]
    why = why_not(
        sizes.num_experts,
        sizes.hidden_size,
        sizes.moe_intermediate_size,
        sizes.top_k,
        dtype,
        device,
        tile,
    )
    return why or too_old_for(source)


def cuda_plan(
    shape: ModelShape, dtype: torch.dtype, device: torch.device, capacity: int = 320
) -> LayerPlan | None:
    """A plan of one row with every kernel in CUDA C++ that can serve; None: none can.

    Args:
        capacity: tokens that a sequence may have.
    """
    obstacles = cuda_obstacles(shape, dtype, device, 1)
    outputs = {
        "norm_qkv": (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim,
        "output_residual": shape.hidden_size,
        "norm_router": shape.num_experts,
    }
    tiles: dict[str, object] = {
        name: cuda_linear.rows_tile(count) for name, count in outputs.items()
    }
    inner, top_k = shape.moe_intermediate_size, shape.top_k
    tiles["pair_gate_up"] = cuda_gate_up.gate_up_tile(shape.hidden_size, inner, top_k)
    tiles["pair_down"] = cuda_down.down_tile(inner, top_k)
    tiles["attend"] = cuda_attend.cuda_attend_tile(capacity, shape.num_kv_heads)
    serving = {name: tile for name, tile in tiles.items() if name not in obstacles}
    return LayerPlan("fused", tiles=serving) if serving else None
