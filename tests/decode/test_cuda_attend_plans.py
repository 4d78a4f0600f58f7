"""Attention in CUDA C++: whom it serves, what a plan may ask of it, and what runs where it cannot."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plan_samples import SEED, bucket, file_of, pretend, schedule_of

pytest.importorskip("triton", minversion="3.0")

from graphcap.cuda import source
from graphcap.decode.cuda_kernels import cuda_obstacles, cuda_plan
from graphcap.decode.kernels import cuda_attend, decode_kernels, triton_fused_attention
from graphcap.decode.kernels.cuda_attend import (
    HEAD_DIMS,
    MOST_SPLITS,
    CudaAttend,
    cache_obstacle,
    cuda_attend_tile,
    tile_obstacle,
    why_not,
)
from graphcap.decode.kernels.triton_fused_attention import MAX_SPLITS, AttendTile, scratch_of
from graphcap.decode.layer_plan import LayerPlan, planned
from graphcap.decode.plan_json import plan_from_json, plan_to_json
from graphcap.errors import BackendError, InputError
from graphcap.moe.kernels import Backend
from graphcap.tuning.space import HEADROOM, cuda_attend_tiles, knobs

CPU = torch.device("cpu")
BF16, HALF = torch.bfloat16, torch.float16
TRITON = decode_kernels(Backend("triton", "tests"))
TILE = CudaAttend(5, 64, 4)
PLAN = LayerPlan("fused", tiles={"attend": TILE})


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attend, "obstacle", lambda device: "")


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("sizes", "dtype", "tile", "words"),
    [
        ((128, 128, 16, 2), BF16, TILE, ""),
        ((128, 128, 16, 2), HALF, CudaAttend(128, 256, 8), ""),
        ((256, 64, 16, 2), BF16, CudaAttend(1, 128, 8), ""),
        ((64, 64, 32, 8), BF16, CudaAttend(3, 48, 1), ""),
        ((128, 112, 9, 1), BF16, CudaAttend(3, 32, 1), ""),
        ((128, 128, 16, 1), BF16, None, ""),
        ((128, 128, 16, 2), torch.float32, None, "float32"),
        ((96, 96, 16, 2), BF16, None, "found 96"),
        ((128, 120, 16, 2), BF16, None, "found 120"),
        ((64, 80, 16, 2), BF16, None, "up to 64, found 80"),
        ((128, 128, 17, 1), BF16, None, "found 17 for 1"),
        ((128, 128, 16, 3), BF16, None, "found 16 for 3"),
        ((128, 128, 16, 2), BF16, CudaAttend(129, 64, 4), "128 splits, found 129"),
        ((128, 128, 16, 2), BF16, CudaAttend(0, 64, 4), "found 0"),
        ((128, 128, 16, 2), BF16, CudaAttend(5, 64, 3), "1 or 2 or 4 or 8 warps"),
        ((64, 64, 16, 2), BF16, CudaAttend(5, 128, 8), "1 or 2 or 4 warps"),
        ((128, 128, 16, 2), BF16, CudaAttend(5, 96, 4), "multiple of 64 tokens"),
        ((128, 128, 16, 2), BF16, CudaAttend(5, 48, 1), "up to 32"),
        ((256, 256, 16, 2), BF16, CudaAttend(5, 128, 4), "up to 64"),
        ((64, 64, 16, 2), BF16, CudaAttend(5, 320, 4), "up to 256"),
        ((64, 64, 16, 2), BF16, CudaAttend(7, 64, 4, 2), "0 or 1 for cluster, found 2"),
        ((64, 64, 16, 2), BF16, CudaAttend(8, 64, 4, 1), "7 splits for a cluster, found 8"),
        ((64, 64, 16, 2), BF16, CudaAttend(7, 64, 4, 1), ""),
    ],
)
def test_heads_that_it_takes(sizes, dtype, tile, words) -> None:
    why = why_not(*sizes, dtype, CPU, tile)
    assert bool(why) == bool(words)
    assert words in why


def test_its_own_tile_is_one_for_every_head_and_length() -> None:
    for head_dim in HEAD_DIMS:
        for capacity in (1, 64, 65, 320, 4160, 1 << 20):
            for kv_heads in (1, 2, 8, 200):
                assert tile_obstacle(cuda_attend_tile(capacity, kv_heads), head_dim) == ""
    assert cuda_attend_tile(320, 2) == CudaAttend(5, 64, 4)
    assert cuda_attend_tile(4160, 2) == CudaAttend(65, 64, 4)
    assert cuda_attend_tile(1 << 20, 2).splits == MOST_SPLITS == MAX_SPLITS
    assert cuda_attend_tile(1 << 20, 8).splits == 32


def test_it_is_packaged_and_compiles_without_a_device() -> None:
    assert (source.HERE / "attend.cu").exists()
    try:
        source.libraries()
    except BackendError as error:
        pytest.skip(str(error))
    sizes = {"KV_HEADS": 2, "GROUP": 12, "D": 128, "ROTARY": 64, "PAGE": 10, "CAPACITY": 320}
    strides = {"KEY_BLOCK": 2560, "KEY_TOKEN": 256, "KEY_HEAD": 128}
    strides |= {name.replace("KEY", "VALUE"): value for name, value in strides.items()}
    tile = {"SPLITS": 5, "TOKENS": 64, "WARPS": 4, "slot_t": "int", "HALF": 1, "PDL": 1}
    for cluster in (0, 1):
        constants = {**sizes, **strides, **tile, "CLUSTER": cluster}
        assert source.compiled("attend.cu", source.as_constants(constants), (9, 0))


def test_whom_it_serves_is_known_without_triton() -> None:
    """The schedules of a CPU ask, too."""
    code = (
        "import sys; sys.modules['triton'] = None; import graphcap.decode.cuda_kernels, "
        "graphcap.decode.schedule; from graphcap.decode.kernels.cuda_attend import cuda_attend_tile; "
        "assert cuda_attend_tile(320, 2) == (5, 64, 4, 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Launched:
    """In the place of a compiled kernel: what it would have been launched with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.constants: dict[str, str] = {}
        self.arguments: tuple[object, ...] = ()
        monkeypatch.setattr(cuda_attend, "function", self._function)
        monkeypatch.setattr(cuda_attend, "CudaKernel", self._kernel)
        monkeypatch.setattr(triton_fused_attention, "join", lambda *given: None)
        cuda_attend._kernel.cache_clear()

    def _function(self, source, name, constants, device, shared) -> str:
        self.constants = dict(constants)
        return name

    def _kernel(self, name, function, grid, threads, pdl) -> SimpleNamespace:
        self.grid, self.threads, self.pdl = grid, threads, pdl
        return SimpleNamespace(launch=self._launch)

    def _launch(self, device, *arguments) -> None:
        self.arguments = arguments


