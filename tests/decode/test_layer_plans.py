"""Layer plans: what the tuner tries is right, what it finds is the best, and JSON keeps it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from decoders import KERNELS
from fused_shapes import draw_small
from triton_support import ON_GPU

pytest.importorskip("triton", minversion="3.0")

from graphcap.decode.kernels import decode_kernels
from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.plan_json import plan_from_json, plan_to_json
from graphcap.decode.shapes import preset
from graphcap.errors import InputError
from graphcap.moe.kernels import Backend
from graphcap.tuning.compiling import jobs_of
from graphcap.tuning.search import search
from graphcap.tuning.space import knobs, starts
from graphcap.tuning.trials import Trial, Trials, shortened

TRITON = decode_kernels(Backend("triton", "tests"))
SEED = preset("seed-64")


def every_plan(rows: int, context: int) -> list[LayerPlan]:
    return [job[2] for job in jobs_of(SEED, [(rows, context)])]


@pytest.mark.parametrize(("rows", "context"), [(1, 256), (1, 4096), (8, 256), (32, 256), (64, 256)])
def test_json_keeps_every_plan_that_is_tried(rows: int, context: int) -> None:
    plans = every_plan(rows, context)
    assert len(plans) > 20
    assert any("attend" in plan.tiles for plan in plans)
    for plan in plans:
        assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan


def test_json_that_is_no_plan_is_refused() -> None:
    with pytest.raises(InputError, match=r"expected fields among .*found 'tile'"):
        plan_from_json({"layers": "fused", "tile": {}})
    with pytest.raises(InputError, match="expected what graphcap tune writes"):
        plan_from_json({"tiles": {"attend": {"tile": "AttendTile", "splits": 3}}})
    with pytest.raises(InputError, match="expected one of fused, apart, plain"):
        plan_from_json({"layers": "other"})


@pytest.mark.skipif(ON_GPU, reason="the small models of these tests live on the CPU")
@pytest.mark.parametrize("rows", [1, 3])
def test_plans_that_are_tried_agree_with_the_plain_step(rows: int) -> None:
    weights = draw_small(num_layers=1, mlp_only_layers=())
    trials = Trials(weights, TRITON, rows, 20)
    expected = trials.first_logits(LayerPlan("plain"))
    for start in starts(rows)[:2]:
        for which in (0, -1):  # of every knob one change, all in one step: it takes long here
            plan = start
            for _, changes in knobs(start, weights.shape, rows, 20):
                plan = changes[which](plan)
            assert len(plan.tiles) >= 4
            seen = trials.first_logits(plan)
            torch.testing.assert_close(seen, expected, rtol=1e-3, atol=1e-3, msg=str(plan))


@pytest.mark.skipif(ON_GPU, reason="the small models of these tests live on the CPU")
def test_trials_count_the_experts_that_a_step_reads() -> None:
    weights = draw_small(num_layers=2, mlp_only_layers=())
    shape = weights.shape
    assert Trials(weights, KERNELS, 1, 8).distinct_experts() == shape.top_k
    many = Trials(weights, KERNELS, 6, 8).distinct_experts()
    assert shape.top_k <= many <= shape.num_experts
    assert shortened(weights, 1).layers == weights.layers[:1]
    assert shortened(weights, 1).shape.num_layers == 1


class Fake:
    """A device whose step takes 10 ms and less by some choices; one plan is wrong, one fails."""

    rows, context = 1, 256

    cuda = None
    known = ()

    def __init__(self) -> None:
        self.weights = type("W", (), {"shape": SEED})()
        self.best = every_plan(1, 256)[9]
        self.runs = 0

    def run(self, plan: LayerPlan) -> Trial:
        self.runs += 1
        if plan.layers == "plain":
            return Trial(12.0, 0.0)
        ms = 10.0
        for name, tile in self.best.tiles.items():
            ms -= plan.tiles.get(name) == tile
        ms -= "pair_down" in plan.without_pdl
        if "norm_router" in plan.tiles:
            raise RuntimeError("out of shared memory")
        if "output_residual" in plan.tiles:
            return Trial(1.0, float("nan"))
        return Trial(ms, 0.1)


def test_search_finds_the_best_and_drops_what_is_wrong_or_fails() -> None:
    fake, rows = Fake(), []
    plan, ms = search(fake, time.monotonic() + 60, rows.append)  # type: ignore[arg-type]
    assert fake.best.tiles
    assert ms == 8.0
    assert plan.tiles == fake.best.tiles
    assert "pair_down" in plan.without_pdl
    failures = {row["failed"].split(":")[0] for row in rows if "failed" in row}
    assert failures == {"RuntimeError", "WRONG"}


def test_a_knob_is_set_anew_once_others_are_set_and_no_plan_is_tried_twice() -> None:
    """Here a tile of attention pays only with a tile of a later knob."""
    first = every_plan(1, 256)
    early = next(plan for plan in first if set(plan.tiles) == {"attend"})
    late = next(plan for plan in first if set(plan.tiles) == {"pair_down"})
    tried: list[LayerPlan] = []

    class Together(Fake):
        def run(self, plan: LayerPlan) -> Trial:
            tried.append(plan)
            has_early = plan.tiles.get("attend") == early.tiles["attend"]
            has_late = plan.tiles.get("pair_down") == late.tiles["pair_down"]
            return Trial(10.0 - 2 * (has_early and has_late) - has_late + has_early, 0.0)

    fake: Any = Together()
    plan, ms = search(fake, time.monotonic() + 60, lambda row: None)
    assert (plan.tiles, ms) == ({**early.tiles, **late.tiles}, 8.0)
    changed = [plan for plan in tried if plan.tiles or plan.without_pdl]
    assert all(plan not in changed[:index] for index, plan in enumerate(changed))


def test_search_stops_at_its_deadline_with_the_best_so_far() -> None:
    fake: Any = Fake()
    plan, ms = search(fake, time.monotonic() - 1, lambda row: None)
    assert (plan, ms) == (LayerPlan("fused"), 10.0)
    assert fake.runs == 2
