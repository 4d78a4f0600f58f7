"""The first model runner of a real vLLM with a toy model: what is replayed, and what is not.

Each step of a scenario is held against the model run eagerly on the same inputs ("equal").
"""

from __future__ import annotations

from typing import Any

import pytest
from gather import Facts
from scenarios.first_runner import MOST, MOST_TOKENS

SCENARIOS = "scenarios.first_steps"

LADDER = [1, 2, 4, 8, 12]
MIXED = [16, 32, 64]
COUNTED = "and runs eagerly, from now on without a message"


def bucket(sizes: list[int], rows: int) -> int:
    return next(size for size in sizes if size >= rows)


def all_equal(steps: list[dict[str, Any]]) -> bool:
    return all(step["equal"] for step in steps)


# -- what is replayed ----------------------------------------------------------------------------


def test_every_decode_batch_is_replayed_from_the_smallest_bucket(facts: Facts):
    found = facts["every batch"]
    assert found["type"] == "StepWrapper"
    assert found["ladders"] == {"mixed": MIXED, "decode": LADDER}
    assert [(s["mode"], s["bucket"]) for s in found["decode steps"]] == [
        ("FULL", bucket(LADDER, rows)) for rows in range(1, MOST + 1)
    ]
    assert all_equal(found["decode steps"])


def test_every_mixed_batch_is_replayed_from_the_smallest_bucket(facts: Facts):
    found = facts["every batch"]
    assert [(s["mode"], s["bucket"]) for s in found["mixed steps"]] == [
        ("FULL", bucket(MIXED, tokens)) for tokens in range(3, MOST_TOKENS + 1)
    ]
    assert all_equal(found["mixed steps"])


def test_replays_and_padding_are_counted_and_run_none_of_the_models_python(facts: Facts):
    found = facts["every batch"]
    assert found["calls by replays"] == 0
    assert found["decode"]["replays"] == MOST
    assert found["mixed"]["replays"] == MOST_TOKENS - 2
    assert found["decode"]["fallbacks"] == found["mixed"]["fallbacks"] == {}
    assert found["decode"]["padding_rows"] == sum(
        bucket(LADDER, rows) - rows for rows in range(1, MOST + 1)
    )
    assert found["decode"]["by_bucket"] == {"1": 1, "2": 1, "4": 2, "8": 4, "12": 4}


def test_mixed_batches_in_pieces_stay_vllms_and_decode_batches_are_replayed(facts: Facts):
    found = facts["in pieces"]
    assert found["kinds"] == ["decode"]
    assert found["captured by vLLM"] == [1, 2, 4, 8, 12, 16, 24]
    assert {step["mode"] for step in found["decode steps"]} == {"FULL"}
    assert {step["mode"] for step in found["mixed steps"]} == {"PIECEWISE"}
    assert all_equal(found["decode steps"] + found["mixed steps"])
    assert found["replays"] == MOST
    assert found["fallbacks"] == {}


def test_capture_warms_up_all_then_records_from_the_largest_then_verifies(facts: Facts):
    runs = [(tokens, uniform) for tokens, uniform, _ in facts["every batch"]["dummy runs"]]
    mixed = [(size, False) for size in reversed(MIXED)]
    decode = [(size, True) for size in reversed(LADDER)]
    assert runs == 2 * (mixed + decode) + decode


def test_sequences_of_a_mixed_dummy_batch_are_as_long_as_their_share(facts: Facts):
    lengths = {
        tokens: length
        for tokens, uniform, length in facts["every batch"]["dummy runs"]
        if not uniform
    }
    # 12 sequences share 16, 32 and 64 tokens; the last one has the rest.
    assert lengths == {16: 1 + 4, 32: 2 + 8, 64: 5 + 4}
    assert {length for _, uniform, length in facts["every batch"]["dummy runs"] if uniform} == {
        None
    }


def test_capture_is_told_in_one_block(facts: Facts):
    (block,) = facts["every batch"]["block"]
    lines = block.split("\n  ")
    assert lines[0].startswith("graphcap: the decode step is recorded (tape recorder on cpu, ")
    assert lines[1].startswith("mixed: 3 buckets of 16 to 64 tokens, up to ")
    assert lines[2].startswith("decode: 5 buckets of 1 to 12 sequences, up to ")
    assert lines[-2:] == ["mixed prefill-decode batches: full", "fallbacks so far: none"]


def test_report_is_written(facts: Facts):
    report = facts["every batch"]["report"]
    assert report["host"] == "vllm"
    assert report["vllm"] == facts.version
    assert [b["size"] for b in report["managers"]["decode"]["buckets"]] == LADDER
    assert report["choice"]["mixed_tokens"] == MIXED
    assert report["fallbacks"] == {}


# -- buckets that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["a warm-up fails", "a recording fails"])
def test_bucket_that_fails_costs_that_bucket_only(facts: Facts, when: str):
    found = facts[when]
    assert all_equal(found["steps"])
    assert found["by_bucket"] == {"1": 0, "2": 1, "4": 0, "8": 1, "12": 0}
    assert found["fallbacks"] == {"not_recorded": 3}
    assert list(found["failures"]) == ["4"]
    assert "this operation cannot be recorded" in found["failures"]["4"]
    (warning,) = found["warnings"]
    assert warning.startswith("1 of 5 buckets (4) are not recorded and run eagerly: ")