def call(keys: torch.Tensor, values: torch.Tensor, heads: int, tile: CudaAttend) -> None:
    _, _, kv_heads, d = keys.shape
    qkv = torch.zeros(1, (heads + 2 * kv_heads) * d, dtype=BF16)
    norm, angles = torch.zeros(d, dtype=BF16), torch.zeros(9, 64, dtype=BF16)
    long, short = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    plan = scratch_of(tile, torch.empty(1, heads, d))
    scratch = [torch.zeros(shape, dtype=dtype) for shape, dtype in plan.values()]
    tables = torch.zeros(1, 7, dtype=torch.int32)
    given = (qkv, norm, norm, angles, long, long, tables, short, keys, values)
    out = torch.empty(1, heads, d, dtype=BF16)
    cuda_attend.attend.function(*given, out, 1e-6, 0.5, *scratch, tile, False)


def test_a_cluster_writes_the_result_needs_no_scratch_and_leaves_nothing_to_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = Launched(monkeypatch)
    caches = torch.zeros(2, 3, 16, 2, 128, dtype=BF16)
    tile, out = CudaAttend(5, 64, 4, 1), torch.zeros(1, 8, 128, dtype=BF16)
    alone = LayerPlan("fused", tiles={"attend": tile})
    attend = planned(TRITON, alone).attend
    assert attend.scratch(*[None] * 10, out) == {}
    qkv = torch.zeros(1, 12 * 128, dtype=BF16)
    norm, angles = torch.zeros(128, dtype=BF16), torch.zeros(9, 64, dtype=BF16)
    long, short = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    tables = torch.zeros(1, 7, dtype=torch.int32)
    attend(qkv, norm, norm, angles, long, long, tables, short, *caches, out, 1e-6, 0.5)
    assert launched.constants["CLUSTER"] == "1"
    assert launched.grid == 2 * 6
    assert launched.arguments[-5:-2] == (None, None, out)


