"""Plans of routed experts whose layer is somebody else's: which one serves, and that sums stay the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import SHAPE, batch_at, make_cache
from plan_samples import H200, SEED, bucket, file_of, pretend, schedule_of

pytest.importorskip("triton", minversion="3.0")

from graphcap.decode import expert_plans as module
from graphcap.decode import plan_choice
from graphcap.decode.delta_shape import DeltaShape
from graphcap.decode.expert_plans import ExpertPlans
from graphcap.decode.kernels import decode_kernels
from graphcap.decode.layer_plan import EXPERT_CHAIN, TILED, LayerPlan
from graphcap.decode.plan_files import PlanFile, tables
from graphcap.decode.plan_key import ExpertSizes, PlanKey
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.decode.step import DecodeStep
from graphcap.moe.experts import RoutedExperts
from graphcap.moe.kernels import Backend, cuda_down
from graphcap.moe.kernels.triton_gemm import Tile
from graphcap.moe.kernels.triton_pairs import PairTile
from graphcap.pool import BufferPool

TRITON = decode_kernels(Backend("triton", "tests"))
REFERENCE = decode_kernels(Backend("reference", "tests"))
CUDA = torch.device("cuda:0")
SIZES = PlanKey.of(SEED, torch.bfloat16, H200).experts


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(plan_choice, "_told", set())


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


def plans(
    sizes: ExpertSizes = SIZES, dtype: torch.dtype = torch.bfloat16, device: torch.device = CUDA
) -> ExpertPlans:
    return ExpertPlans(TRITON.experts, TRITON.fused, sizes, dtype, device)


# -- which plan ------------------------------------------------------------------------------------


def table() -> PlanFile:
    (found,) = [file for name, file in tables() if name == "h200_seed-64.json"]
    return found


@pytest.mark.usefixtures("h200")
def test_the_table_of_one_model_serves_the_experts_of_another() -> None:
    other = preset("qwen3.6-35b-a3b")
    assert other.num_heads * other.head_dim != SEED.num_heads * SEED.head_dim
    found = plans(PlanKey.of(other, torch.bfloat16, H200).experts)
    measured = {each.rows: each.plan for each in table().buckets if each.context == 256}
    for rows in range(1, 65):
        choice = found.choice(rows)
        whole = measured[min(size for size in measured if size >= rows)]
        assert (choice.source, choice.plan) == ("table", whole.of_experts())
        assert choice.file.startswith("h200_seed-64.json")
        assert choice.lacks == ""
        assert f"tuned for {min(s for s in measured if s >= rows)} rows" in choice.why
    assert found.choice(1).plan.in_cuda == ("pair_down", "pair_gate_up")
    assert found.kernels(1).pairs.gate_up.implementation == "cuda: pair_gate_up"
    assert found.kernels(1).pairs.down.implementation == "cuda: pair_down"
    assert found.kernels(2).pairs.down.implementation == "triton: pair_down"


def test_the_part_of_a_plan_that_concerns_experts() -> None:
    tile = Tile(64, 64, 4, 4)
    whole = LayerPlan(
        "apart",
        tiles=dict.fromkeys(set(TILED) - {"pair_down"}, tile),
        blas=frozenset({"qkv"}),
        without_pdl=frozenset({"merge", "attend", "add_norm"}),
        block=32,
    )
    part = whole.of_experts()
    assert (
        set(part.tiles)
        == {
            "router",
            "gated_gemm",
            "down_gemm",
            "pair_gate_up",
        }
        <= set(EXPERT_CHAIN)
    )
    assert part == LayerPlan("apart", tiles=part.tiles, without_pdl=frozenset({"merge"}), block=32)


@pytest.mark.usefixtures("h200")
def test_a_plan_of_this_machine_comes_before_the_table(tmp_path: Path) -> None:
    own = LayerPlan("apart", tiles={"gated_gemm": Tile(32, 64, 4, 2)}, block=16)
    other_attention = replace(SEED, num_heads=8)
    file = file_of(bucket(8, plan=own), shape=other_attention)
    file.write(tmp_path / file.key.file_name)
    found = plans()
    choice = found.choice(8)
    assert (choice.source, choice.plan) == ("cache", own)
    assert choice.file == str(tmp_path / file.key.file_name)
    assert found.choice(16).source == "table"  # the cache has none for it


@pytest.mark.usefixtures("h200")
def test_a_plan_without_tiles_for_experts_is_passed_over(tmp_path: Path) -> None:
    file = file_of(bucket(8, plan=LayerPlan("plain")))
    file.write(tmp_path / file.key.file_name)
    assert plans().choice(8).source == "table"


@pytest.mark.usefixtures("h200")
def test_who_has_tuned_is_not_told_to_tune(tmp_path: Path) -> None:
    shape = replace(SEED, top_k=4)  # the table has none of these
    file = file_of(bucket(8, plan=LayerPlan("plain")), shape=shape)
    file.write(tmp_path / file.key.file_name)
    found = plans(file.key.experts)
    assert (found.choice(8).source, found.choice(8).plan.layers) == ("default", "apart")
    assert "plain ones were the fastest" in found.choice(8).why
    assert "graphcap tune" not in found.choice(8).why
    assert "no tuned plan serves this batch; graphcap tune finds one" in found.choice(16).why


@pytest.mark.usefixtures("h200")
def test_files_for_other_experts_are_left_alone_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stale = {"kernels": "0" * 16}  # would be told of, were it for these
    others: list[dict[str, Any]] = [
        {"shape": replace(SEED, top_k=4)},
        {"dtype": torch.float16},
        {"device": "NVIDIA H100"},
    ]
    for changes in others:
        file = file_of(bucket(8), **{**changes, **stale})
        file.write(tmp_path / file.key.file_name)
    assert plans().choice(8).source == "table"
    assert caplog.text == ""


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("what", ["stale", "broken"])
def test_a_file_that_cannot_be_used_is_told_of_once(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = file_of(bucket(8), kernels="0" * 16)
    path = tmp_path / file.key.file_name
    file.write(path)
    if what == "broken":
        path.write_text("{")
    with caplog.at_level(logging.WARNING, "graphcap"):
        for _ in range(2):
            assert plans().choice(8).source == "table"
    assert caplog.text.count("tuned plans are not used") == 1
    assert str(path) in caplog.text


@pytest.mark.usefixtures("h200")
def test_where_no_cuda_can_be_compiled_triton_serves_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_down, "obstacle", lambda device: "there is no NVRTC")
    found = plans()
    choice = found.choice(1)
    assert choice.lacks == "pair_down by Triton, not CUDA C++: there is no NVRTC"
    assert choice.lacks in choice.why
    assert "pair_down" not in choice.plan.tiles
    assert found.kernels(1).pairs.down.implementation == "triton: pair_down"


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("experts", "top_k", "rows", "layers", "block"),
    [
        (64, 4, 1, "fused", None),
        (64, 4, 2, "fused", None),
        (64, 4, 3, "apart", 16),
        (64, 4, 64, "apart", 16),
        (8, 2, 32, "apart", 16),
        (8, 2, 33, "apart", None),  # more than 8 pairs an expert
    ],
)
def test_by_rule_where_nothing_was_measured(
    experts: int, top_k: int, rows: int, layers: str, block: int | None
) -> None:
    found = plans(ExpertSizes(2048, experts, top_k, 768))
    choice = found.choice(rows)
    assert (choice.source, choice.plan) == ("default", LayerPlan(layers, block=block))
    assert "graphcap tune" in choice.why
    kernels = found.kernels(rows)
    assert kernels.block == block
    assert kernels.router_gemm.name == TRITON.experts.router_gemm.name
    own_router = layers == "apart"
    assert (kernels.router_gemm is not TRITON.experts.router_gemm) == own_router


def test_the_choice_is_made_once() -> None:
    found = plans(device=torch.device("cpu"))
    assert found.choice(3) is found.choice(3)
    assert found.kernels(3) is found.kernels(3)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"device": torch.device("cpu")}, "the device is cpu"),
        ({"dtype": torch.float32}, "weights are float32"),
        ({"sizes": SIZES._replace(hidden_size=8200)}, "rows of 8200 values"),
    ],
)
def test_what_no_plan_serves_runs_on_the_kernels_as_they_are(how: dict[str, Any], why: str) -> None:
    found = plans(**how)
    choice = found.choice(1)
    assert (choice.source, choice.plan) == ("not supported", LayerPlan("plain"))
    assert why in choice.why
    assert found.kernels(1) is TRITON.experts


@pytest.mark.usefixtures("h200")
def test_large_batches_and_other_backends_run_on_the_kernels_as_they_are() -> None:
    choice = plans().choice(65)
    assert (choice.source, choice.plan) == ("not supported", LayerPlan("plain"))
    assert plans().kernels(65) is TRITON.experts
    reference = ExpertPlans(REFERENCE.experts, REFERENCE.fused, SIZES, torch.bfloat16, CUDA)
    assert reference.choice(1).why == "reference kernels are to run without plans"
    assert reference.kernels(1) is REFERENCE.experts


# -- what they compute -----------------------------------------------------------------------------

EXPERTS, TOP_K, HIDDEN, INNER = 12, 3, 40, 24


def expected(
    hidden: torch.Tensor, layer: RoutedExperts, row_ids: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for row in (row_ids >= 0).nonzero().flatten().tolist():
        token = hidden[row].double()
        share = torch.softmax(layer.router.double() @ token, 0)
        best = share.topk(TOP_K).indices
        for expert in best.tolist():
            gate, up = (layer.gate_up[expert].double() @ token).split(INNER)
            part = layer.down[expert].double() @ (gate * torch.sigmoid(gate) * up)
            out[row] += share[expert] / share[best].sum() * part
    return out if residual is None else out + residual.double()


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("rows", "plan"),
    [
        (
            1,
            LayerPlan(
                "fused", tiles={"pair_gate_up": PairTile(2, 32), "pair_down": PairTile(2, 16)}
            ),
        ),
        (2, LayerPlan("apart", block=16)),
        (3, LayerPlan("apart", without_pdl=frozenset({"merge"}), block=16)),
        (7, LayerPlan("apart", tiles={"gated_gemm": Tile(16, 32, 4, 2)}, block=32)),
        (9, None),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_sums_are_those_of_float64(
    rows: int, plan: LayerPlan | None, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(torch.initial_seed() % 2**31)
    # Full precision: a router's near-tie cannot fall otherwise than in the sum it is held against.
    monkeypatch.setattr(module, "device_obstacle", lambda dtype, device: None)
    found = plans(ExpertSizes(HIDDEN, EXPERTS, TOP_K, INNER), torch.float32)
    if plan is not None:
        monkeypatch.setattr(found, "_choose", lambda rows: replace(bare, plan=plan))
        bare = plan_choice.PlanChoice(rows, plan, "cache", "test")

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    pool = BufferPool("cpu")
    ran: list[str] = []
    run = pool.run
    monkeypatch.setattr(
        pool, "run", lambda op, *args: (ran.append(op.implementation), run(op, *args))[1]
    )
    layer = RoutedExperts(
        found.kernels(rows),
        pool,
        normal(EXPERTS, HIDDEN),
        normal(EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5,
        normal(EXPERTS, HIDDEN, INNER) / INNER**0.5,
        top_k=TOP_K,
        renormalize=True,
    )
    hidden, row_ids = normal(rows, HIDDEN), torch.arange(rows)
    if rows > 1:
        row_ids[1] = -1
        hidden[1] = float("nan")
    residual = normal(rows, HIDDEN) if shared else None
    wanted = expected(hidden, layer, row_ids, residual)
    out = torch.full_like(hidden, float("nan"))
    with pool.step():
        layer(hidden, row_ids, out, residual)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    grouped = rows > 2  # 12 experts have more than half a pair each
    assert ("triton: gated_gemm" in ran) == grouped
    assert ("triton: fused_linear" in ran) == (rows > 1)


# -- hybrids ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("h200")
def test_experts_of_a_hybrid_run_by_plan_where_its_layers_cannot() -> None:
    shape = preset("qwen3.6-35b-a3b")
    schedule = schedule_of(TRITON, shape)
    choice = schedule.choice(8)
    assert (choice.plan, choice.source) == (LayerPlan("plain"), "not supported")
    assert choice.experts is not None
    assert choice.experts.source == "table"
    assert f", its experts {choice.experts}" in str(choice)
    assert schedule.experts(8).gated_gemm is not None
    assert schedule.experts(65) is TRITON.experts
    for asked in ("plain",):
        assert schedule_of(TRITON, shape, name=asked).experts(8) is None
    assert schedule_of(TRITON, SEED).experts(8) is None


def hybrid_logits(schedule: str, rows: int) -> tuple[torch.Tensor, list[str]]:
    """Of one step of a small model, and what it ran on."""
    shape = replace(
        SHAPE,
        model_type="qwen3_next",
        num_layers=2,
        mlp_only_layers=(),
        attention_bias=False,
        linear_layers=(0,),
        delta=DeltaShape(num_key_heads=2, num_value_heads=2, key_dim=6, value_dim=6, conv_width=4),
        rotary_dim=4,
        shared_intermediate_size=20,
    )
    weights = random_weights(shape, device="cpu", dtype=torch.float32, seed=5)
    cache = make_cache(weights, kernels=TRITON)
    cache.fill_random(1)
    pool = BufferPool("cpu")
    ran: list[str] = []
    run = pool.run
    pool.run = lambda op, *args: (ran.append(op.implementation), run(op, *args))[1]  # type: ignore[assignment]
    step = DecodeStep(weights, cache, TRITON, pool, schedule=schedule)
    tables = torch.stack([cache.allocate(24) for _ in range(rows)])
    batch = batch_at(tables, [3] * rows, list(range(5, 5 + rows)))
    out = step({**batch, "state_slots": torch.arange(1, rows + 1)})
    return out["logits"].clone(), ran


def test_a_step_of_a_hybrid_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_obstacle", lambda dtype, device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: H200)
    found, ran = hybrid_logits("auto", 4)
    plain, without = hybrid_logits("plain", 4)
    assert ran.count("triton: gated_gemm") == 2  # a layer
    assert "triton: gated_gemm" not in without
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-4)
