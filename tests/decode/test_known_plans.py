"""Plans that were measured before, by whatever kernels, as starts of a search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_samples import SEED, bucket, file_of, pretend

pytest.importorskip("triton", minversion="3.0")

from graphcap.decode.layer_plan import LayerPlan
from graphcap.moe.kernels import cuda_down
from graphcap.moe.kernels.cuda_down import CudaDown
from graphcap.tuning import known as known_module
from graphcap.tuning.known import known_plans, no_plans
from graphcap.tuning.search import search
from graphcap.tuning.trials import Trial

CUDA = torch.device("cuda:0")
OTHER = LayerPlan("apart", block=32)


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


def known(path: Path, **changes: Any) -> Any:
    return known_plans(path, replace(SEED, **changes), torch.bfloat16, CUDA)


def test_the_table_of_this_device_serves_and_a_file_of_other_kernels_comes_first(
    tmp_path: Path,
) -> None:
    path = tmp_path / "plans.json"
    (of_table,) = known(path)(8, 256)
    assert of_table.layers == "apart"
    stale = replace(file_of(bucket(8, 256, OTHER), bucket(8, 4096)), kernels="of last year")
    stale.write(path)
    assert known(path)(8, 300) == (OTHER, of_table)
    assert known(path)(5, 256) == ()
    path.write_text("no JSON")
    assert known(path)(8, 256) == (of_table,)


def test_a_plan_that_both_hold_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plans.json"
    file = file_of(bucket(8, 256, OTHER), bucket(2, 256, LayerPlan("plain")))
    file.write(path)
    monkeypatch.setattr(known_module, "tables", lambda: (("table.json", file),))
    assert known(path)(8, 256) == (OTHER,)
    assert known(path)(2, 256) == ()  # plain is measured in any case


def test_those_of_another_model_do_not_serve(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    file_of(bucket(8, 256, OTHER)).write(path)
    assert known(path, num_kv_heads=1)(8, 256) == ()


def test_what_cannot_be_had_in_cuda_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plans.json"
    plan = LayerPlan("fused", tiles={"pair_down": CudaDown(4)}, without_pdl=frozenset({"attend"}))
    file_of(bucket(1, 256, plan)).write(path)
    assert known(path)(1, 256)[0] == plan
    monkeypatch.setattr(cuda_down, "obstacle", lambda device: "no NVRTC")
    assert known(path)(1, 256)[0] == replace(plan, tiles={})


@pytest.mark.parametrize("plans", [(), (OTHER,)])
def test_a_search_starts_from_it_too(plans: tuple[LayerPlan, ...]) -> None:
    """Without time to try anything else: it is measured all the same, and kept where it is the fastest."""
    asked: list[LayerPlan] = []

    def run(plan: LayerPlan, turns: int = 5, calls: int = 8) -> Trial:
        asked.append(plan)
        return Trial(1.0 if plan == OTHER else 2.0, 0.0)

    trials: Any = SimpleNamespace(
        run=run,
        rows=8,
        context=256,
        cuda=None,
        known=plans,
        weights=SimpleNamespace(shape=SEED),
    )
    best, ms = search(trials, 0.0, lambda row: None)
    assert (best == OTHER, ms) == ((True, 1.0) if plans else (False, 2.0))
    assert asked.count(OTHER) == len(plans)


def test_none_without_being_asked() -> None:
    assert no_plans(1, 256) == ()
