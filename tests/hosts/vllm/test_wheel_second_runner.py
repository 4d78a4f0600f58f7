"""The graph manager of the second model runner of a real vLLM with a toy model.

Each step of a scenario is held against the model run eagerly on the same inputs ("equal").
"""

from __future__ import annotations

import pytest
from gather import Facts
from scenarios.second_steps import MOST, MOST_TOKENS
from test_wheel_first_runner import LADDER, MIXED, all_equal, bucket

SCENARIOS = "scenarios.second_steps"


def test_every_decode_batch_is_replayed_from_the_smallest_bucket(facts: Facts):
    found = facts["every batch"]
    assert found["ladders"] == {"mixed": MIXED, "decode": LADDER}
    assert [(s["mode"], s["bucket"]) for s in found["decode steps"]] == [
        ("FULL", bucket(LADDER, rows)) for rows in range(1, MOST + 1)
    ]
    assert all_equal(found["decode steps"])


def test_every_mixed_batch_is_replayed(facts: Facts):
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


def test_model_keeps_its_own_forward_and_vllm_captures_nothing(facts: Facts):
    found = facts["every batch"]
    assert found["own forward"]
    assert found["graphs of vLLM"] == 0


@pytest.mark.parametrize("when", ["a warm-up fails", "a recording fails"])
def test_batches_of_a_bucket_that_failed_go_to_the_next_graph(facts: Facts, when: str):
    found = facts[when]
    assert all_equal(found["steps"])
    # 3 and 4 sequences fit the mixed graph of 16 tokens; the other decode buckets serve on.
    assert [step["bucket"] for step in found["steps"]] == [2, 16, 16, 8]
    assert found["by_bucket"] == {"1": 0, "2": 1, "4": 0, "8": 1, "12": 0}
    assert list(found["failures"]) == ["4"]
    (warning,) = found["warnings"]
    assert warning.startswith("1 of 5 buckets (4) are not recorded and run eagerly: ")


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
    assert named in found["warnings"][0]


def test_weight_that_was_copied_into_is_replayed_with_its_new_values(facts: Facts):
    found = facts["a weight is copied into"]
    assert all_equal(found["after"])
    assert found["replays"] == 4
    assert found["fallbacks"] == {}


def test_steps_without_a_graph_are_counted_by_reason(facts: Facts):
    found = facts["eager steps"]
    assert [step["mode"] for step in found["steps"]] == ["FULL", "NONE", "NONE", "NONE"]
    assert all_equal(found["steps"])
    assert found["fallbacks"] == {"above_max_batch": 2, "mixed_above_max_tokens": 1}


def test_recordings_are_given_back_at_shutdown(facts: Facts):
    found = facts["shutdown"]
    assert found["states"] == ["closed", "closed"]
    assert not found["engine"]
    assert found["vLLM's own shutdowns"] == 2


@pytest.mark.parametrize("card", ["estimate", "estimate without graphs"])
def test_estimate_of_memory_is_vllms_and_the_capture_after_it_is_not(facts: Facts, card: str):
    found = facts[card]
    graphs = {"FULL": len(LADDER) + len(MIXED)} if card == "estimate" else {}
    assert found["vLLM captured"] == [graphs, {}]
    assert not found["after the estimate"]
    assert found["after the capture"] == ["decode", "mixed"]
    assert found["step"]["equal"]


def test_engine_that_is_not_taken_captures_by_itself(facts: Facts):
    assert facts["not taken"] == {"vLLM captured": [{"FULL": 2}], "held": False}
