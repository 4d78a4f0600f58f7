"""Each fused kernel by itself, for bench/fused_layer.py: inputs, its error, a run over all layers, tiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphcap.decode.cache import PagedCache
from graphcap.decode.kernels.triton_attention import processors
from graphcap.decode.kernels.triton_fused_attention import (
    AttendTile,
    attend,
    attend_tile,
    scratch_of,
)
from graphcap.decode.kernels.triton_fused_linear import (
    DotTile,
    RowsTile,
    norm_qkv,
    norm_router,
    output_residual,
)
from graphcap.decode.shapes import ModelShape
from graphcap.decode.step import rotary_table
from graphcap.decode.weights import ExpertWeights, ModelWeights

EPS = 1e-6


class Case(ABC):
    """One kernel on fresh random inputs of `rows` tokens and the weights of every layer."""

    def __init__(self, weights: ModelWeights, rows: int, context: int) -> None:
        self.weights, self.rows, self.context = weights, rows, context
        self.layers = len(weights.layers)
        self.device, self.dtype = weights.device, weights.dtype
        self._seed = 0
        self.prepare()

    def normal(self, *shape: int) -> torch.Tensor:
        self._seed += 1
        generator = torch.Generator(self.device).manual_seed(self._seed)
        values = torch.randn(*shape, generator=generator, device=self.device)
        return values.to(self.dtype)

    def poisoned(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(shape, float("nan"), device=self.device, dtype=dtype or self.dtype)

    @abstractmethod
    def prepare(self) -> None: ...

    @abstractmethod
    def launch(self, index: int, tile: Any, pdl: bool) -> None:
        """The kernel with the weights of layer `index`."""

    @abstractmethod
    def results(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(written, expected in float64) of layer 0."""

    def error(self, tile: Any, pdl: bool) -> float:
        """The largest error against float64 on poisoned buffers, relative to the largest value."""
        self.prepare()
        self.launch(0, tile, pdl)
        worst = 0.0
        for actual, expected in self.results():
            difference = (actual.double() - expected).abs().max() / expected.abs().max()
            worst = max(worst, float(torch.nan_to_num(difference, nan=float("inf"))))
        return worst

    def over_layers(self, tile: Any, pdl: bool) -> None:
        for index in range(self.layers):
            self.launch(index, tile, pdl)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


