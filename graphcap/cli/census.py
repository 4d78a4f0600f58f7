"""``graphcap census``: what one decode step launches, by operation, beside the original analysis."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphcap.analysis import ANALYSIS, ANALYSIS_ALLOCATIONS, ANALYSIS_LAYERS, ANALYSIS_TOTAL
from graphcap.cli.options import (
    add_model,
    chosen_dtype,
    chosen_shape,
    default_device,
    positive,
    print_json,
    progress_bar,
    settings_with,
)

if TYPE_CHECKING:
    import torch

    from graphcap.census import Census, CensusRow
    from graphcap.decode.kernels import DecodeKernels
    from graphcap.decode.shapes import ModelShape
    from graphcap.decode.weights import ModelWeights

ROWS = (
    "embedding",
    "bounds",
    "rms_norm",
    "fused_add_rms_norm",
    "projections",
    "rotary_embedding",
    "cache write",
    "attention",
    "router GEMM",
    "topk_softmax",
    "moe_align_block_size",
    "fused_moe w1",
    "silu_and_mul",
    "fused_moe w2",
    "merge",
    "sampling",
    "advance",
    "padding",
    "copies",
)
"""The rows of the table, in the order of a step. Rows that a step does not have count 0."""

_CONTEXT = 256


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "census",
        help="count what one step launches, by operation",
        description="Counts the operations of one decode step. On a CPU at full depth and width "
        "without the memory (meta tensors); on a CUDA device the step is also captured, over layers "
        "that share one layer's weights, and its graph nodes are counted.",
    )
    add_model(parser, default_shape="seed-64")
    parser.add_argument("--batch", type=positive, default=1, metavar="N")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import torch

    from graphcap.decode.kernels import decode_kernels
    from graphcap.moe.kernels import choose_backend

    device = default_device()
    backend = choose_backend(settings_with().kernels, device)
    kernels = decode_kernels(backend)
    shape = chosen_shape(options)
    dtype = chosen_dtype(options.dtype, device)
    with progress_bar("counting"):
        counted, allocations = _count_on_meta(shape, dtype, kernels, options.batch)
        recorded = (
            _capture(shape, device, dtype, kernels, options.batch)
            if device.type == "cuda"
            else None
        )
    is_analysed = shape.name == "seed-64" and shape.num_layers == ANALYSIS_LAYERS
    census = recorded or counted
    result = {
        "shape": shape.name,
        "layers": shape.num_layers,
        "batch": options.batch,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (meta)",
        "kernels": {"backend": backend.name, "why": backend.why},
        "rows": _rows(census, is_analysed),
        "total": sum(row.count for row in census.rows),
        "allocations_per_step": allocations,
        "graph_nodes": census.total if census.nodes is not None else None,
        "nodes_by_kind": None if census.nodes is None else dict(census.nodes),
        "analysis_total": ANALYSIS_TOTAL if is_analysed else None,
        "analysis_allocations": ANALYSIS_ALLOCATIONS if is_analysed else None,
    }
    if options.json:
        print_json(result)
    else:
        from graphcap.cli.tables import print_census

        print_census(result)
    return 0


def _rows(census: Census, is_analysed: bool) -> list[dict[str, Any]]:
    found: dict[str, list[CensusRow]] = {}
    for row in census.rows:  # an operation may run on several kernels (a merge, and an add to it)
        found.setdefault(row.operation, []).append(row)
    extra = [name for name in found if name not in ROWS]
    rows = []
    for name in (*ROWS, *extra):
        parts = found.get(name, [])
        rows.append(
            {
                "operation": name,
                "count": sum(part.count for part in parts),
                "implementation": " + ".join(part.implementation for part in parts) or "none",
                "nodes": None if census.nodes is None else sum(part.nodes or 0 for part in parts),
                "analysis_count": ANALYSIS.get(name) if is_analysed else None,
            }
        )
    return rows


def _count_on_meta(
    shape: ModelShape, dtype: torch.dtype, kernels: DecodeKernels, batch: int
) -> tuple[Census, int]:
    """Operations and allocations of one eager step, no memory used and nothing computed."""
    import torch

    from graphcap.decode.cache import PagedCache
    from graphcap.decode.random_weights import random_weights
    from graphcap.decode.step import DecodeStep, decode_slots
    from graphcap.inputs import StaticInputs
    from graphcap.pool import BufferPool
    from graphcap.recorders.tape import count_step

    meta = torch.device("meta")
    weights = random_weights(shape, device=meta, dtype=dtype, seed=0)
    cache = PagedCache(
        shape,
        num_sequences=batch,
        max_context=_CONTEXT,
        device=meta,
        dtype=dtype,
        format=kernels.cache_format,
    )
    pool = BufferPool(meta)
    step = DecodeStep(weights, cache, kernels, pool, schedule="plain")
    slots = decode_slots(
        cache.blocks_per_sequence, cache.format.slot_dtype, states=cache.states is not None
    )
    inputs = StaticInputs(batch, slots, meta)

    def padded() -> Any:
        inputs.restore_pads()
        return step(inputs.views(batch))

    census = count_step(padded, meta)
    return census, census.allocations + pool.allocations


def _capture(
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    kernels: DecodeKernels,
    batch: int,
) -> Census:
    """The census of a real capture. Layers share weights: what is launched does not depend on them."""
    from graphcap.buckets import BucketLadder
    from graphcap.decode.decoder import Decoder

    decoder = Decoder(
        _shared_layers(shape, device, dtype),
        kernels,
        max_batch=batch,
        max_context=_CONTEXT,
        ladder=BucketLadder([batch]),
        settings=settings_with(verify="off"),
        schedule="plain",  # operation by operation, as the analysis counted
    )
    try:
        decoder.manager.capture()
        return decoder.manager.recording(batch).census()
    finally:
        decoder.close()


def _shared_layers(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    from graphcap.decode.random_weights import random_weights

    def kind_of(layer: int) -> tuple[bool, bool]:
        return shape.is_sparse(layer), shape.is_linear(layer)

    first_of = {kind_of(layer): layer for layer in reversed(range(shape.num_layers))}
    drawn = {
        kind: random_weights(
            replace(
                shape,
                num_layers=1,
                mlp_only_layers=() if kind[0] else (0,),
                decoder_sparse_step=1,
                linear_layers=(0,) if kind[1] else (),
            ),
            device=device,
            dtype=dtype,
            seed=first,
        )
        for kind, first in first_of.items()
    }
    weights = drawn[kind_of(0)]
    weights.shape = shape
    weights.layers = [drawn[kind_of(layer)].layers[0] for layer in range(shape.num_layers)]
    return weights