def test_strides_go_into_the_kernel_and_what_it_cannot_read_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = Launched(monkeypatch)
    both = torch.zeros(3, 2, 16, 2, 136, dtype=BF16)  # keys and values of a block beside each other
    keys, values = both[:, 0, :, :, :128], both.transpose(2, 3)[:, 1, :, :, :128].transpose(1, 2)
    call(keys, values, 18, TILE)
    names = ("KEY_BLOCK", "KEY_TOKEN", "KEY_HEAD", "VALUE_BLOCK", "VALUE_TOKEN", "VALUE_HEAD")
    assert [launched.constants[name] for name in names] == ["8704", "272", "136"] * 2
    expected = {"GROUP": "9", "KV_HEADS": "2", "CAPACITY": "112", "PAGE": "16", "ROTARY": "64"}
    assert expected.items() <= launched.constants.items()
    assert (launched.grid, launched.threads, launched.pdl) == (2 * 2 * 6, 128, False)
    assert launched.arguments[-1] == pytest.approx(0.5 * 1.4426950408889634)
    call(keys, values, 8, TILE)
    assert launched.grid == 2 * 6
    odd = torch.zeros(3, 16, 2, 132, dtype=BF16)[..., :128]
    launched.arguments = ()
    for pair in ((odd, values), (keys, odd)):
        with pytest.raises(InputError, match=r"multiples of 16 bytes.*take a plan without"):
            call(*pair, 8, TILE)
    assert launched.arguments == ()
    assert "address" in cache_obstacle(torch.zeros(8 + 3 * 16 * 2 * 128, dtype=BF16)[1:])
    assert cache_obstacle(keys.transpose(2, 3))
    cuda_attend._kernel.cache_clear()


# -- plans ---------------------------------------------------------------------------------------


def test_a_plan_with_it_passes_through_json_and_runs_it() -> None:
    assert plan_from_json(plan_to_json(PLAN)) == PLAN
    assert PLAN.in_cuda == ("attend",)
    found = planned(TRITON, PLAN).attend
    assert (found.name, found.implementation) == ("attend", "cuda: attend")
    out = torch.empty(1, 16, 128)
    assert found.scratch is not None
    assert found.scratch(*[None] * 10, out) == scratch_of(TILE, out)
    triton = planned(TRITON, LayerPlan("fused", {"attend": AttendTile(5, 64, 8)})).attend
    assert triton.implementation.startswith("triton")
    with pytest.raises(InputError, match="norm_qkv is not made by kernels with a CudaAttend"):
        LayerPlan("fused", tiles={"norm_qkv": TILE})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"splits": 5, "tokens": 64, "warps": 4}, ""),
        ({"splits": 128, "tokens": 256, "warps": 8}, ""),  # for heads of 128
        ({"splits": 1, "tokens": 64, "warps": 1}, ""),  # for heads of 64
        ({"splits": 129, "tokens": 64, "warps": 4}, "expected 1 to 128 splits, found 129"),
        ({"splits": 5, "tokens": 60, "warps": 4}, "multiple of 64 tokens"),
        ({"splits": 5, "tokens": 512, "warps": 8}, "found 512"),
        ({"splits": 5, "tokens": 64, "warps": 3}, "found 3"),
        ({"splits": 5, "tokens": 256, "warps": 16}, "found 16"),
        ({"splits": 0, "tokens": 64, "warps": 4}, "splits of a tile is a count, found 0"),
        ({"splits": 5, "tokens": 64.0, "warps": 4}, "tokens of a tile is a count"),
        ({"splits": 5, "tokens": 64}, "missing"),
        ({"splits": 5, "tokens": 64, "warps": 4, "heads": 8}, "unexpected"),
    ],
)
def test_a_tile_in_a_file_is_one_that_there_is(fields, told) -> None:
    found = {"layers": "fused", "tiles": {"attend": {"tile": "CudaAttend", **fields}}}
    if not told:
        assert plan_from_json(found).tiles["attend"] == CudaAttend(**fields)
        return
    with pytest.raises(InputError) as caught:
        plan_from_json(found)
    assert told in str(caught.value)


