"""Tuning loads, with devices that are not there: what wins, what it keeps, how it shares its time."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_samples import H200, SEED, bucket, file_of, pretend

pytest.importorskip("triton", minversion="3.0")

from graphcap.decode.kernels import decode_kernels
from graphcap.decode.layer_plan import LayerPlan, default_plan
from graphcap.decode.plan_files import TunedBucket, read_plans
from graphcap.decode.plan_key import PlanKey, kernels_digest, versions_here
from graphcap.decode.shapes import preset
from graphcap.errors import BackendError, InputError
from graphcap.moe.kernels import Backend
from graphcap.tuning import tune as tune_module
from graphcap.tuning.space import knobs, starts
from graphcap.tuning.trials import Trial
from graphcap.tuning.tunable import check_tunable
from graphcap.tuning.tune import forecast, plan_file, tune

TRITON = decode_kernels(Backend("triton", "tests"))
REFERENCE = decode_kernels(Backend("reference", "tests"))
OTHER = LayerPlan("apart", block=32)
CUDA = torch.device("cuda:0")
PLAIN = LayerPlan("plain")

MS: dict[str, float] = {"plain": 4.0, "fused": 3.0, "apart": 3.5}


class Fake:
    """Steps that take what `times` says, by plan or by its layers; a missing time is a failure."""

    times: dict[str, float] = MS

    def __init__(self, weights: Any, kernels: Any, rows: int, context: int) -> None:
        self.weights, self.rows, self.context = weights, rows, context

    def run(self, plan: LayerPlan, turns: int = 5, calls: int = 8) -> Trial:
        ms = self.times.get(repr(plan), self.times.get(plan.layers))
        if ms is None:
            raise RuntimeError("out of resource: shared memory")
        return Trial(ms, 0.0)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    pretend(monkeypatch)
    own = dict(MS)
    monkeypatch.setattr(Fake, "times", own)
    monkeypatch.setattr(tune_module, "Trials", Fake)
    return own


def tuned(find: Any, loads: list[tuple[int, int]], seconds: float = 60) -> list[Any]:
    weights: Any = SimpleNamespace(shape=SEED, dtype=torch.bfloat16, device=CUDA)
    return list(tune(weights, TRITON, loads, seconds, find=find))


def finds(plan: LayerPlan) -> Any:
    def find(trials: Any, deadline: float, show: Any) -> tuple[LayerPlan, float]:
        show({"rows": trials.rows, "context": trials.context, "knob": "x", "ms": 1, "plan": plan})
        return plan, 1.0

    return find


def test_the_fastest_of_plain_default_and_found_is_kept(times: dict[str, float]) -> None:
    found = LayerPlan("fused", without_pdl=frozenset({"attend"}))
    times[repr(found)] = 2.5
    (one,) = tuned(finds(found), [(1, 256)])
    assert one.bucket == TunedBucket(1, 256, found, 2.5, 4.0, 3.0, SEED.num_layers, 4)
    assert [row["knob"] for row in one.candidates] == ["x", "final", "final", "final"]


def test_what_was_found_and_is_no_faster_at_last_is_not_kept(times: dict[str, float]) -> None:
    """The search measures each plan once; the last measurement decides."""
    found = LayerPlan("fused", without_pdl=frozenset({"attend"}))
    for ms, kept in ((3.5, default_plan(1)), (2.9999, default_plan(1)), (2.9, found)):
        times[repr(found)] = ms
        (one,) = tuned(finds(found), [(1, 256)])
        assert one.bucket.plan == kept, ms
    times["plain"] = 1.0
    (one,) = tuned(finds(found), [(1, 256)])
    assert (one.bucket.plan, one.bucket.ms, one.bucket.plain_ms) == (PLAIN, 1.0, 1.0)


def test_a_plan_that_fails_costs_that_plan_only(times: dict[str, float]) -> None:
    del times["apart"]
    (eight,) = tuned(finds(OTHER), [(8, 256)])
    assert eight.bucket == TunedBucket(8, 256, PLAIN, 4.0, 4.0, None, SEED.num_layers, 4)
    failed = [row["failed"] for row in eight.candidates if "failed" in row]
    assert failed == ["RuntimeError: out of resource: shared memory"] * 2
    times.clear()
    (eight,) = tuned(finds(OTHER), [(8, 256)])
    assert eight.bucket is None


@pytest.mark.usefixtures("times")
def test_time_is_shared_and_what_is_left_goes_on() -> None:
    spans = []

    def find(trials: Any, deadline: float, show: Any) -> tuple[LayerPlan, float]:
        spans.append(deadline - time.monotonic())
        return PLAIN, 4.0

    tuned(find, [(1, 256), (2, 256), (4, 256)], seconds=60)
    assert spans == [pytest.approx(ms, abs=2) for ms in (20, 30, 60)]


def test_what_cannot_be_tuned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.bfloat16
    with pytest.raises(BackendError, match=r"expected a CUDA device, found cpu; run it on"):
        check_tunable(SEED, half, torch.device("cpu"), TRITON)
    with pytest.raises(InputError, match=r"found qwen3.6-35b-a3b, a hybrid"):
        check_tunable(preset("qwen3.6-35b-a3b"), half, CUDA, TRITON)
    with pytest.raises(InputError, match="nothing to tune in float32: expected bfloat16 or"):
        check_tunable(SEED, torch.float32, CUDA, TRITON)
    with pytest.raises(InputError, match="nothing to tune: expected triton kernels, found refer"):
        check_tunable(SEED, half, CUDA, REFERENCE)
    monkeypatch.setattr("graphcap.tuning.tunable.has_triton", lambda: False)
    with pytest.raises(BackendError, match=r"expected Triton 3.0 or newer, found none"):
        check_tunable(SEED, half, CUDA, REFERENCE)
    weights: Any = SimpleNamespace(shape=SEED, dtype=half, device=torch.device("cpu"))
    with pytest.raises(BackendError, match="expected a CUDA device"):
        next(tune(weights, TRITON, [(1, 256)], 1.0))


def test_a_file_goes_on_where_it_was_made_by_the_same_kernels_and_anew_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch)
    path = tmp_path / "plans.json"

    def buckets() -> int:
        return len(plan_file(path, SEED, torch.bfloat16, CUDA, None).buckets)

    assert buckets() == 0
    file_of(bucket(1), bucket(8)).write(path)
    assert buckets() == 2
    file_of(bucket(1), kernels="0").write(path)
    assert buckets() == 0
    file_of(bucket(1), device="NVIDIA A100").write(path)
    assert buckets() == 0
    path.write_text("no JSON")
    made = plan_file(path, SEED, torch.bfloat16, CUDA, "abc")
    assert made.key == PlanKey.of(SEED, torch.bfloat16, H200)
    assert made.machine == {"driver": made.machine["driver"], **versions_here(), "commit": "abc"}
    assert made.kernels == kernels_digest()
    made.with_buckets([bucket(2)]).write(path)
    assert read_plans(path).buckets == (bucket(2),)


@pytest.mark.parametrize("rows", [1, 3, 8, 64])
def test_a_forecast_counts_what_a_search_can_try(rows: int) -> None:
    seen = forecast(SEED.with_layers(12), torch.bfloat16, rows, 256)
    most = sum(
        len(changes)
        for layers in {start.layers for start in starts(rows)}
        for start in [next(each for each in starts(rows) if each.layers == layers)]
        for _, changes in knobs(start, SEED, rows, 256)
    )
    assert sum(count for *_, count in seen.knobs) == most
    assert most < seen.plans <= most + 8
    assert seen.seconds > 0
    longer = forecast(SEED.with_layers(24), torch.bfloat16, rows, 256)
    assert (longer.plans, longer.seconds > seen.seconds) == (seen.plans, True)
