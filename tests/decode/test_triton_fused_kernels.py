"""The fused kernels of a decode layer against float64, with everything unwritten poisoned."""

from __future__ import annotations

import pytest
import torch
from triton_support import (
    DEVICE,
    DTYPES,
    ON_GPU,
    assert_close,
    generator,
    normal,
    poisoned,
    run,
    sizes,
)

pytest.importorskip("triton", minversion="3.0")

from graphcap.decode.kernels import triton_fused_linear as linear
from graphcap.decode.kernels.triton_fused_attention import (
    AttendTile,
    attend,
    attend_tile,
    scratch_of,
)
from graphcap.decode.kernels.triton_fused_linear import DotTile, RowsTile, linear_tile

NAN = float("nan")
BATCHES = sizes([1, 2, 3, 9, 65], [4, 5, 6, 7, 8, 16, 33])
"""On either side of where a projection goes from rows to tiles, lanes take turns, and a tile of tokens
ends; the interpreter takes time for every row."""
EPS = 1e-6


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


class NormQkv:
    """One call of `norm_qkv` on fresh inputs; `check` compares what it wrote."""

    def __init__(self, m: int, n: int, c: int, dtype: torch.dtype, delta: bool, bias: bool) -> None:
        self.dtype = dtype
        self.x, self.norm = normal(1, m, c, dtype=dtype, scale=3.0), normal(2, c, dtype=dtype)
        self.delta = normal(3, m, c, dtype=dtype) if delta else None
        self.weight = normal(4, n, c, dtype=dtype, scale=c**-0.5)
        self.bias = normal(5, n, dtype=dtype) if bias else None
        self.out = poisoned(m + 1, n, dtype=dtype)
        self.total = poisoned(m + 1, c, dtype=dtype) if delta else None

    def run(self, **how: object) -> None:
        m = self.x.shape[0]
        total = None if self.total is None else self.total[:m]
        arguments = (self.x, self.delta, self.norm, EPS, self.weight, self.bias)
        linear.norm_qkv(*arguments, self.out[:m], total, **how)

    def check(self) -> None:
        m = self.x.shape[0]
        stream = self.x
        if self.delta is not None:
            assert self.total is not None
            assert_close(self.total[:m], self.x.double() + self.delta.double(), self.dtype)
            assert self.total[m:].isnan().all()
            stream = self.total[:m]
        expected = rms_norm(stream, self.norm) @ self.weight.double().T
        if self.bias is not None:
            expected = expected + self.bias.double()
        assert_close(self.out[:m], expected, self.dtype)
        assert self.out[m:].isnan().all()


@pytest.mark.parametrize("m", BATCHES)
def test_norm_qkv_of_every_batch(m: int) -> None:
    dtype = torch.bfloat16 if m % 2 else torch.float32
    case = NormQkv(m, 43, 72, dtype, delta=True, bias=m % 4 == 0)
    case.run()
    case.check()


TILES = [RowsTile(1, 1, 1), RowsTile(4, 2, 3), RowsTile(2, 4, 9), DotTile(16, 32, 4, 2)]


@pytest.mark.parametrize(
    ("tile", "dtype"),
    sizes(
        [(None, dtype) for dtype in DTYPES] + [(tile, torch.float32) for tile in TILES],
        [(tile, dtype) for tile in TILES for dtype in DTYPES[1:]],
    ),
)
@pytest.mark.parametrize(
    ("m", "n", "c"), sizes([(1, 5, 8), (5, 18, 100)], [(1, 2560, 2048), (16, 5120, 2048)])
)
def test_norm_qkv_by_every_tile(
    m: int, n: int, c: int, tile: linear.Tile | None, dtype: torch.dtype
) -> None:
    case = NormQkv(m, n, c, dtype, delta=m > 1, bias=m == 1)
    case.run(tile=tile)
    case.check()


@pytest.mark.parametrize("tile", [RowsTile(2, 1, 1), DotTile(16, 32, 4, 2)])
def test_a_row_of_nan_reaches_no_other_row(tile: linear.Tile) -> None:
    results = []
    for value in (0.0, NAN):
        case = NormQkv(4, 20, 40, torch.float32, delta=True, bias=False)
        case.x[2] = value
        case.run(tile=tile)
        results.append(case.out[[0, 1, 3]])
    assert results[0].isfinite().all()
    assert torch.equal(*results)


@pytest.mark.parametrize("m", BATCHES)
def test_output_residual(m: int) -> None:
    for dtype, with_bias in ((torch.float32, True), (torch.bfloat16, False)):
        x, weight = normal(1, m, 56, dtype=dtype), normal(2, 41, 56, dtype=dtype, scale=0.1)
        bias = normal(3, 41, dtype=dtype) if with_bias else None
        residual = normal(4, m + 1, 41, dtype=dtype)
        expected = x.double() @ weight.double().T + residual[:m].double()
        if bias is not None:
            expected = expected + bias.double()
        last = residual[m].clone()
        linear.output_residual(x, weight, bias, residual[:m])
        assert_close(residual[:m], expected, dtype)
        assert torch.equal(residual[m], last)


