"""What bench/attention.py measures on: sequences in paged caches, the projection of one new token each, and
what attention to them is in float64, written for itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from speed_ways import HEADROOM

from graphcap.decode.cache import PagedCache
from graphcap.decode.model_shape import ModelShape
from graphcap.decode.rotary import rotary_table

SEEN = 0.3
"""Weight of the new token in the softmax beside all others together, about. With a fair share of it, one
of thousands, a way that forgets the new token would pass."""


class Expected(NamedTuple):
    """One layer's, in float64.

    Attributes:
        query (M, Hq, D), key (M, Hk, D): normed and rotated. value: (M, Hk, D).
        out: (M, Hq, D), what the query attends to.
        alone: the same with the query of layer 0, rounded to the model's dtype, and with key and value
            as the cache holds them: what a kernel gives that is given all this.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    alone: torch.Tensor


class AttentionLoad:
    """`rows` sequences of `context` tokens, the last of which is new, in the caches of `layers` layers.

    Keys and values are N(0, 1) and differ from layer to layer; blocks lie in random order, as after some
    serving. The projection is one for all layers: it is in the L2 cache, as where the kernel before has
    just written it.

    Attributes:
        cache: has room for `HEADROOM` more tokens a sequence, as in bench/speed.py.
        tables (M, nb) int32, positions (M,) int64, slots (M,) int64, lengths (M,) int32: of the new tokens.
        cos_sin (P, D), qkv (M, (Hq + 2 Hk) * D): in the model's dtype.
        q_norms, k_norms: (D,) of each layer.
    """

    def __init__(
        self,
        shape: ModelShape,
        rows: int,
        context: int,
        layers: int,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self.shape, self.rows, self.context = shape, rows, context
        self.layers, self.device, self.dtype = layers, device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)
        self.cache = PagedCache(
            shape.with_layers(layers),
            num_sequences=rows,
            max_context=context + HEADROOM,
            device=device,
            dtype=dtype,
        )
        self.cache.fill_random(seed)
        blocks = torch.cat([self.cache.allocate(context + HEADROOM) for _ in range(rows)])
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
        tables = blocks[order].view(rows, -1)
        size = self.cache.block_size
        last = tables[:, (context - 1) // size].long() * size + (context - 1) % size
        self.tables, self.slots = tables.to(device), last.to(device)
        self.positions = torch.full((rows,), context - 1, device=device)
        self.lengths = torch.full((rows,), context, device=device, dtype=torch.int32)
        self.cos_sin = rotary_table(
            shape.head_dim, shape.rope_theta, context + HEADROOM, device=device, dtype=dtype
        )
        self.q_norms, self.k_norms = (
            [(1 + 0.1 * self._normal(shape.head_dim)).to(dtype) for _ in range(layers)]
            for _ in range(2)
        )
        self.qkv = self._projection()
        self._expected: dict[int, Expected] = {}

    @property
    def capacity(self) -> int:
        """Tokens that a row of the block table has room for."""
        return self.cache.max_context

    @property
    def nbytes(self) -> int:
        """Keys and values that attention of one layer must read."""
        width = self.shape.num_kv_heads * self.shape.head_dim
        return 2 * self.rows * self.context * width * self.dtype.itemsize

    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (M, Hq, D), keys and values (M, Hk, D) of the projection: views."""
        hq, hk = self.shape.num_heads, self.shape.num_kv_heads
        return self.qkv.view(self.rows, hq + 2 * hk, -1).split([hq, hk, hk], 1)  # type: ignore[return-value]

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator, device=self.device)

    def _projection(self) -> torch.Tensor:
        """N(0, 1). The queries of a group are as like their new key as gives it its weight (`SEEN`)."""
        rows, hk, d = self.rows, self.shape.num_kv_heads, self.shape.head_dim
        like = min(0.95, max(0.0, math.log(max(1.0, SEEN * self.context)) / math.sqrt(d)))
        key = self._normal(rows, hk, 1, d)
        own = self._normal(rows, hk, self.shape.num_heads // hk, d)
        query = like * key + math.sqrt(1 - like**2) * own
        parts = (query, key, self._normal(rows, hk, d))
        return torch.cat([part.reshape(rows, -1) for part in parts], 1).to(self.dtype)

    # -- the reference ---------------------------------------------------------------------------

    def expected(self, layer: int) -> Expected:
        if layer not in self._expected:
            query, key, value = (part.double() for part in self.heads())
            query, key = (
                self._rotated(part, norms[layer])
                for part, norms in ((query, self.q_norms), (key, self.k_norms))
            )
            first = query if layer == 0 else self.expected(0).query
            stored = key.to(self.dtype).double()
            self._expected[layer] = Expected(
                query,
                key,
                value,
                self._attended(layer, query, key, value),
                self._attended(layer, first.to(self.dtype).double(), stored, value),
            )
        return self._expected[layer]

    def _rotated(self, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.rms_norm_eps)
        x = x * norm.double()
        cos, sin = self.cos_sin.double()[self.positions][:, None].chunk(2, -1)
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def _attended(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys, values = (
            torch.cat([tokens[:, :-1].double(), new[:, None]], 1)
            for tokens, new in zip(self.flat(layer), (key, value), strict=True)
        )
        grouped = query.view(self.rows, self.shape.num_kv_heads, -1, self.shape.head_dim)
        scores = torch.einsum("mhgd,mthd->mhgt", grouped, keys) / math.sqrt(self.shape.head_dim)
        return torch.einsum("mhgt,mthd->mhgd", scores.softmax(-1), values).reshape(query.shape)

    def flat(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (M, context, Hk, D) of the sequences, in their order: copies."""
        tables = self.tables.long()
        pair = (self.cache.keys[layer], self.cache.values[layer])
        keys, values = (x[tables].flatten(1, 2)[:, : self.context] for x in pair)
        return keys, values
