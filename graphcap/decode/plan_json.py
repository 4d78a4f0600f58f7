"""Layer plans as JSON, and the other way round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from graphcap.decode.layer_plan import LayerPlan
from graphcap.errors import InputError

_TOO_LARGE = 2**31
"""What kernels are told in 32 bits is below it."""

_SIDES = ("rows", "n", "k", "depth", "tokens")
"""Fields of Triton's tiles that are a side of a tensor: a power of two."""

_DEEP = {"DotTile": "depth", "Tile": "k", "AttendTile": "tokens"}
"""The side that a `tl.dot` sums over: at least 16."""

_MOST_ELEMENTS = 2**20
"""Of a tensor in Triton."""

_MOST_WARPS = 32
"""Of a program: 1,024 threads are CUDA's most."""


def plan_to_json(plan: LayerPlan) -> dict[str, Any]:
    """Plain values; what is as it is by default is left out."""
    found: dict[str, Any] = {"layers": plan.layers}
    if plan.tiles:
        found["tiles"] = {
            name: {"tile": type(tile).__name__, **tile._asdict()}
            for name, tile in sorted(plan.tiles.items())
        }
    for name in ("blas", "without_pdl"):
        if getattr(plan, name):
            found[name] = sorted(getattr(plan, name))
    if plan.block is not None:
        found["block"] = plan.block
    return found


def plan_from_json(found: Mapping[str, Any]) -> LayerPlan:
    """What `plan_to_json` made.

    Raises:
        InputError: it is none; says what was expected and found.
    """
    if not isinstance(found, Mapping):
        raise InputError(f"layer plan: expected a mapping, found {type(found).__name__}")
    known = {"layers", "tiles", "blas", "without_pdl", "block"}
    unknown = sorted(set(found) - known)
    if unknown:
        raise InputError(
            f"layer plan: expected fields among {', '.join(sorted(known))}, found {unknown[0]!r}"
        )
    block = found.get("block")
    if block is not None and (not isinstance(block, int) or block not in (16, 32, 64, 128)):
        raise InputError(f"layer plan: expected a block of 16, 32, 64 or 128 rows, found {block!r}")
    try:
        return LayerPlan(
            found.get("layers", "fused"),
            {name: _tile(name, tile) for name, tile in found.get("tiles", {}).items()},
            frozenset(found.get("blas", ())),
            frozenset(found.get("without_pdl", ())),
            block,
        )
    except (TypeError, AttributeError, KeyError) as error:
        raise InputError(f"layer plan: expected what graphcap tune writes: {error}") from error


def _tile(kernel: str, found: Mapping[str, Any]) -> Any:
    from graphcap.decode.kernels.cuda_attend import CudaAttend, no_such_tile
    from graphcap.decode.kernels.cuda_linear import CudaRows
    from graphcap.decode.kernels.triton_fused_attention import AttendTile
    from graphcap.decode.kernels.triton_fused_linear import DotTile, RowsTile
    from graphcap.moe.kernels.cuda_down import CudaDown
    from graphcap.moe.kernels.cuda_gate_up import CudaGateUp, no_tile
    from graphcap.moe.kernels.triton_gemm import Tile
    from graphcap.moe.kernels.triton_pairs import PairTile

    known: tuple[Any, ...] = {
        "attend": (AttendTile, CudaAttend),
        "gated_gemm": (Tile,),
        "down_gemm": (Tile,),
        "pair_gate_up": (PairTile, CudaGateUp),
        "pair_down": (PairTile, CudaDown),
    }.get(kernel, (DotTile, RowsTile, CudaRows))
    kinds = {kind.__name__: kind for kind in known}
    if not isinstance(found, Mapping):
        raise TypeError(f"a tile of {kernel} is a mapping, found {type(found).__name__}")
    fields = dict(found)
    kind = fields.pop("tile")
    if kind not in kinds:
        raise TypeError(f"a tile of {kernel} is one of {', '.join(kinds)}, found {kind!r}")
    tile = kinds[kind](**fields)
    for name, value in tile._asdict().items():
        optional = name in tile._field_defaults  # or a switch, which is an int as well
        least = 0 if optional else 1
        counts = isinstance(value, int) and (optional or not isinstance(value, bool))
        if not counts or not least <= value < _TOO_LARGE:
            raise TypeError(f"{name} of a tile is a count, found {repr(value)[:40]}")
    if isinstance(tile, CudaGateUp):
        why = no_tile(tile)
        if why:
            raise TypeError(f"a CudaGateUp: {why}")
    if isinstance(tile, CudaAttend) and (why := no_such_tile(tile)):
        raise TypeError(f"a CudaAttend: {why}")
    if not kind.startswith("Cuda"):
        _check_triton(kind, tile._asdict())
    return tile


def _check_triton(kind: str, fields: Mapping[str, int]) -> None:
    """Raises `TypeError` for a tile that Triton compiles for no shape and no device."""
    what = f"{'an' if kind[0] in 'AEIO' else 'a'} {kind}"
    sides = {name: value for name, value in fields.items() if name in _SIDES}
    for name, value in sides.items():
        least = 16 if _DEEP.get(kind) == name else 1
        if value < least or value & (value - 1):
            at_least = f" of at least {least}" if least > 1 else ""
            raise TypeError(f"{name} of {what}: expected a power of two{at_least}, found {value}")
    elements = math.prod(sides.values())
    if elements > _MOST_ELEMENTS:
        raise TypeError(
            f"{' and '.join(sides)} of {what}: expected at most {_MOST_ELEMENTS:,} elements, found "
            f"{elements:,}"
        )
    warps = fields.get("warps", 1)
    if warps > _MOST_WARPS or warps & (warps - 1):
        raise TypeError(
            f"warps of {what}: expected a power of two up to {_MOST_WARPS}, found {warps}"
        )