@pytest.mark.usefixtures("on_hopper")
def test_it_serves_one_row_of_shapes_that_it_takes() -> None:
    assert cuda_obstacles(SEED, BF16, CPU, 1, PLAN) == {}
    assert set(cuda_obstacles(SEED, BF16, CPU, 2, PLAN)) == {"attend"}
    wide = LayerPlan("fused", tiles={"attend": CudaAttend(5, 48, 1)})
    assert "up to 32" in cuda_obstacles(SEED, BF16, CPU, 1, wide)["attend"]
    small = replace(SEED, head_dim=32)
    assert "found 32" in cuda_obstacles(small, BF16, CPU, 1, PLAN)["attend"]
    plan = cuda_plan(small, BF16, CPU)
    assert plan is None or "attend" not in plan.tiles


@pytest.mark.usefixtures("on_hopper")
def test_what_a_search_tries() -> None:
    cuda = cuda_plan(SEED, BF16, CPU, 4096 + HEADROOM)
    assert cuda is not None
    assert cuda.tiles["attend"] == CudaAttend(65, 64, 4)
    for context, splits in ((256, {3, 5, 10}), (4096, {17, 33, 65, 128})):
        tiles = cuda_attend_tiles(SEED, context)
        assert {tile.splits for tile in tiles} == splits
        assert all(tile_obstacle(tile, SEED.head_dim) == "" for tile in tiles)
    wide = cuda_attend_tiles(replace(SEED, head_dim=256), 256)
    assert [tile.tokens for tile in wide if not tile.cluster] == [64, 128, 32]
    for context, clusters in ((256, {3, 5}), (4096, set())):
        tiles = cuda_attend_tiles(SEED, context)
        assert {tile.splits for tile in tiles if tile.cluster} == clusters

    def tried(rows: int, cuda: LayerPlan | None) -> set[str]:
        start = LayerPlan("fused")
        changes = dict(knobs(start, SEED, rows, 256, cuda))["attend"]
        return {type(change(start).tiles["attend"]).__name__ for change in changes}

    assert tried(1, cuda) == {"CudaAttend", "AttendTile"}
    assert tried(1, None) == {"AttendTile"}
    assert tried(2, cuda) == {"AttendTile"}
    assert tried(1, cuda.without(["attend"])) == {"AttendTile"}


def test_a_tuned_plan_runs_without_it_where_it_cannot_or_lengths_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", str(tmp_path))
    file = file_of(bucket(1, 256, PLAN))
    file.write(tmp_path / file.key.file_name)
    assert schedule_of(TRITON).choice(1).plan == PLAN
    for context in (64, 4096):
        choice = schedule_of(TRITON, context=context).choice(1)
        assert choice.plan == LayerPlan("fused")
        assert "attention by its own tile" in choice.why
    monkeypatch.setattr(cuda_attend, "obstacle", lambda device: "there is no NVRTC")
    choice = schedule_of(TRITON).choice(1)
    assert choice.plan == LayerPlan("fused")
    assert "attend by Triton, not CUDA C++: there is no NVRTC" in choice.why