class NormQkv(Case):
    def prepare(self) -> None:
        layer, h = self.weights.layers[0], self.weights.shape.hidden_size
        self.x, self.delta = self.normal(self.rows, h), self.normal(self.rows, h)
        self.total = self.poisoned(self.rows, h)
        self.out = self.poisoned(self.rows, layer.qkv.shape[0])
        count = self.rows * self.weights.shape.num_kv_heads
        self.counters = torch.full((count,), 7, device=self.device, dtype=torch.int32)

    def launch(self, index: int, tile: Any, pdl: bool) -> None:
        layer = self.weights.layers[index]
        norm_qkv.function(
            self.x,
            self.delta,
            layer.input_norm,
            EPS,
            layer.qkv,
            layer.qkv_bias,
            self.out,
            self.total,
            self.counters,
            tile=tile,
            pdl=pdl,
        )

    def results(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        layer = self.weights.layers[0]
        product = rms_norm(self.total, layer.input_norm) @ layer.qkv.double().T
        if layer.qkv_bias is not None:
            product = product + layer.qkv_bias.double()
        zero = 1.0 + self.counters.double()
        return [
            (self.total, self.x.double() + self.delta.double()),
            (self.out, product),
            (zero, torch.ones_like(zero)),
        ]


class OutputResidual(Case):
    def prepare(self) -> None:
        h, width = self.weights.layers[0].output.shape
        self.x, self.residual = self.normal(self.rows, width), self.normal(self.rows, h)
        self.before = self.residual.clone()

    def launch(self, index: int, tile: Any, pdl: bool) -> None:
        layer = self.weights.layers[index]
        output_residual.function(
            self.x, layer.output, layer.output_bias, self.residual, tile=tile, pdl=pdl
        )

    def results(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        layer = self.weights.layers[0]
        product = self.x.double() @ layer.output.double().T
        if layer.output_bias is not None:
            product = product + layer.output_bias.double()
        return [(self.residual, self.before.double() + product)]


class NormRouter(Case):
    def prepare(self) -> None:
        shape = self.weights.shape
        self.x = self.normal(self.rows, shape.hidden_size)
        self.normed = self.poisoned(self.rows, shape.hidden_size)
        self.logits = self.poisoned(self.rows, shape.num_experts, dtype=torch.float32)

    def _router(self, index: int) -> torch.Tensor:
        mlp = self.weights.layers[index].mlp
        assert isinstance(mlp, ExpertWeights), "a dense layer has no router"
        return mlp.router

    def launch(self, index: int, tile: Any, pdl: bool) -> None:
        norm = self.weights.layers[index].post_norm
        router = self._router(index)
        norm_router.function(
            self.x, norm, EPS, router, self.normed, self.logits, tile=tile, pdl=pdl
        )

    def results(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        product = self.normed.double() @ self._router(0).double().T
        normed = rms_norm(self.x, self.weights.layers[0].post_norm)
        return [(self.normed, normed), (self.logits, product)]


class Attend(Case):
    """Its counters are zeroed before every launch by a kernel of their own, which is timed with it."""

    def prepare(self) -> None:
        shape, rows = self.weights.shape, self.rows
        dim, heads, kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
        if not hasattr(self, "cache"):
            self.cache = PagedCache(
                shape,
                num_sequences=rows,
                max_context=self.context + 64,
                device=self.device,
                dtype=self.dtype,
            )
            self.cache.fill_random(1)
            tables = [self.cache.allocate(self.context + 64) for _ in range(rows)]
            self.tables = torch.stack(tables).to(self.device)
            self.cos_sin = rotary_table(
                dim, shape.rope_theta, self.context + 64, device=self.device, dtype=self.dtype
            )
        lengths = [self.context - 7 * row % max(1, self.context // 2) for row in range(rows)]
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        self.positions = self.lengths.long() - 1
        size = self.cache.block_size
        blocks = self.tables.gather(1, (self.positions // size)[:, None])[:, 0].long()
        self.slots = blocks * size + self.positions % size
        self.qkv = self.normal(rows, (heads + 2 * kv_heads) * dim)
        self.out = self.poisoned(rows, heads, dim)
        self.counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=self.device)
        self._scratch: dict[AttendTile, dict[str, torch.Tensor]] = {}

    def launch(self, index: int, tile: AttendTile | None, pdl: bool) -> None:
        shape, layer = self.weights.shape, self.weights.layers[index]
        if tile is None:
            capacity = self.tables.shape[1] * self.cache.block_size
            tile = attend_tile(
                self.rows,
                shape.num_kv_heads,
                capacity,
                shape.head_dim * self.dtype.itemsize,
                processors(self.device),
            )
        if tile not in self._scratch:
            plan = scratch_of(tile, self.out)
            self._scratch[tile] = {
                name: self.poisoned(*size, dtype=dtype) for name, (size, dtype) in plan.items()
            }
        self.counters.zero_()
        attend.function(
            self.qkv,
            layer.q_norm,
            layer.k_norm,
            self.cos_sin,
            self.positions,
            self.slots,
            self.tables,
            self.lengths,
            self.cache.keys[index],
            self.cache.values[index],
            self.out,
            self.counters,
            EPS,
            shape.head_dim**-0.5,
            **self._scratch[tile],
            tile=tile,
            pdl=pdl,
        )

    def _rotated(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = rms_norm(x, weight)
        cos, sin = self.cos_sin.double()[self.positions][:, None].chunk(2, -1)
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def results(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        shape, layer, rows = self.weights.shape, self.weights.layers[0], self.rows
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        split = self.qkv.view(rows, -1, shape.head_dim).split([heads, kv_heads, kv_heads], 1)
        q, k = self._rotated(split[0], layer.q_norm), self._rotated(split[1], layer.k_norm)
        keys, values = (c[0].flatten(0, 1) for c in (self.cache.keys, self.cache.values))
        expected = []
        size = self.cache.block_size
        for row in range(rows):
            at = torch.arange(int(self.lengths[row]), device=self.device)
            slots = self.tables[row].long()[at // size] * size + at % size
            key, value = (
                c[slots].double().repeat_interleave(heads // kv_heads, 1) for c in (keys, values)
            )
            scores = torch.einsum("hd,thd->ht", q[row], key) * shape.head_dim**-0.5
            expected.append(torch.einsum("ht,thd->hd", torch.softmax(scores, -1), value))
        return [
            (keys[self.slots], k),
            (values[self.slots], split[2].double()),
            (self.out, torch.stack(expected)),
        ]


CASES: dict[str, Callable[[ModelWeights, int, int], Case]] = {
    "norm_qkv": NormQkv,
    "attend": Attend,
    "output_residual": OutputResidual,
    "norm_router": NormRouter,
}


def candidates(name: str, shape: ModelShape, rows: int, context: int) -> Iterator[Any]:
    """Tiles worth a try, in bfloat16."""
    if name == "attend":
        for tokens in (32, 16, 64):
            for splits in (4, 8, 16, 32, 64):
                if splits * tokens > 2 * context or splits * rows > 512:
                    continue
                for inside in (True, False):
                    yield AttendTile(splits, tokens, 4, inside)
        yield AttendTile(1, 64, 4, True)
        return
    width = shape.num_heads * shape.head_dim if name == "output_residual" else shape.hidden_size
    if rows <= 8:
        for weight_rows, warps in ((4, 4), (2, 2), (1, 1), (2, 4), (4, 2), (8, 4), (8, 8), (1, 2)):
            if 32 <= weight_rows * width // (warps * 32) <= 192:
                for lanes in {1, rows}:
                    yield RowsTile(weight_rows, warps, lanes)
    if rows >= 2:
        for n, depth, warps, stages in (
            (16, 256, 4, 4),
            (16, 128, 4, 4),
            (16, 256, 8, 3),
            (32, 128, 4, 4),
            (16, 512, 4, 2),
        ):
            yield DotTile(n, depth, warps, stages)