# -- what a recording points at ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("a weight is assigned", "project.weight is another tensor now"),
        ("a weight is moved and reloaded", "extra.59 has moved to another address"),
    ],
)
def test_weight_that_was_rebound_is_not_replayed(facts: Facts, what: str, named: str):
    found = facts[what]
    assert found["before"]["equal"]
    assert all_equal(found["after"])
    assert found["replays"] == 1
    assert found["fallbacks"] == {"stale_recording": 3}
    (warning,) = found["warnings"]
    assert f"(stale_recording, maximum 12) {COUNTED}; {named}" in warning


def test_weight_that_was_copied_into_is_replayed_with_its_new_values(facts: Facts):
    found = facts["a weight is copied into"]
    assert all_equal(found["after"])
    assert found["replays"] == 4
    assert found["fallbacks"] == {}


def test_reload_that_raises_is_looked_at_as_well(facts: Facts):
    found = facts["a reload fails"]
    assert found["raised"] == "half way"
    assert found["after"]["equal"]
    assert found["fallbacks"] == {"stale_recording": 1}


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("a cache moves", "the cache of model.layers.0.attention is another tensor now"),
        ("a pair of caches moves", "the caches of model.layers.0.attention is another object now"),
    ],
)
def test_layer_with_another_cache_is_not_replayed(facts: Facts, what: str, named: str):
    found = facts[what]
    assert found["replays"] == 1
    assert found["fallbacks"] == {"stale_recording": 1}
    assert named in found["warnings"][0]


def test_step_with_other_input_buffers_is_not_replayed(facts: Facts):
    found = facts["buffers move"]
    assert found["step"]["equal"]
    assert found["replays"] == 0
    assert found["fallbacks"] == {"inputs_moved": 1}
    assert "the engine made new input buffers" in found["warnings"][0]


# -- steps that are vLLM's own -------------------------------------------------------------------


def test_steps_without_a_graph_are_counted_by_reason_and_named_once(facts: Facts):
    found = facts["eager steps"]
    assert [step["mode"] for step in found["steps"]] == ["NONE"] * 4
    assert all_equal(found["steps"])
    assert found["fallbacks"] == {
        "above_max_batch": 2,
        "cascade_attention": 1,
        "mixed_above_max_tokens": 1,
    }
    assert [warning.split("; ")[0] for warning in found["warnings"]] == [
        f"a step of {rows} rows has no recording ({reason}, maximum 4) {COUNTED}"
        for rows, reason in (
            (6, "above_max_batch"),
            (7, "cascade_attention"),
            (10, "mixed_above_max_tokens"),
        )
    ]


def test_mixed_batches_are_not_counted_where_they_were_never_to_be_recorded(facts: Facts):
    found = facts["eager steps, tape asked for"]
    assert found["choice"]["mixed"] == "eager"
    assert found["fallbacks"] == {"above_max_batch": 2, "cascade_attention": 1}


def test_strict_makes_a_step_without_a_graph_an_error(facts: Facts):
    found = facts["strict"]
    assert found["replayed"]["equal"]
    name, text = found["raised"]
    assert name == "FallbackError"
    assert "above_max_batch" in text


def test_every_second_replay_is_verified_where_that_was_asked_for(facts: Facts):
    found = facts["verify every second"]
    assert all_equal(found["steps"])
    assert (found["replays"], found["verified"]) == (6, 3)


def test_outside_of_a_forward_context_the_model_runs_as_it_is(facts: Facts):
    found = facts["no context"]
    assert found["equal"]
    assert found["attributes"]
    assert found["replays"] == 0


@pytest.mark.parametrize("how", ["clear_graphs", "clear_all_graphs", "shutdown"])
def test_recordings_are_given_back(facts: Facts, how: str):
    found = facts[how]
    assert found["states"] == ["closed", "closed"]
    assert not found["serves"]
    assert found["model"] == (how != "shutdown")


# -- what is loaded ------------------------------------------------------------------------------


def test_model_of_an_engine_that_is_not_taken_stays_in_vllms_wrapper(facts: Facts):
    assert facts["not taken"]["type"] == "CUDAGraphWrapper"


def test_model_that_is_wrapped_in_something_else_is_left_to_vllm(facts: Facts):
    found = facts["wrapped by others"]
    assert found["types"] == ["Inner", "Toy"]
    assert found["warnings"] == [
        "graphcap leaves this engine to vLLM: its model is wrapped in Inner, expected CUDAGraphWrapper "
        "(graphcap explain left-to-vllm)"
    ]


def test_wrapper_inside_of_vllms_stays_around_the_model(facts: Facts):
    assert facts["wrapped by others inside"]["types"] == ["StepWrapper", "Inner"]


def test_backend_that_records_decode_only_has_the_buckets_that_vllm_dispatches_to(facts: Facts):
    found = facts["decode only after all"]
    assert found["kinds"] == ["decode"]
    assert {step["mode"] for step in found["steps"]} == {"FULL"}
    assert all_equal(found["steps"])
    assert found["replays"] == 40
    assert found["prefill"]["mode"] == "NONE"
    assert found["fallbacks"] == {}


@pytest.mark.parametrize("recorder", ["auto", "tape"])
def test_where_nothing_captures_memory_is_estimated_without_graphs(facts: Facts, recorder: str):
    found = facts[f"estimate, {recorder}"]
    assert found["graphs"] == 0
    assert all_equal(found["steps"])
    assert found["replays"] == 1
