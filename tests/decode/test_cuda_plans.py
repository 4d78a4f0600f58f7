"""Kernels in CUDA C++: whom they serve, what a plan may ask of them, and what runs where they cannot."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from plan_samples import SEED, bucket, file_of, pretend, schedule_of

pytest.importorskip("triton", minversion="3.0")

from graphcap.cuda import source
from graphcap.decode.cuda_kernels import cuda_obstacles, cuda_plan
from graphcap.decode.kernels import cuda_attend, cuda_linear, decode_kernels
from graphcap.decode.kernels.cuda_linear import CudaRows
from graphcap.decode.kernels.triton_fused_attention import AttendTile
from graphcap.decode.layer_plan import CUDA_TILES, LayerPlan, planned
from graphcap.decode.plan_json import plan_from_json, plan_to_json
from graphcap.decode.shapes import preset
from graphcap.errors import BackendError, InputError
from graphcap.moe.kernels import Backend, cuda_down, cuda_gate_up
from graphcap.moe.kernels.cuda_down import CudaDown
from graphcap.moe.kernels.cuda_gate_up import CudaGateUp
from graphcap.tuning.space import knobs, starts

CPU = torch.device("cpu")
BF16 = torch.bfloat16
TRITON = decode_kernels(Backend("triton", "tests"))
IN_CUDA = {
    "norm_qkv": CudaRows(20),
    "output_residual": CudaRows(8),
    "norm_router": CudaRows(2),
    "pair_gate_up": CudaGateUp(16, 8, 64),
    "pair_down": CudaDown(16),
}
PLAN = LayerPlan("fused", tiles={**IN_CUDA, "attend": AttendTile(5, 64, 8)})


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels in (cuda_attend, cuda_linear, cuda_gate_up, cuda_down):
        monkeypatch.setattr(kernels, "obstacle", lambda device: "")


def test_sources_are_packaged() -> None:
    names = {path.name for path in source.HERE.iterdir()}
    assert {"common.cuh", "choice.cuh", "linear.cu", "gate_up.cu", "down.cu"} <= names


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("columns", "dtype", "tile", "words"),
    [
        (2048, BF16, None, ""),
        (4096, torch.float16, CudaRows(20), ""),
        (2048, torch.float32, None, "float32"),
        (2000, BF16, None, "2000"),
        (4352, BF16, None, "up to 4096"),
        (128, BF16, None, "128"),
        (2048, BF16, CudaRows(21), "found 21"),
        (2048, BF16, CudaRows(0), "found 0"),
    ],
)
def test_rows_that_projections_take(columns, dtype, tile, words) -> None:
    why = cuda_linear.why_not(columns, dtype, CPU, tile)
    assert bool(why) == bool(words)
    assert words in why


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("sizes", "tile", "words"),
    [
        ((256, 2048, 512, 8), CudaDown(16), ""),
        ((128, 2048, 768, 8), None, ""),
        ((128, 2048, 1024, 8), CudaDown(8), ""),
        ((128, 2048, 1024, 8), CudaDown(16), "8 or 4"),
        ((64, 2048, 512, 8), None, "found 64 and 8"),
        ((256, 2048, 512, 17), None, "17"),
        ((256, 2048, 520, 8), None, "520"),
        ((256, 2040, 512, 8), None, "2040"),
        ((256, 2048, 512, 8), CudaDown(3), "found 3"),
    ],
)
def test_experts_that_the_down_projection_takes(sizes, tile, words) -> None:
    why = cuda_down.why_not(*sizes, BF16, CPU, tile)
    assert bool(why) == bool(words)
    assert words in why
    assert "float32" in cuda_down.why_not(256, 2048, 512, 8, torch.float32, CPU)


def test_a_block_holds_what_shared_memory_does() -> None:
    for inner in (256, 512, 768, 1024):
        for top_k in (1, 2, 4, 8, 10, 16):
            tile = cuda_down.down_tile(inner, top_k)
            assert tile is not None
            assert tile.rows * inner * top_k * 2 <= cuda_down.SHARED_MEMORY
    assert cuda_down.down_tile(16384, 16) is None
    for outputs in (1, 128, 256, 2048, 2560, 5120, 9216):
        rows = cuda_linear.rows_tile(outputs).rows
        assert 1 <= rows <= cuda_linear.MOST_ROWS
        assert outputs <= rows * 128 or rows == cuda_linear.MOST_ROWS


def test_no_device_no_kernel() -> None:
    assert "found cpu" in source.obstacle(CPU)
    assert set(cuda_obstacles(SEED, BF16, CPU, 1)) == set(CUDA_TILES)
    assert cuda_plan(SEED, BF16, CPU) is None


def test_without_cuda_bindings_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    source.libraries.cache_clear()
    with pytest.raises(BackendError, match=r"vllm-graphcap\[cuda\]"):
        source.libraries()
    source.libraries.cache_clear()


@pytest.mark.parametrize(
    ("status", "missing", "built", "told"),
    [
        (7, "", 0, "nvrtcVersion: expected the driver to take it, found NVRTC_ERROR"),
        (0, "cuLaunchKernelEx", 0, "no attribute 'cuLaunchKernelEx'"),
        (0, "nvrtcCreateProgram", 0, "no attribute 'nvrtcCreateProgram'"),
        (0, "", 5, "linear.cu: expected NVRTC to compile it, found NVRTC_ERROR: too old"),
        (0, "", 0, ""),
    ],
)
def test_bindings_that_load_and_cannot_serve_are_an_obstacle(
    monkeypatch: pytest.MonkeyPatch, status: int, missing: str, built: int, told: str
) -> None:
    def said(value: int, *more: object) -> tuple[object, ...]:
        return (SimpleNamespace(value=value, name="NVRTC_ERROR"), *more)

    log = b"too old "

    def write_log(program: object, buffer: bytes) -> tuple[object, ...]:
        ctypes.memmove(buffer, log, len(log))
        return said(0)

    nvrtc = {
        "nvrtcVersion": lambda: said(status, 13, 0),
        "nvrtcCreateProgram": lambda *_: said(0, "program"),
        "nvrtcCompileProgram": lambda *_: said(built),
        "nvrtcGetProgramLogSize": lambda _: said(0, len(log)),
        "nvrtcGetProgramLog": write_log,
        "nvrtcGetCUBINSize": lambda _: said(0, 4),
        "nvrtcGetCUBIN": lambda *_: said(0),
        "nvrtcDestroyProgram": lambda _: said(0),
    }
    names = ("cuLaunchKernelEx", "CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID")
    bindings = ModuleType("cuda.bindings")
    bindings.driver = SimpleNamespace(**{n: None for n in names if n != missing})
    bindings.nvrtc = SimpleNamespace(**{n: f for n, f in nvrtc.items() if n != missing})
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    pretend(monkeypatch)
    for cached in (source.libraries, source.compiled):
        cached.cache_clear()
    try:
        found = source.obstacle(torch.device("cuda:0"))
    finally:
        for cached in (source.libraries, source.compiled):
            cached.cache_clear()
    assert bool(found) == bool(told)
    assert told in found


def test_everything_compiles_without_a_device() -> None:
    try:
        source.libraries()
    except BackendError as error:
        pytest.skip(str(error))
    linear = {"HALF": 0, "PDL": 1, "COLUMNS": 512, "OUTPUTS": 37, "ROWS": 5, "NORM": 1, "DELTA": 1}
    linear |= {"NORMED": 1, "BIAS": 1, "RESIDUAL": 0, "FLOAT_OUT": 1}
    assert source.compiled("linear.cu", source.as_constants(linear), (9, 0))
    experts = {"HALF": 1, "PDL": 1, "E": 512, "H": 256, "INNER": 256, "K": 3, "ROWS": 8}
    experts |= {"RENORMALIZE": 0, "row_id_t": "int"}
    assert source.compiled("down.cu", source.as_constants(experts), (9, 0))
    experts |= {"DEPTH": 8, "REGISTERS": 64}
    assert source.compiled("gate_up.cu", source.as_constants(experts), (9, 0))
    with pytest.raises(BackendError, match=r"linear\.cu: expected NVRTC to compile it"):
        source.compiled("linear.cu", source.as_constants({**linear, "ROWS": "banana"}), (9, 0))


# -- plans ---------------------------------------------------------------------------------------


def test_plans_in_cuda_pass_through_json() -> None:
    assert plan_from_json(plan_to_json(PLAN)) == PLAN
    assert PLAN.in_cuda == tuple(sorted(IN_CUDA))


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("attend", CudaRows(4)),
        ("pair_gate_up", CudaDown(8)),
        ("pair_down", CudaGateUp(16, 8, 64)),
        ("gated_gemm", CudaGateUp(16, 8, 64)),
        ("norm_qkv", CudaDown(8)),
    ],
)
def test_a_tile_of_another_kernel_is_refused(name: str, tile: object) -> None:
    with pytest.raises(InputError, match=name):
        LayerPlan("fused", tiles={name: tile})


def test_the_tile_says_which_kernel_runs() -> None:
    found = planned(TRITON, PLAN)
    pairs = found.decode.experts.pairs
    assert pairs is not None
    made = [found.norm_qkv, found.output_residual, found.norm_router, pairs.gate_up, pairs.down]
    assert [each.implementation for each in made] == [
        *["cuda: linear"] * 3,
        "cuda: pair_gate_up",
        "cuda: pair_down",
    ]
    assert [each.name for each in made] == sorted(IN_CUDA, key=list(IN_CUDA).index)
    plain = planned(TRITON, LayerPlan("fused"))
    assert plain.decode.experts.pairs is not None
    others = (found.attend, plain.decode.experts.pairs.gate_up, plain.norm_qkv)
    assert all(each.implementation.startswith("triton") for each in others)


@pytest.mark.usefixtures("on_hopper")
def test_a_plan_for_one_row_serves_no_other() -> None:
    assert cuda_obstacles(SEED, BF16, CPU, 1, PLAN) == {}
    assert set(cuda_obstacles(SEED, BF16, CPU, 2, PLAN)) == set(IN_CUDA)
    apart = LayerPlan("apart", tiles=IN_CUDA)
    assert all("apart" in why for why in cuda_obstacles(SEED, BF16, CPU, 1, apart).values())


@pytest.mark.usefixtures("on_hopper")
def test_what_serves_a_shape_is_what_a_search_starts_from() -> None:
    cuda = cuda_plan(SEED, BF16, CPU)
    assert cuda is not None
    assert set(cuda.in_cuda) == set(CUDA_TILES)
    assert cuda in starts(1, cuda)
    assert all(not plan.in_cuda for plan in starts(2, cuda))
    tried = {
        tile
        for _, changes in knobs(cuda, SEED, 1, 256, cuda)
        for change in changes
        for tile in change(cuda).tiles.values()
    }
    assert {CudaRows(20), CudaRows(2), CudaDown(16), CudaDown(8)} <= tried
    blocks = {tile for tile in tried if isinstance(tile, CudaGateUp)}
    assert {CudaGateUp(32, 16, 96), CudaGateUp(16, 8, 64), CudaGateUp(64, 10, 80)} <= blocks
    sizes = (SEED.num_experts, SEED.hidden_size, SEED.moe_intermediate_size, SEED.top_k)
    assert not any(cuda_gate_up.why_not(*sizes, BF16, CPU, tile) for tile in blocks)
    without = cuda.without(["pair_gate_up"])
    for _, changes in knobs(without, SEED, 1, 256, without):
        tiles = (change(without).tiles.get("pair_gate_up") for change in changes)
        assert not any(isinstance(tile, CudaGateUp) for tile in tiles)
    tiny = cuda_plan(preset("tiny"), BF16, CPU)
    assert tiny is None or not {"pair_gate_up", "pair_down"} & set(tiny.in_cuda)


def test_a_tuned_plan_runs_without_what_cannot_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", str(tmp_path))
    file = file_of(bucket(1, 256, PLAN))
    file.write(tmp_path / file.key.file_name)
    monkeypatch.setattr(cuda_linear, "obstacle", lambda device: "there is no NVRTC")
    choice = schedule_of(TRITON).choice(1)
    assert choice.source == "cache"
    assert choice.plan.in_cuda == ("pair_down", "pair_gate_up")
    assert (
        "norm_qkv, norm_router, output_residual by Triton, not CUDA C++: there is no" in choice.why
    )
    monkeypatch.setattr(cuda_linear, "obstacle", lambda device: "")
    assert set(schedule_of(TRITON).choice(1).plan.in_cuda) == set(IN_CUDA)
