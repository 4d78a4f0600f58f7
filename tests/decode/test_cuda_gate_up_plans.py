"""pair_gate_up in CUDA C++: which experts and tiles it takes, and what a plan of experts gets of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_samples import H200, SEED, bucket, file_of, pretend

pytest.importorskip("triton", minversion="3.0")

from graphcap.cuda import source
from graphcap.decode.cuda_kernels import cuda_plan
from graphcap.decode.expert_plans import ExpertPlans
from graphcap.decode.kernels import decode_kernels
from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.plan_key import PlanKey
from graphcap.moe.kernels import Backend, cuda_down, cuda_gate_up
from graphcap.moe.kernels.cuda_down import CudaDown
from graphcap.moe.kernels.cuda_gate_up import CudaGateUp

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.fixture
def h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", str(tmp_path))
    pretend(monkeypatch)


def plans() -> ExpertPlans:
    kernels = decode_kernels(Backend("triton", "tests"))
    sizes = PlanKey.of(SEED, BF16, H200).experts
    return ExpertPlans(kernels.experts, kernels.fused, sizes, BF16, torch.device("cuda:0"))


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("sizes", "tile", "words"),
    [
        ((256, 2048, 512, 8), CudaGateUp(32, 16, 96), ""),
        ((128, 2048, 768, 8), CudaGateUp(48, 10, 80), ""),
        ((128, 4096, 256, 8), CudaGateUp(64, 10, 80), "at most 64 registers, found 80"),
        ((128, 4096, 256, 8), CudaGateUp(32, 8, 64), ""),
        ((512, 256, 8, 16), None, ""),
        ((512, 256, 8, 16), CudaGateUp(16, 8, 64), "takes 8 outputs, found 16"),
        ((256, 2048, 520, 8), CudaGateUp(32, 8, 64), "takes 8 outputs, found 32"),
        ((256, 2048, 512, 8), CudaGateUp(48, 8, 64), "takes 64, 32, 16 or 8 outputs, found 48"),
        ((64, 2048, 512, 8), None, "found 64 and 8"),
        ((640, 2048, 512, 8), None, "found 640 and 8"),
        ((256, 2048, 512, 17), None, "17"),
        ((256, 2048, 516, 8), None, "found 516"),
        ((256, 2048, 0, 8), None, "found 0"),
        ((256, 2176, 512, 8), None, "found 2176"),
        ((256, 4352, 512, 8), None, "up to 4,096, found 4352"),
    ],
)
def test_experts_that_the_gate_up_product_takes(sizes, tile, words) -> None:
    why = cuda_gate_up.why_not(*sizes, BF16, CPU, tile)
    assert bool(why) == bool(words)
    assert words in why
    assert "float32" in cuda_gate_up.why_not(*sizes, torch.float32, CPU, tile)


@pytest.mark.parametrize("hidden", [256, 1024, 2048, 2560, 4096])
@pytest.mark.parametrize("top_k", [1, 8, 10, 16])
def test_the_blocks_by_rule_fit_and_share_the_work(hidden: int, top_k: int) -> None:
    for inner in (8, 256, 512, 520, 768, 1024, 1536):
        tile = cuda_gate_up.gate_up_tile(hidden, inner, top_k)
        assert tile is not None
        assert cuda_gate_up.unfit(tile, hidden, inner) == ""
        blocks = top_k * inner // tile.rows
        busiest = -(-blocks // 132) * tile.rows
        for rows in cuda_gate_up.ROWS:
            if inner % rows == 0 and not cuda_gate_up.unfit(CudaGateUp(rows, 8, 64), hidden, inner):
                assert busiest <= -(-(top_k * inner // rows) // 132) * rows


def test_what_is_measured_leaves_the_next_kernel_its_registers() -> None:
    """Of an H200, for the sizes of seed-64: a block of either kernel fills a multiprocessor's registers."""
    tile = cuda_gate_up.gate_up_tile(SEED.hidden_size, SEED.moe_intermediate_size, SEED.top_k)
    assert tile == CudaGateUp(32, 16, 96)
    assert (
        cuda_gate_up.threads_of(SEED.hidden_size) * tile.registers + 32 * SEED.top_k * 64 == 2**16
    )
    assert cuda_gate_up.gate_up_tile(2048, 12, 8) is None
    assert cuda_gate_up.gate_up_tile(8192, 512, 8) is None


