"""bench/plans_table.py: of every load the fastest of what a run measured on the whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.0")

import plans_table

from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.plan_files import read_plans

APART = {"layers": "apart", "block": 16}


def step(rows: int, schedule: str, plan: dict[str, object], **more: object) -> dict[str, object]:
    return {"rows": rows, "context": 256, "schedule": schedule, "plan": plan, **more}


def test_a_table_holds_the_fastest_plan_of_each_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {
        "shape": "seed-64",
        "layers": 64,
        "machine": {"card": "NVIDIA H200", "driver": "580", "triton": "3.6", "commit": "abc"},
        "steps": [
            step(8, "plain", {"layers": "plain"}, ms=8.0),
            step(8, "default", APART, ms=7.0),
            step(8, "tuned", {**APART, "without_pdl": ["merge"]}, ms=6.5),
            step(1, "plain", {"layers": "plain"}, ms=3.0),
            step(1, "default", {"layers": "fused"}, ms=2.0),
            step(1, "tuned", {"layers": "fused", "block": 16}, failed="RuntimeError"),
            step(2, "plain", {"layers": "plain"}, ms=3.0),
            step(2, "default", {"layers": "fused"}, ms=2.5),
            step(2, "tuned", {"layers": "fused", "block": 16}, ms=2.75),
        ],
        "trials": [{"rows": 8, "context": 256}, {"rows": 8, "context": 4096}],
    }
    (tmp_path / "run.json").write_text(json.dumps(run))
    monkeypatch.setattr(plans_table, "digest_at", lambda commit: f"digest of {commit}")
    out = tmp_path / "tables" / "h200.json"
    assert plans_table.main([str(tmp_path / "run.json"), "--out", str(out)]) == 0
    table = read_plans(out)
    assert (table.key.device, table.key.dtype, table.shape) == (
        "NVIDIA H200",
        "bfloat16",
        "seed-64",
    )
    assert table.kernels == "digest of abc"
    assert table.machine == {"driver": "580", "triton": "3.6", "commit": "abc"}
    assert [(b.rows, b.plan, b.ms, b.tried) for b in table.buckets] == [
        (1, LayerPlan("fused"), 2.0, 0),
        (2, LayerPlan("fused"), 2.5, 0),
        (8, LayerPlan("apart", block=16, without_pdl=frozenset({"merge"})), 6.5, 1),
    ]
    assert [(b.plain_ms, b.default_ms, b.layers) for b in table.buckets][2] == (8.0, 7.0, 64)