@pytest.mark.parametrize("m", BATCHES)
def test_norm_router(m: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, norm = normal(1, m, 72, dtype=dtype, scale=2.0), normal(2, 72, dtype=dtype)
        weight = normal(3, 13, 72, dtype=dtype, scale=0.1)
        normed, logits = poisoned(m, 72, dtype=dtype), poisoned(m, 13, dtype=torch.float32)
        linear.norm_router(x, norm, EPS, weight, normed, logits)
        assert_close(normed, rms_norm(x, norm), dtype)
        assert_close(logits, normed.double() @ weight.double().T, dtype)
        assert torch.equal(logits, logits.to(dtype).float())  # rounded as the models' routers do


def test_tiles_fit_registers_and_reach_the_depth() -> None:
    for m in (1, 2, 3, 8, 16, 64):
        for n in (8, 128, 256, 2560, 5120):
            for c in (40, 512, 2048, 4096, 8192):
                tile = linear_tile(m, n, c, 2)
                if isinstance(tile, RowsTile):
                    assert tile.rows * c * 2 <= 16384
                else:
                    assert m > 2
                    assert tile.depth <= max(16, 2 * c)


# -- attention -----------------------------------------------------------------------------------


class Attend:
    """One call of `attend`. The cache is NaN wherever no earlier token is, the place of the new token
    included; row 1 of several is padding, its projection NaN and its block table wild."""

    def __init__(
        self,
        lengths: list[int],
        width: int,
        page: int,
        heads: int,
        kv_heads: int,
        d: int,
        rotary: int,
        dtype: torch.dtype,
    ) -> None:
        m, capacity = len(lengths), width * page
        self.heads, self.kv_heads, self.d, self.dtype = heads, kv_heads, d, dtype
        self.lengths, self.scale = lengths, d**-0.5
        self.pads = [1] if m > 1 else []
        self.qkv = normal(1, m, (heads + 2 * kv_heads) * d, dtype=dtype, scale=2.0)
        self.q_norm, self.k_norm = normal(2, d, dtype=dtype), normal(3, d, dtype=dtype)
        angles = torch.rand(capacity, rotary // 2, generator=generator(9)) * 6.28
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(DEVICE, dtype)
        blocks = m * width + 1
        order = torch.randperm(blocks - 1, generator=generator(7)) + 1
        self.tables = order.view(m, width).int()
        self.cached = [normal(seed, m, capacity, kv_heads, d, dtype=dtype) for seed in (5, 6)]
        flat = [poisoned(blocks * page, kv_heads, d, dtype=dtype) for _ in range(2)]
        self.slots = torch.full((m,), -1)
        for row, length in enumerate(lengths):
            self.tables[row, -(-length // page) :] = 0
            at = torch.arange(length)
            slots = self.tables[row].long()[at // page] * page + at % page
            if row in self.pads:
                continue
            for cache, tokens in zip(flat, self.cached, strict=True):
                cache[slots[:-1].to(DEVICE)] = tokens[row, : length - 1]
            self.slots[row] = slots[-1]
        for row in self.pads:
            self.qkv[row], self.tables[row] = NAN, 2**30
        self.caches = [cache.view(blocks, page, kv_heads, d) for cache in flat]
        self.tables, self.slots = self.tables.to(DEVICE), self.slots.to(DEVICE)
        self.positions = torch.tensor([length - 1 for length in lengths], device=DEVICE)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    def run(self, tile: AttendTile | None = None, slot_dtype: torch.dtype = torch.int64) -> None:
        """Leaves `out`, and the caches before and after in `before` and `caches`."""
        m = len(self.lengths)
        self.out = poisoned(m, self.heads, self.d, dtype=self.dtype)
        self.before = [cache.clone() for cache in self.caches]
        arguments = (
            self.qkv,
            self.q_norm,
            self.k_norm,
            self.cos_sin,
            self.positions,
            self.slots.to(slot_dtype),
            self.tables,
            self.seq_lens,
            *self.caches,
            self.out,
            EPS,
            self.scale,
        )
        if tile is None:
            run(attend, *arguments)
            return
        plan = scratch_of(tile, self.out)
        scratch = {name: poisoned(*shape, dtype=kind) for name, (shape, kind) in plan.items()}
        attend(*arguments, **scratch, tile=tile)

    def _rotated(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(M, heads, D), normed and rotated in float64."""
        x = rms_norm(x, weight)
        cos, sin = self.cos_sin.double()[self.positions][:, None].chunk(2, -1)
        half = cos.shape[-1]
        left, right, rest = x.split([half, half, self.d - 2 * half], -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)

    def check(self) -> None:
        heads, kv_heads, d = self.heads, self.kv_heads, self.d
        real = [row for row in range(len(self.lengths)) if row not in self.pads]
        q, k, v = self.qkv.view(-1, heads + 2 * kv_heads, d).split([heads, kv_heads, kv_heads], 1)
        q, k = self._rotated(q, self.q_norm), self._rotated(k, self.k_norm)
        written = [cache.flatten(0, 1)[self.slots[real]] for cache in self.caches]
        assert_close(written[0], k[real], self.dtype)
        assert torch.equal(written[1], v[real])
        for before, after in zip(self.before, self.caches, strict=True):
            before, after = before.flatten(0, 1).clone(), after.flatten(0, 1)
            before[self.slots[real]] = after[self.slots[real]]
            torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
        for index, row in enumerate(real):
            length = self.lengths[row]
            key, value = (
                torch.cat([tokens[row, : length - 1].double(), new[index : index + 1].double()])
                for tokens, new in zip(self.cached, written, strict=True)
            )
            key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
            scores = torch.einsum("hd,thd->ht", q[row], key) * self.scale
            expected = torch.einsum("ht,thd->hd", torch.softmax(scores, -1), value)
            assert_close(self.out[row], expected, self.dtype)
        assert (self.out[self.pads] == 0).all()


CASES = [
    # lengths, table width, block size, heads, kv heads, head dimension, rotated values
    ([1], 1, 4, 1, 1, 6, 6),
    ([12, 5, 1, 7], 3, 4, 6, 2, 10, 10),
    ([65, 9, 100, 64], 7, 16, 2, 2, 16, 8),
    ([130, 9, 33], 9, 16, 8, 2, 40, 20),
]
REAL = [
    ([256], 16, 16, 16, 2, 128, 128),
    ([4096], 256, 16, 16, 2, 128, 128),
    ([1, 2, 4095, 4096, 17, 1000, 128, 129], 256, 16, 16, 2, 256, 64),
    ([100 * n + 1 for n in range(32)], 256, 16, 32, 4, 128, 128),
]
SPLITS = [
    (None, torch.bfloat16),
    (AttendTile(1, 32, 4), torch.float32),
    (AttendTile(3, 16, 1), torch.float16),
    (AttendTile(9, 16, 2), torch.float32),
]


FEW = [(0, 0), (0, 3), (1, 0), (1, 2), (2, 1), (2, 3), (3, 0), (3, 1), (3, 2)]
"""Of CASES and SPLITS, where the kernels are interpreted: each of them at least twice."""
PRODUCT = [(case, *split) for case in (*CASES, *REAL) for split in SPLITS]


@pytest.mark.parametrize(
    ("case", "tile", "dtype"),
    PRODUCT if ON_GPU else [(CASES[case], *SPLITS[split]) for case, split in FEW],
)
def test_attend(
    case: tuple[list[int], int, int, int, int, int, int],
    tile: AttendTile | None,
    dtype: torch.dtype,
) -> None:
    call = Attend(*case, dtype)
    call.run(tile)
    call.check()


@pytest.mark.parametrize("m", sizes([1, 2, 3, 9], BATCHES[4:]))
def test_attend_of_every_batch(m: int) -> None:
    lengths = torch.randint(1, 65, (m,), generator=generator(m)).tolist()
    call = Attend(lengths, 4, 16, 2, 1, 16, 16, torch.float32)
    call.run(slot_dtype=torch.int32)
    call.check()


def test_a_step_that_is_run_again_gives_the_same_bits() -> None:
    """What it wrote to the cache changes nothing: the new token is not read from there."""
    call = Attend([50, 3, 60], 4, 16, 2, 1, 16, 16, torch.bfloat16)
    call.run(AttendTile(4, 16, 4))
    first = call.out
    call.run(AttendTile(4, 16, 4))
    assert torch.equal(call.out, first)


def test_a_sequence_beyond_its_table_reads_no_other_blocks() -> None:
    """Its slot is -1, as `advance` leaves it: it is padding from there on."""
    call = Attend([16], 1, 16, 2, 1, 16, 16, torch.float32)
    call.seq_lens += 1
    call.positions[0], call.slots[0] = 15, -1
    call.run()
    assert (call.out == 0).all()
    for before, after in zip(call.before, call.caches, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def test_tiles_of_attention_go_by_static_shapes() -> None:
    assert attend_tile(1, 2, 256, 256, 132) == AttendTile(8, 32, 4)
    assert attend_tile(1, 2, 4096, 256, 132) == AttendTile(64, 64, 4)
    assert attend_tile(8, 2, 4096, 256, 132).splits == 16
    assert attend_tile(64, 4, 4096, 256, 132).splits == 1
    assert attend_tile(1, 1, 16, 1024, 132).splits == 1
