"""How graphcap's own Triton kernels take a shape: schedule, tile, and whether the tile divides it.

Every shape is right, since what lies beyond the end is masked; a tile that does not divide K costs a mask
on every load and lanes that load nothing. How much that is was not measured for each shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphcap.buckets import BucketLadder
from graphcap.moe.experts import block_size_m, few_pairs, sorted_length
from graphcap.moe.kernels import has_triton
from graphcap.moe.slow_shapes import ALIGNED, NOT_INSTALLED, UNALIGNED, ExpertShape, Finding

MOST_TOKENS = 64
ITEMSIZE = 2
"""Bytes of a weight: bfloat16 or float16."""
_LOAD = 16
"""Bytes that one lane loads at once at the most; each row has to start at a multiple of it."""


def triton_findings(shape: ExpertShape) -> list[Finding]:
    """The products of the experts for the buckets up to `MOST_TOKENS`, unquantised.

    Where Triton is not installed the tiles are not known here, and the finding says so.
    """
    what = f"E {shape.num_experts}, H {shape.hidden_size}, I {shape.inner}"
    ladder = tuple(BucketLadder.up_to(MOST_TOKENS))
    if not has_triton():
        detail = "graphcap's kernels, which choose the tiles, need Triton 3.0: pip install triton"
        return [Finding("triton", what, NOT_INSTALLED, detail)]
    found: dict[Product, list[int]] = {}
    for tokens in ladder:
        for product in _products(shape, tokens):
            found.setdefault(product, []).append(tokens)
    return [_finding(product, _spoken(tokens, ladder)) for product, tokens in found.items()]


Product = tuple[str, str, int, int, int, int]
"""Schedule, product, K, N, tile along K, tile along N."""


def _products(shape: ExpertShape, tokens: int) -> Iterable[Product]:
    # Only here: these modules import Triton.
    from graphcap.moe.kernels.triton_gemm import expert_tile
    from graphcap.moe.kernels.triton_pairs import down_tile, gate_up_tile

    hidden, inner = shape.hidden_size, shape.inner
    if few_pairs(tokens, shape.top_k, shape.num_experts):
        up = gate_up_tile(hidden, ITEMSIZE)
        down = down_tile(tokens, shape.top_k, inner, ITEMSIZE)
        yield ("by pair", "gate and up", hidden, inner, up.depth, up.rows)
        yield ("by pair", "down", inner, hidden, down.depth, down.rows)
        return
    pairs = tokens * shape.top_k
    block = block_size_m(tokens)
    blocks = -(-sorted_length(pairs, shape.num_experts, block) // block)
    for product, n, k in (("gate and up", 2 * inner, hidden), ("down", hidden, inner)):
        tile = expert_tile(pairs, blocks, n, k, ITEMSIZE, block)
        yield ("by expert", product, k, n, tile.k, tile.n)


def _spoken(tokens: Sequence[int], ladder: Sequence[int]) -> str:
    """The buckets of `ladder` that `tokens` are: a range where none is left out."""
    if list(tokens) == [1]:
        return "1 token"
    start = ladder.index(tokens[0])
    if len(tokens) > 1 and tuple(tokens) == tuple(ladder[start : start + len(tokens)]):
        return f"{tokens[0]} to {tokens[-1]} tokens"
    return f"{', '.join(map(str, tokens))} tokens"


def _finding(product: Product, tokens: str) -> Finding:
    schedule, name, k, n, depth, width = product
    what = f"{schedule}, {name}, K {k}, N {n}, {tokens}"
    misses = []
    if k % depth:
        empty = 1 - k / (-(-k // depth) * depth)
        misses.append(f"K is no multiple of the tile: loads are masked, {empty:.0%} load nothing")
    if k * ITEMSIZE % _LOAD:
        misses.append(f"rows of {k * ITEMSIZE} bytes: loads are narrower than {_LOAD} bytes")
    detail = f"tile of {depth} along K, {width} along N"
    verdict = UNALIGNED if misses else ALIGNED
    return Finding("triton", what, verdict, "; ".join([detail, *misses]))
