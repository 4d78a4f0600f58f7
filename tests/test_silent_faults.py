"""Ways to get a wrong result without a word that were found by trying; each has its answer here."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch.nn.modules import module as nn_module
from toy import WIDTH, custom_op, floats, manager_of

from graphcap.errors import CaptureError, InputError
from graphcap.inputs import PadPolicy, Slot, StaticInputs
from graphcap.recorders.tape import TapeRecorder
from graphcap.settings import Settings

CPU = torch.device("cpu")


def only_failure(manager: Any) -> str:
    failures = manager.capture().failures
    assert set(failures) == {2, 4}
    return failures[4]


def test_what_a_caller_does_to_the_outputs_is_not_seen_by_the_next_run():
    manager = manager_of()
    manager.capture()
    out = manager.run({"x": floats(4)})
    with pytest.raises(TypeError):
        out["y"] = out["y"].half()  # type: ignore[index]
    assert torch.equal(manager.run({"x": floats(4, 1)})["y"], floats(4, 1) * 2)


def test_a_step_cannot_replace_its_slots():
    def step(inputs: Any) -> Any:
        inputs["x"] = inputs["x"] * 2
        return {"y": inputs["x"]}

    assert "does not support item assignment" in only_failure(manager_of(step))


def test_what_a_step_does_to_the_shape_of_a_slot_does_not_outlive_it():
    def step(inputs: Any) -> Any:
        x = inputs["x"]
        x.unsqueeze_(1)
        return {"y": x * 2}

    manager = manager_of(step)
    manager.capture()
    for _ in range(3):
        assert manager.run({"x": floats(4)})["y"].shape == (4, 1, WIDTH)


def test_a_gradient_does_not_outlive_its_step():
    def step(inputs: Any) -> Any:
        with torch.enable_grad():
            x = inputs["x"].requires_grad_()
            (x * x).sum().backward()
        return {"g": x.grad}

    manager = manager_of(step)
    manager.capture()
    for value in (1.0, 2.0, 3.0):
        x = torch.full((4, WIDTH), value)
        assert torch.equal(manager.run({"x": x})["g"], 2 * x)


def test_autocast_around_capture_follows_a_changed_weight():
    weight = torch.nn.Parameter(torch.ones(WIDTH, WIDTH))
    manager = manager_of(lambda inputs: {"y": inputs["x"] @ weight})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        manager.capture()
    weight.data.mul_(2)
    assert (manager.run({"x": torch.ones(4, WIDTH)})["y"] == 2 * WIDTH).all()


def test_a_refusal_that_the_step_swallows_is_still_one():
    def step(inputs: Any) -> Any:
        try:
            count = int(inputs["x"].max().item())
        except Exception:
            count = 0
        return {"y": inputs["x"] + count}

    assert ".item()" in only_failure(manager_of(step))


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda x: x.new_tensor([x[0, 0]]), "list of tensors"),
        (lambda x: x[:, [(x[0, 0] * 0).long()]], "list of tensors"),
        (lambda x: torch.tensor_split(x, torch.tensor([1]), 1)[0], "tensor_split"),
        (lambda x: setattr(x.clone(), "data", x), r"\.data"),
    ],
)
def test_host_reads_without_an_operation_are_refused(read: Any, words: str):
    x = floats(4)

    def step() -> dict[str, torch.Tensor]:
        return {"y": x, "read": read(x)}

    with pytest.raises(CaptureError, match=words):
        TapeRecorder(CPU).record(step, 4)


def test_an_operator_that_returns_nothing_runs_at_every_replay():
    seen: list[float] = []

    @custom_op("graphcap_tests::note", mutates_args=())
    def note(x: torch.Tensor) -> None:
        seen.append(float(x.sum()))

    def step(inputs: Any) -> Any:
        note(inputs["x"])
        return {"y": inputs["x"] * 2}

    manager = manager_of(step)
    assert not manager.capture().failures
    seen.clear()
    manager.run({"x": torch.ones(4, WIDTH)})
    assert seen == [4 * WIDTH]


def test_padding_that_reaches_real_rows_is_found():
    def step(inputs: Any) -> Any:
        return {"y": inputs["x"] - inputs["x"].mean(0, keepdim=True)}

    failures = manager_of(step, max_batch=8, buckets=(1, 4)).capture().failures
    assert set(failures) == {4, 8}
    assert "what padding rows hold changes output 'y'" in failures[4]
    assert not manager_of(step, max_batch=8, buckets=(1, 4), rows_mix=True).capture().failures


def test_rows_mixed_through_integers_are_found_beside_a_float_slot():
    table = floats(10, 3)

    def step(inputs: Any) -> Any:
        e = table[inputs["token"]]
        return {"y": (e - e.mean(0)) * inputs["temperature"][:, None]}

    def example(rows: int, generator: torch.Generator) -> Any:
        return {
            "token": torch.randint(10, (rows,), generator=generator),
            "temperature": torch.rand(rows, generator=generator) + 0.5,
        }

    slots = {
        "token": Slot((), torch.int64),
        "temperature": Slot((), torch.float32, PadPolicy.ONE),
    }
    manager = manager_of(step, slots=slots, buckets=(1, 4), max_batch=8, example=example)
    assert set(manager.capture().failures) == {4, 8}


def masked_mean(inputs: Any) -> Any:
    token = inputs["token"]
    real = (token >= 0)[:, None]
    values = torch.where(real, token[:, None].float(), 0.0)
    return {"y": token[:, None] - values.sum(0) / real.sum(0).clamp(min=1)}


def weighted_mean(inputs: Any) -> Any:
    x, weight = inputs["x"], inputs["weight"][:, None]
    return {"y": x - (x * weight).sum(0) / weight.sum(0).clamp(min=1e-6)}


def marked_mean(inputs: Any) -> Any:
    token, valid = inputs["token"], inputs["valid"][:, None]
    values = torch.where(valid, token[:, None].float(), 0.0)
    return {"y": token[:, None] - values.sum(0) / valid.sum(0).clamp(min=1)}


@pytest.mark.parametrize(
    ("step", "slots"),
    [
        (masked_mean, {"token": Slot((), torch.int64, PadPolicy.fill(-1))}),
        (
            weighted_mean,
            {"x": Slot((WIDTH,), torch.float32), "weight": Slot((), torch.float32)},
        ),
        (marked_mean, {"token": Slot((), torch.int64), "valid": Slot((), torch.bool)}),
    ],
)
def test_a_step_that_knows_its_padding_passes(step: Any, slots: Any):
    def example(rows: int, generator: torch.Generator) -> Any:
        drawn: dict[str, torch.Tensor] = {}
        for name, slot in slots.items():
            shape = (rows, *slot.row_shape)
            if slot.dtype == torch.bool:
                drawn[name] = torch.ones(shape, dtype=torch.bool)
            elif slot.dtype == torch.int64:
                drawn[name] = torch.randint(1, 9, shape, generator=generator)
            else:
                drawn[name] = torch.rand(shape, generator=generator) + 0.5
        return drawn

    manager = manager_of(step, slots=slots, buckets=(1, 4), max_batch=8, example=example)
    assert not manager.capture().failures


def test_a_counter_with_a_place_for_padding_passes():
    counter = torch.zeros(9)

    def step(inputs: Any) -> Any:
        counter.index_add_(0, inputs["seq"], torch.ones(inputs["seq"].shape[0]))
        return {"y": counter[inputs["seq"]]}

    slots = {"seq": Slot((), torch.int64, PadPolicy.fill(8))}

    def example(rows: int, generator: torch.Generator) -> Any:
        return {"seq": torch.randperm(8, generator=generator)[:rows]}

    manager = manager_of(
        step, slots=slots, buckets=(1, 4), max_batch=8, example=example, state=[counter]
    )
    assert not manager.capture().failures
    assert not counter.any()


def test_a_manager_that_is_dropped_takes_its_hooks_along():
    tables = (
        nn_module._global_parameter_registration_hooks,
        nn_module._global_buffer_registration_hooks,
        nn_module._global_module_registration_hooks,
    )
    gc.collect()
    before = [len(table) for table in tables]
    manager = manager_of()
    manager.capture()
    assert [len(table) for table in tables] == [count + 1 for count in before]
    del manager
    gc.collect()
    assert [len(table) for table in tables] == before


def test_a_batch_loaded_by_hand_ends_one_above_the_maximum():
    manager = manager_of()
    manager.capture()
    manager.run({"x": floats(9)})
    manager.inputs.load({"x": floats(2, 1)}, 2)
    assert torch.equal(manager.run()["y"], floats(2, 1) * 2)


def test_a_mean_over_real_rows_alone_passes():
    def step(inputs: Any) -> Any:
        x, count = inputs["x"], inputs["num_rows"]
        real = (torch.arange(x.shape[0]) < count)[:, None]
        return {"y": x - (x * real).sum(0, keepdim=True) / count.clamp(min=1)}

    manager = manager_of(step, max_batch=8, buckets=(1, 4))
    assert not manager.capture().failures
    x = floats(3)
    assert torch.allclose(manager.run({"x": x})["y"], x - x.mean(0, keepdim=True))


def test_a_huge_constant_does_not_hide_a_difference():
    turn = {"value": 1.0}
    hidden = torch.tensor([True, False, False])

    def step(inputs: Any) -> Any:
        turn["value"] *= 1.5
        lowest = torch.finfo(torch.float32).min
        return {"y": (inputs["x"] * turn["value"]).masked_fill(hidden, lowest)}

    assert "differs from the eager step" in only_failure(manager_of(step))


def test_a_step_that_changes_the_row_count_is_refused():
    def step(inputs: Any) -> Any:
        inputs["num_rows"].sub_(1)
        return {"y": inputs["x"] * 2}

    assert "num_rows" in only_failure(manager_of(step))


def test_conjugate_and_negated_batches_are_loaded_as_they_read():
    inputs = StaticInputs(2, {"z": Slot((1,), torch.complex64)}, CPU)
    inputs.load({"z": torch.tensor([[1 + 2j], [3 - 4j]])}, 2)
    inputs.load({"z": inputs["z"][:2].conj()}, 2)
    assert inputs["z"].flatten().tolist() == [1 - 2j, 3 + 4j]
    negated = torch._neg_view(torch.tensor([[1 + 1j], [2 + 2j]]))
    inputs.load({"z": negated}, 2)
    assert inputs["z"].flatten().tolist() == [-1 - 1j, -2 - 2j]


def test_another_default_device_changes_nothing():
    with torch.device("meta"):
        manager = manager_of(slots={"x": Slot((WIDTH,), torch.float32, PadPolicy.ONE)})
        assert not manager.capture().failures
    assert torch.equal(manager.run({"x": floats(3)})["y"], floats(3) * 2)


def test_a_generator_of_the_step_is_put_back():
    generator = torch.Generator().manual_seed(3)

    def step(inputs: Any) -> Any:
        return {"y": inputs["x"] + torch.rand(WIDTH, generator=generator)}

    manager = manager_of(step, state=[generator])
    assert not manager.capture().failures
    first = manager.run({"x": torch.zeros(2, WIDTH)})["y"][0].clone()
    assert torch.equal(first, torch.rand(WIDTH, generator=torch.Generator().manual_seed(3)))
    assert not torch.equal(manager.run()["y"][0], first)


def test_an_agreed_bucket_is_for_one_run():
    manager = manager_of(max_batch=8, buckets=(2, 4))
    manager.capture()
    manager.run({"x": floats(2)}, agreed_batch=8)
    manager.run()
    assert {b.size: b.replays for b in manager.stats().buckets} == {2: 1, 4: 0, 8: 1}


@functools.cache
def unnamed() -> torch.Tensor:
    return floats(WIDTH, 5)


def test_what_cannot_be_watched_is_said():
    (note,) = manager_of(lambda inputs: {"y": inputs["x"] @ unnamed()}).capture().notes
    assert "1 tensors" in note
    assert "rebinding them is not noticed" in note


def test_above_the_maximum_in_and_out_of_inference_mode():
    def step(inputs: Any) -> Any:
        inputs["x"].add_(1)
        return {"y": inputs["x"] * 1}

    manager = manager_of(step)
    manager.capture()
    with torch.inference_mode():
        manager.run({"x": torch.zeros(9, WIDTH)})
    assert (manager.run()["y"] == 2).all()


@pytest.mark.parametrize("size", ["4", 2.5, True, 0])
def test_a_bad_maximum_is_refused(size: Any):
    with pytest.raises(InputError, match="max_batch"):
        StaticInputs(size, {"x": Slot((3,), torch.float32)}, CPU)


@pytest.mark.parametrize("shape", [3, (-1,), (0,), [2]])
def test_a_bad_row_shape_is_refused(shape: Any):
    with pytest.raises(InputError, match="row shape"):
        StaticInputs(4, {"x": Slot(shape, torch.float32)}, CPU)


def test_settings_made_by_hand_are_checked():
    from graphcap.errors import SettingsError

    with pytest.raises(SettingsError, match="verify"):
        Settings(verify="x")
