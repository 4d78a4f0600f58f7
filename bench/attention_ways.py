"""The ways to attend that bench/attention.py holds side by side, but for vLLM's (see attention_vllm.py),
and how a way is held against the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from attention_load import AttentionLoad

from graphcap.decode.kernels import decode_kernels
from graphcap.decode.layer_plan import PlannedKernels, planned
from graphcap.decode.model_shape import ModelShape
from graphcap.decode.schedule import Schedule
from graphcap.decode.weights import empty_weights
from graphcap.moe.kernels import choose_backend

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}
"""Distance from the float64 reference, as a share of its norm, that rounding in a dtype explains."""


class UnavailableError(Exception):
    """This way cannot run here; says why."""


class Store(Protocol):
    """Where a way keeps keys and values: the new token's place in it, key and value (M, Hk, D)."""

    def put(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None: ...

    def got(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass
class AttentionWay:
    """One way to attend.

    Attributes:
        whole: it takes the projection and does norms, RoPE and cache write too; otherwise it is given
            the query of layer 0 and a cache that holds the new token.
        run: enqueues one layer.
        outs: (M, Hq, D) of each layer, which `run` writes.
        projection: enqueues the qkv projection of a layer as it comes before this way in a step; None:
            that of torch.
        facts: what is known of it besides its times.
    """

    name: str
    whole: bool
    run: Callable[[int], object]
    outs: Sequence[torch.Tensor]
    store: Store
    facts: dict[str, Any] = field(default_factory=dict)
    projection: Callable[[int], object] | None = None


@dataclass(frozen=True)
class PagedStore:
    """Caches of each layer, (blocks, block size, Hk, D), in whatever strides."""

    load: AttentionLoad
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]

    def _place(self) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.load.cache.block_size
        return self.load.slots // size, self.load.slots % size

    def put(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.keys[layer][self._place()] = key
        self.values[layer][self._place()] = value

    def got(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[layer][self._place()], self.values[layer][self._place()]


@dataclass(frozen=True)
class FlatStore:
    """Keys and values of each layer, (M, Hk, context, D)."""

    pairs: Sequence[Sequence[torch.Tensor]]

    def put(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for tensor, new in zip(self.pairs[layer], (key, value), strict=True):
            tensor[:, :, -1] = new

    def got(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.pairs[layer]
        return keys[:, :, -1], values[:, :, -1]


class Projections:
    """qkv projections of as many layers, each with weights of its own. Their results are read by nobody:
    what attention reads is `AttentionLoad.qkv`.

    Attributes:
        hidden, delta: (M, H), the residual stream and what is still to be added to it.
    """

    def __init__(
        self, shape: ModelShape, layers: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.eps = shape.rms_norm_eps
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        generator = torch.Generator(device).manual_seed(1)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device).to(dtype)

        self.weights = [normal(width, shape.hidden_size) for _ in range(layers)]
        self.norms = [normal(shape.hidden_size) for _ in range(layers)]
        self._normal, self._hidden_size, self._width = normal, shape.hidden_size, width

    def for_rows(self, rows: int) -> None:
        self.hidden, self.delta, self.total = (
            self._normal(rows, self._hidden_size) for _ in range(3)
        )
        self.out = self._normal(rows, self._width)

    def by_torch(self, layer: int) -> None:
        torch.mm(self.hidden, self.weights[layer].t(), out=self.out)

    def planned(self, kernels: PlannedKernels, layers: str) -> Callable[[int], object]:
        """graphcap's: with residual add and norm where the plan's `layers` have them inside."""

        def fused(layer: int) -> None:
            norm = (self.norms[layer], self.eps)
            weight = (self.weights[layer], None)
            kernels.norm_qkv(self.hidden, self.delta, *norm, *weight, self.out, self.total)

        def apart(layer: int) -> None:
            kernels.qkv(self.hidden, self.weights[layer], None, self.out)

        return fused if layers == "fused" else apart


def new_outs(load: AttentionLoad) -> list[torch.Tensor]:
    size = (load.rows, load.shape.num_heads, load.shape.head_dim)
    return [torch.empty(size, device=load.device, dtype=load.dtype) for _ in range(load.layers)]


# -- right or wrong ------------------------------------------------------------------------------


def prepare(way: AttentionWay, load: AttentionLoad) -> None:
    """NaN wherever `way` has to write; the new token where it does not write it."""
    for layer, out in enumerate(way.outs):
        out.fill_(float("nan"))
        expected = load.expected(layer)
        key, value = expected.key.to(load.dtype), expected.value.to(load.dtype)
        if way.whole:
            key, value = torch.full_like(key, float("nan")), torch.full_like(value, float("nan"))
        way.store.put(layer, key, value)


def off_by(way: AttentionWay, load: AttentionLoad) -> float:
    """The largest distance from the reference of what `way` has written in any layer, as a share of the
    reference's norm; NaN where it has not written, or NaN."""
    distances = []
    for layer, out in enumerate(way.outs):
        expected = load.expected(layer)
        distances.append(_distance(out, expected.out if way.whole else expected.alone))
        if way.whole:
            key, value = way.store.got(layer)
            distances += [_distance(key, expected.key), _distance(value, expected.value)]
    return float(torch.stack(distances).max())  # NaN, if one is


def _distance(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of the row that is farthest off."""
    apart = (found.double() - expected).flatten(1).norm(dim=1)
    return (apart / expected.flatten(1).norm(dim=1)).max()


# -- ways ----------------------------------------------------------------------------------------


def graphcap_way(
    load: AttentionLoad, schedule: str = "auto", projections: Projections | None = None
) -> AttentionWay:
    """The one operation of the fused layers, by the tile that `schedule` chooses.

    Raises:
        UnavailableError: `schedule` would run such a step by the plain schedule.
        BackendError: there are no Triton kernels here.
    """
    shape = load.shape
    kernels = decode_kernels(choose_backend("triton", load.device))
    # A plan is chosen by shape, dtype and device of the weights: one layer will do, and is not filled.
    weights = empty_weights(shape.with_layers(1), device=load.device, dtype=load.dtype)
    choice = Schedule(schedule, weights, load.cache, kernels).choice(load.rows)
    if choice.plan.layers == "plain":
        raise UnavailableError(f"schedule {schedule!r} runs plain here: {choice.why}")
    own = planned(kernels, choice.plan)
    attend, outs = own.attend, new_outs(load)

    def arguments(layer: int) -> tuple[Any, ...]:
        return (
            load.qkv,
            load.q_norms[layer],
            load.k_norms[layer],
            load.cos_sin,
            load.positions,
            load.slots,
            load.tables,
            load.lengths,
            load.cache.keys[layer],
            load.cache.values[layer],
            outs[layer],
            shape.rms_norm_eps,
            shape.head_dim**-0.5,
        )

    assert attend.scratch is not None
    scratch = {
        name: torch.empty(size, device=load.device, dtype=dtype)
        for name, (size, dtype) in attend.scratch(*arguments(0)).items()
    }
    partial = scratch.get("partial")  # none where they are joined by who makes them
    splits = choice.plan.tiles["attend"].splits if partial is None else partial.shape[2] - 1
    return AttentionWay(
        "graphcap",
        True,
        lambda layer: attend(*arguments(layer), **scratch),
        outs,
        PagedStore(load, load.cache.keys, load.cache.values),
        {"plan": str(choice), "splits": splits},
        None if projections is None else projections.planned(own, choice.plan.layers),
    )


def sdpa_way(load: AttentionLoad) -> AttentionWay:
    """torch's `scaled_dot_product_attention` over keys and values that lie in one piece.

    Raises:
        UnavailableError: this torch's knows no `enable_gqa`.
    """
    outs = new_outs(load)
    query = load.expected(0).query.to(load.dtype)[:, :, None]
    pairs = [
        [x.transpose(1, 2).contiguous() for x in load.flat(layer)] for layer in range(load.layers)
    ]

    def run(layer: int) -> None:
        keys, values = pairs[layer]
        found = F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        outs[layer] = found[:, :, 0]

    try:
        run(0)
    except TypeError as error:
        raise UnavailableError(f"torch {torch.__version__}: {error}") from error
    return AttentionWay("sdpa", False, run, outs, FlatStore(pairs))
