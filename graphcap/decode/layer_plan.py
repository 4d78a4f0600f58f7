"""How the layers of one bucket run: which schedule, by which tiles, with or without dependent launch.

Plans are found by measuring (see bench/fused_layer.py) and kept as JSON; `default_plan` is what runs
where nothing was measured. A plan never changes what is computed, only how fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from graphcap.decode.kernels import DecodeKernels, FusedLayerKernels
from graphcap.errors import InputError
from graphcap.moe.kernels import ExpertKernels
from graphcap.operations import Operation

_CUDA_KINDS = ("CudaRows", "CudaAttend", "CudaGateUp", "CudaDown")

LAYERS = ("fused", "apart", "plain")

FUSED_ROWS = 2
"""Up to so many rows norms are made in the kernels of the projections that read them; with more, every
program would norm every row again (H200, 8 rows: 12.7 µs against 5 for the projection alone)."""

APART_ROWS = 64
"""Up to so many rows attention is fused and norms are kernels of their own; larger batches run by the
plain schedule."""

TILED = (
    "norm_qkv",
    "attend",
    "output_residual",
    "norm_router",
    "qkv",
    "output",
    "router",
    "gated_gemm",
    "down_gemm",
    "pair_gate_up",
    "pair_down",
)
"""Kernels whose tile a plan may give."""

EXPERT_CHAIN = (
    "router",
    "top_k",
    "align",
    "gated_gemm",
    "down_gemm",
    "merge",
    "pair_gate_up",
    "pair_down",
)
"""Kernels of the routed experts behind their norm: all that a plan says of layers of which only the experts
are graphcap's."""

CUDA_TILES = {
    "norm_qkv": "CudaRows",
    "attend": "CudaAttend",
    "output_residual": "CudaRows",
    "norm_router": "CudaRows",
    "pair_gate_up": "CudaGateUp",
    "pair_down": "CudaDown",
}
"""Kernels that there are in CUDA C++ as well, for one row: the tile says which one is meant."""

CHAINED = (*TILED, "add_norm", "top_k", "align", "merge")
"""Kernels that can be launched by programmatic dependent launch."""


@dataclass(frozen=True)
class LayerPlan:
    """Attributes:
    layers: "fused" (norms inside the projections), "apart" (norms apart, attention fused) or "plain".
    tiles: name of a kernel of `TILED` -> its tile; a name that is missing takes the kernel's own choice.
    blas: "qkv", "output": the projections of "apart" that cuBLAS makes.
    without_pdl: kernels of `CHAINED` that wait for the whole of the kernel before.
    block: rows of a block where pairs are grouped by expert; None: `block_size_m`.
    """

    layers: str = "fused"
    tiles: Mapping[str, Any] = field(default_factory=dict)
    blas: frozenset[str] = frozenset()
    without_pdl: frozenset[str] = frozenset()
    block: int | None = None

    def __post_init__(self) -> None:
        if self.layers not in LAYERS:
            raise InputError(
                f"layers of a plan: expected one of {', '.join(LAYERS)}, found {self.layers!r}"
            )
        for what, names, known in (
            ("tiles", self.tiles, TILED),
            ("blas", self.blas, ("qkv", "output")),
            ("without_pdl", self.without_pdl, CHAINED),
        ):
            unknown = sorted(set(names) - set(known))
            if unknown:
                raise InputError(
                    f"{what} of a plan: expected names among {', '.join(known)}, found {unknown[0]!r}"
                )
        for name, tile in self.tiles.items():
            kind = type(tile).__name__
            if kind.startswith("Cuda") and CUDA_TILES.get(name) != kind:
                raise InputError(f"tiles of a plan: {name} is not made by kernels with a {kind}")

    def __eq__(self, other: object) -> bool:
        """Tiles of two kinds may hold the same numbers, and are tuples."""
        return isinstance(other, LayerPlan) and self._what_counts() == other._what_counts()

    def _what_counts(self) -> tuple[Any, ...]:
        tiles = {name: (type(tile), tile) for name, tile in self.tiles.items()}
        return self.layers, tiles, self.blas, self.without_pdl, self.block

    @property
    def in_cuda(self) -> tuple[str, ...]:
        """The kernels that this plan wants in CUDA C++."""
        return tuple(n for n, t in sorted(self.tiles.items()) if type(t).__name__ in _CUDA_KINDS)

    def without(self, names: Iterable[str]) -> LayerPlan:
        """The same with these kernels' own choice of a tile."""
        names = set(names)
        tiles = {name: tile for name, tile in self.tiles.items() if name not in names}
        return replace(self, tiles=tiles)

    def with_tile(self, name: str, tile: Any) -> LayerPlan:
        """The same with this tile."""
        return replace(self, tiles={**self.tiles, name: tile})

    def of_experts(self) -> LayerPlan:
        """What it says of the kernels in `EXPERT_CHAIN`, and nothing else."""
        return replace(
            self,
            tiles={name: tile for name, tile in self.tiles.items() if name in EXPERT_CHAIN},
            blas=frozenset(),
            without_pdl=self.without_pdl.intersection(EXPERT_CHAIN),
        )