# -- plans of experts ------------------------------------------------------------------------------


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("tiles", "lacking"),
    [
        ({"pair_gate_up": CudaGateUp(32, 16, 96)}, "pair_gate_up"),
        ({"pair_gate_up": CudaGateUp(48, 16, 96)}, "pair_gate_up"),  # 48 does not divide 512
        ({"pair_gate_up": CudaGateUp(32, 16, 96), "pair_down": CudaDown(8)}, "pair_gate_up"),
        ({"pair_gate_up": CudaGateUp(32, 16, 96), "pair_down": CudaDown(8)}, "pair_down"),
        ({"pair_gate_up": CudaGateUp(32, 16, 96), "pair_down": CudaDown(8)}, ""),
    ],
)
def test_one_kernel_that_cannot_be_made_in_cuda_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiles: dict[str, Any], lacking: str
) -> None:
    file = file_of(bucket(1, plan=LayerPlan("fused", tiles=tiles)))
    file.write(tmp_path / file.key.file_name)
    for name, kernels in (("pair_gate_up", cuda_gate_up), ("pair_down", cuda_down)):
        why = "there is no NVRTC" if name == lacking else ""
        monkeypatch.setattr(kernels, "obstacle", lambda device, why=why: why)
    found = plans()
    choice = found.choice(1)
    assert choice.source == "cache"
    assert choice.plan.tiles == {name: tile for name, tile in tiles.items() if name != lacking}
    assert choice.lacks.startswith(f"{lacking} by Triton, not CUDA C++: " if lacking else "")
    assert bool(choice.lacks) == bool(lacking)
    for name, kernel in (("pair_gate_up", "gate_up"), ("pair_down", "down")):
        made = getattr(found.kernels(1).pairs, kernel).implementation
        assert made == f"{'cuda' if name in tiles and name != lacking else 'triton'}: {name}"


@pytest.mark.usefixtures("h200")
def test_kernels_of_one_row_serve_no_plan_of_more(tmp_path: Path) -> None:
    tiles = {"pair_gate_up": CudaGateUp(32, 16, 96), "pair_down": CudaDown(8)}
    file = file_of(bucket(2, plan=LayerPlan("fused", tiles=tiles)))
    file.write(tmp_path / file.key.file_name)
    choice = plans().choice(2)
    both = "pair_down, pair_gate_up by Triton, not CUDA C++: they take one row, found 2"
    assert (choice.plan.in_cuda, choice.lacks) == ((), both)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("version", "lacking"), [((12, 3), True), ((12, 4), False), ((13, 0), False)]
)
def test_an_old_nvrtc_costs_this_kernel_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], lacking: bool
) -> None:
    """Before 12.4 there is no `__maxnreg__`, while all other sources compile: found by the first run, that
    would cost the whole plan."""
    ok = SimpleNamespace(value=0, name="NVRTC_SUCCESS")
    nvrtc = SimpleNamespace(nvrtcVersion=lambda: (ok, *version))
    monkeypatch.setattr(source, "libraries", lambda: (None, nvrtc))
    tiles = {"pair_gate_up": CudaGateUp(32, 16, 96), "pair_down": CudaDown(8)}
    file = file_of(bucket(1, plan=LayerPlan("fused", tiles=tiles)))
    file.write(tmp_path / file.key.file_name)
    choice = plans().choice(1)
    assert choice.plan.in_cuda == (("pair_down",) if lacking else ("pair_down", "pair_gate_up"))
    assert choice.lacks == (
        "pair_gate_up by Triton, not CUDA C++: it needs NVRTC 12.4, found 12.3" if lacking else ""
    )
    tuned = cuda_plan(SEED, BF16, CPU)
    assert tuned is not None
    assert ("pair_gate_up" in tuned.tiles) is not lacking
