"""The eight promises, as far as a CPU can show them, on a small MoE step whose pool is graphcap's."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from toy import CPU, ToyMoe, double, floats, manager_of, memory_events, moe_manager

from graphcap.buckets import BucketLadder
from graphcap.errors import PoolFrozenError, StaleRecordingError
from graphcap.pool import BufferPool


def eager(rows: int, seed: int = 0) -> tuple[torch.Tensor, ToyMoe]:
    """The unpadded step on a step and a pool of its own."""
    step = ToyMoe(BufferPool(CPU))
    return step(step.batch(rows, seed))["out"], step


def test_promise_1_one_launch_and_no_allocation_for_any_batch():
    step, manager = moe_manager()
    manager.capture()
    runs, allocations = step.runs, manager.pool.allocations
    for rows in range(1, 9):
        before = manager.stats()
        manager.run(step.batch(rows))
        manager.run()  # advances without a batch: nothing but the replay
        after = manager.stats()
        assert after.replays == before.replays + 2
        assert (
            after.input_launches <= before.input_launches + 3
        )  # one for each dtype, the row count
    assert step.runs == runs  # the step's Python did not run
    assert manager.pool.allocations == allocations
    assert [bucket.allocations for bucket in manager.report.buckets] == [0, 0, 0, 0]


def test_promise_1_the_profiler_sees_no_allocation_at_replay():
    step, manager = moe_manager()
    manager.capture()
    manager.run(step.batch(5))
    recording = manager.recording(8)
    assert recording.census().allocations == 0
    recording.replay()
    assert memory_events(recording.replay) == 0


def test_promise_1_and_the_operations_of_every_bucket_are_the_same():
    _, manager = moe_manager()
    report = manager.capture()
    assert len({bucket.nodes for bucket in report.buckets}) == 1
    assert report.census is not None
    rows = {row.operation: row.count for row in report.census.rows}
    assert rows["fused_moe w1"] == rows["fused_moe w2"] == rows["merge"] == 2


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 42])
def test_promise_2_every_batch_has_a_bucket(limit: int):
    ladder = BucketLadder.up_to(limit)
    assert limit in ladder
    assert all((ladder.bucket_for(n) or 0) >= n for n in range(1, limit + 1))


def test_promise_2_larger_batches_run_eagerly_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
):
    step, manager = moe_manager()
    manager.capture()
    with caplog.at_level(logging.WARNING, "graphcap"):
        for rows in (9, 20):
            out = manager.run(step.batch(rows))["out"]
            torch.testing.assert_close(out, eager(rows)[0])
    assert manager.stats().fallbacks == {"above_max_batch": 2}
    (record,) = caplog.records
    assert "raise max_batch" in record.getMessage()


def test_promise_3_frozen_pool_neither_moves_nor_grows():
    step, manager = moe_manager()
    manager.capture()
    expected = manager.run(step.batch(7))["out"].clone()
    address, size = manager.pool.arena.data_ptr(), manager.pool.nbytes
    with pytest.raises(PoolFrozenError) as caught:
        step(step.batch(100))
    for words in ("toy.py", "hit_logits", "(100, 5)", "held: nothing"):
        assert words in str(caught.value)
    manager.run(step.batch(30))  # a larger eager batch
    assert (manager.pool.arena.data_ptr(), manager.pool.nbytes) == (address, size)
    assert torch.equal(manager.run(step.batch(7))["out"], expected)


def test_promise_3_the_plan_is_near_its_lower_bound():
    _, manager = moe_manager()
    report = manager.capture()
    assert (
        report.pool_lower_bound_bytes <= report.pool_bytes <= 1.05 * report.pool_lower_bound_bytes
    )


def test_promise_4_pads_reach_no_expert():
    step, manager = moe_manager()
    manager.capture()
    for rows in range(1, 9):
        step.hits.zero_()
        manager.run(step.batch(rows, seed=rows))
        _, unpadded = eager(rows, seed=rows)
        assert torch.equal(step.hits[:-1], unpadded.hits[:-1])
        bucket = manager.ladder.bucket_for(rows) or 0
        assert step.hits[-1] == (bucket - rows) * step.top_k


@pytest.mark.parametrize("rows", [1, 3, 5, 7])
def test_promise_4_nan_in_pads_never_reaches_a_real_row(rows: int):
    step, manager = moe_manager()
    manager.capture()
    manager.run(step.batch(8))
    expected = manager.run(step.batch(rows, seed=1))["out"].clone()
    for name in step.slots:
        slot = manager.inputs[name][rows:]
        slot.fill_(float("nan") if slot.is_floating_point() else 3)
    manager.pool.poison()
    out = manager.run()["out"]
    assert torch.equal(out, expected)
    assert out.shape[0] == rows  # pads are never returned
    bucket = manager.ladder.bucket_for(rows) or 0
    assert manager.recording(bucket).outputs["out"].isfinite().all()


def test_promise_4_pads_are_restored_after_a_larger_batch():
    step, manager = moe_manager()
    manager.capture()
    manager.run(step.batch(8))
    manager.run(step.batch(3))
    assert manager.inputs["row_ids"].tolist() == [0, 1, 2, *[-1] * 5]
    assert (manager.inputs["hidden"][3:] == 0).all()


def test_promise_5_replays_equal_the_eager_step():
    step, manager = moe_manager()
    manager.capture()
    for rows in (8, 1, 5, 2, 7, 3, 6, 4):
        out = manager.run(step.batch(rows, seed=rows))["out"]
        torch.testing.assert_close(out, eager(rows, seed=rows)[0], rtol=1e-5, atol=1e-5)


def test_promise_5_capture_verifies_each_bucket():
    _, manager = moe_manager()
    report = manager.capture()
    assert report.failures == {}
    assert all(
        bucket.largest_difference is not None and bucket.largest_difference < 1e-5
        for bucket in report.buckets
    )


def test_promise_5_a_step_that_reads_something_else_is_not_served():
    secret = [1.0]

    def step(inputs: Any) -> dict[str, torch.Tensor]:
        secret[0] += 1
        return {"y": inputs["x"] * secret[0]}

    manager = manager_of(step)
    assert set(manager.capture().failures) == {2, 4}
    before = secret[0]
    assert torch.equal(manager.run({"x": floats(2)})["y"], floats(2) * (before + 1))


@pytest.mark.parametrize("field", ["router", "gate_up", "down"])
def test_promise_6_rebound_weight_of_an_expert_is_named(field: str):
    step, manager = moe_manager()
    manager.capture()
    manager.run(step.batch(3))
    layer = step.layers[1]
    setattr(layer, field, getattr(layer, field).clone())
    with pytest.raises(StaleRecordingError, match=rf"layers\[1\]\.{field}"):
        manager.run(step.batch(3))


def test_promise_6_replaced_layer_and_moved_pool_are_named():
    step, manager = moe_manager()
    manager.capture()
    step.layers[0], kept = step.layers[1], step.layers[0]
    with pytest.raises(StaleRecordingError, match=r"layers\[0\]"):
        manager.run(step.batch(3))
    step.layers[0] = kept
    manager.run(step.batch(3))
    manager.pool.arena.data = torch.zeros(manager.pool.nbytes, dtype=torch.uint8)
    with pytest.raises(StaleRecordingError, match="pool arena"):
        manager.run(step.batch(3))


def test_promise_6_weights_copied_in_place_are_used():
    step, manager = moe_manager()
    manager.capture()
    manager.run(step.batch(3))
    step.head.copy_(torch.zeros_like(step.head))
    assert (manager.run()["out"] == 0).all()


def test_promise_7_a_failed_bucket_costs_itself_only(caplog: pytest.LogCaptureFixture):
    def step(inputs: Any) -> dict[str, torch.Tensor]:
        if inputs["x"].shape[0] == 2 and inputs["x"].isnan().any():
            pass
        return double(inputs)

    manager = manager_of(step, buckets=(1, 2))
    with caplog.at_level(logging.WARNING, "graphcap"):
        report = manager.capture()
    assert [bucket.size for bucket in report.buckets] == [1, 4]
    message = report.failures[2]
    for words in ("bool()", "test_promises.py:", "(step)", "torch.where"):
        assert words in message
    assert len(caplog.records) == 1
    for rows in (1, 2, 3, 4):
        assert torch.equal(manager.run({"x": floats(rows)})["y"], floats(rows) * 2)
    assert manager.stats().fallbacks == {"not_recorded": 1}


def test_promise_8_off_is_off():
    code = """
import logging, os, sys
os.environ.pop("GRAPHCAP", None)
before = (set(os.environ.items()), logging.root.handlers[:], logging.root.level, sys.excepthook)
loaded = set(sys.modules)
import graphcap
assert (set(os.environ.items()), logging.root.handlers, logging.root.level, sys.excepthook) == (
    before[0], before[1], before[2], before[3])
new = {name.split(".")[0] for name in set(sys.modules) - loaded}
print(sorted(new & {"torch", "triton", "numpy", "vllm", "transformers", "cuda", "safetensors"}))
print(sorted(name for name in set(sys.modules) - loaded if name.startswith("graphcap.")))
from graphcap.settings import Settings
print(Settings.from_env({}).enabled, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]", "False False"]