def default_plan(rows: int) -> LayerPlan:
    """What runs where nothing was measured."""
    if rows <= FUSED_ROWS:
        return LayerPlan("fused")
    if rows <= APART_ROWS:
        return LayerPlan("apart", block=16)
    return LayerPlan("plain")


@dataclass(frozen=True)
class PlannedKernels:
    """The operations of a layer with the tiles of a plan; signatures as in their modules.

    Attributes:
        decode: for what no plan touches; its `experts` are those of the plan.
    """

    decode: DecodeKernels
    norm_qkv: Operation
    attend: Operation
    output_residual: Operation
    norm_router: Operation
    add_norm: Operation
    qkv: Operation
    output: Operation
    router: Operation


def planned(kernels: DecodeKernels, plan: LayerPlan) -> PlannedKernels:
    """`kernels`, which have a fused layer, by `plan`."""
    fused = kernels.fused
    assert fused is not None

    def by_plan(name: str, operation: Operation) -> Operation:
        return _by_plan(plan, name, operation)

    def projection(name: str) -> Operation:
        return kernels.linear if name in plan.blas else by_plan(name, fused.project)

    return PlannedKernels(
        replace(kernels, experts=planned_experts(kernels.experts, fused, plan)),
        by_plan("norm_qkv", fused.norm_qkv),
        by_plan("attend", fused.attend),
        by_plan("output_residual", fused.output_residual),
        by_plan("norm_router", fused.norm_router),
        by_plan("add_norm", kernels.fused_add_rms_norm),
        projection("qkv"),
        projection("output"),
        by_plan("router", fused.project.named("router GEMM")),
    )


def planned_experts(
    experts: ExpertKernels, fused: FusedLayerKernels, plan: LayerPlan
) -> ExpertKernels:
    """`experts` with the tiles of `plan`; with layers "apart" the router is the projection of the same
    plan, whose weights are on their way while the kernel before is still running."""
    changed: dict[str, Any] = {
        "topk_softmax": _by_plan(plan, "top_k", experts.topk_softmax),
        "align": _by_plan(plan, "align", experts.align),
        "expert_gemm": _by_plan(plan, "down_gemm", experts.expert_gemm),
        "merge": _by_plan(plan, "merge", experts.merge),
        "gated_gemm": _by_plan(plan, "gated_gemm", fused.gated_gemm),
        "block": plan.block,
    }
    if plan.layers == "apart":
        router = _by_plan(plan, "router", fused.project.named("router GEMM"))
        changed["router_gemm"] = _as_router(router)
    if experts.pairs is not None:
        changed["pairs"] = replace(
            experts.pairs,
            gate_up=_by_plan(plan, "pair_gate_up", experts.pairs.gate_up),
            down=_by_plan(plan, "pair_down", experts.pairs.down),
        )
    return replace(experts, **changed)


def _by_plan(plan: LayerPlan, name: str, operation: Operation) -> Operation:
    if name in plan.in_cuda:
        operation = _in_cuda(name)
    options: dict[str, Any] = {"pdl": name not in plan.without_pdl}
    if name in plan.tiles:
        options["tile"] = plan.tiles[name]
    scratch = operation.scratch
    if name == "attend" and name in plan.tiles:
        scratch = _attend_scratch(plan.tiles[name])
    return Operation(
        operation.name, operation.implementation, partial(operation.function, **options), scratch
    )


def _as_router(project: Operation) -> Operation:
    """`project` with the arguments of `router_gemm`."""

    def router_gemm(hidden: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> None:
        project.function(hidden, weight, None, logits)

    return Operation(project.name, project.implementation, router_gemm)


def _in_cuda(name: str) -> Operation:
    from graphcap.decode.kernels import cuda_attend, cuda_linear
    from graphcap.moe.kernels import cuda_down, cuda_gate_up

    return {
        "norm_qkv": cuda_linear.norm_qkv,
        "attend": cuda_attend.attend,
        "output_residual": cuda_linear.output_residual,
        "norm_router": cuda_linear.norm_router,
        "pair_gate_up": cuda_gate_up.pair_gate_up,
        "pair_down": cuda_down.pair_down,
    }[name]


def _attend_scratch(tile: Any) -> Callable[..., Any]:
    from graphcap.decode.kernels import cuda_attend, triton_fused_attention

    own: Any = cuda_attend if hasattr(tile, "cluster") else triton_fused_attention

    def scratch(*args: Any) -> Any:
        return own.scratch_of(tile, args[10])  # `out` of `attend`

    return scratch
