"""vLLM 0.6.3: what no recording serves runs eagerly, is counted, and is said once with the cure."""

from __future__ import annotations

import pytest
from gather import Facts
from v0.worker import MOST

V0_SCENARIOS = "scenarios.v0_fallbacks"

LADDER = (1, 2, 4, 8, 12)

# -- fallbacks -----------------------------------------------------------------------------------

COUNTED = {
    "above max": "above_max_batch",
    "long sequence": "long_sequence",
    "rebound weight": "stale_recording",
    "new cache": "inputs_moved",
    "other dtype": "other_inputs",
    "bucket that fails": "not_recorded",
    "invisible operation": "verification",
    "another rank fails": "rank_failed",
}


@pytest.mark.parametrize("name", COUNTED)
def test_step_without_a_recording_is_eager_counted_and_said_once(v0_facts: Facts, name: str):
    found = v0_facts[name]
    assert found["differences"] == [0.0, 0.0]
    assert found["fallbacks"] == found["told"] == {COUNTED[name]: 2}
    assert found["replays"] == 0
    said = [text for text in found["warnings"] if "runs eagerly, from now on" in text]
    assert len(said) == 1
    assert f"({COUNTED[name]}, maximum {MOST})" in said[0]


def test_messages_of_fallbacks_give_the_cure(v0_facts: Facts):
    assert v0_facts["above max"]["warnings"][0].endswith(
        "raise max_num_seqs to the largest decode batch (graphcap explain fallback)"
    )
    assert v0_facts["long sequence"]["warnings"][0].endswith(
        "a sequence has 41 tokens and the step is recorded for up to 32: raise max_seq_len_to_capture "
        "(graphcap explain fallback)"
    )
    assert "mlp.experts.w13_weight" in v0_facts["rebound weight"]["warnings"][0]
    assert "expected dtype torch.int64, found torch.int32" in v0_facts["other dtype"]["warnings"][0]


def test_strict_makes_a_fallback_an_error(v0_facts: Facts):
    kind, text = v0_facts["above max, strict"]["raised"]
    assert kind == "FallbackError"
    assert "GRAPHCAP_STRICT=1 forbids eager steps; raise max_num_seqs" in text


def test_bucket_that_fails_costs_that_bucket_only(v0_facts: Facts):
    found = v0_facts["bucket that fails"]
    assert list(found["failures"]) == ["4"]
    assert (
        "bool(input_ids.sum() > 0)" in found["failures"]["4"] or ".item()" in found["failures"]["4"]
    )
    assert any(
        text.startswith("1 of 5 buckets (4) are not recorded") for text in found["at capture"]
    )


def test_kernel_that_the_tape_cannot_see_is_found_by_verification(v0_facts: Facts):
    found = v0_facts["invisible operation"]
    assert set(found["failures"]) == set(map(str, LADDER))
    assert all("hidden_states" in text for text in found["failures"].values())


def test_bucket_that_fails_on_another_rank_ends_recording_here(v0_facts: Facts):
    found = v0_facts["another rank fails"]
    assert found["asked"] == [True, True]  # 12, 8: nothing is recorded after it
    assert set(found["failures"]) == set(map(str, LADDER))
    assert found["at capture"][0] == (
        "graphcap records nothing in this engine, steps run eagerly: bucket 8: it failed on another rank "
        "(graphcap explain nothing-recorded)"
    )


# -- left to vLLM --------------------------------------------------------------------------------

OBSTACLES = {
    "pooling": "a pooling model",
    "encoder-decoder": "an encoder-decoder model (cross attention)",
    "multi-step": "multi-step scheduling",
    "speculative": "speculative decoding",
    "drafts": "speculative decoding",
    "hidden states": "speculative decoding",
    "LoRA": "LoRA adapters",
    "prompt adapters": "prompt adapters",
    "pipeline": "pipeline parallelism",
    "offloading": "weight offloading",
    "state": "a model with a recurrent state",
    "attention": "the attention backend xformers, which plans each step on the host",
    "other runner": "its model runner is SimpleNamespace",
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_obstacle_is_found_and_named(v0_facts: Facts, name: str):
    assert v0_facts["obstacles"][name] == [OBSTACLES[name]]


def test_plain_engine_is_taken(v0_facts: Facts):
    found = v0_facts["obstacles"]
    assert found["none"]["taken"]
    assert tuple(found["none"]["decode"]) == LADDER
    assert found["put back"]


def test_engine_with_an_obstacle_captures_as_vllm_does(v0_facts: Facts):
    found = v0_facts["left to vLLM"]
    assert (
        "CUDA" in found["raised"] or "NVIDIA" in found["raised"]
    )  # vLLM's own capture was reached
    assert found["warnings"] == [
        "graphcap leaves this engine to vLLM: prompt adapters (graphcap explain left-to-vllm)"
    ]
