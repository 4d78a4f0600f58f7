"""Decode steps of vLLM 0.6.3 through the manager: its own worker, runner and Qwen2-MoE model on a CPU."""

from __future__ import annotations

import pytest
from gather import Facts
from v0.worker import MOST

V0_SCENARIOS = "scenarios.v0_decode"

LADDER = (1, 2, 4, 8, 12)
SAME = 2e-3  # of the largest value, in float16
ROWS = range(1, MOST + 1)


def bucket_of(rows: int) -> int:
    return min(size for size in LADDER if size >= rows)


# -- replays -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["every batch size", "every batch size, checked"])
def test_replayed_step_equals_the_eager_one(v0_facts: Facts, name: str, rows: int):
    found = v0_facts[name]["steps"][str(rows)]
    assert found["rows"] == rows  # no padding comes back
    assert found["tokens"]
    assert found["to eager"] < SAME


@pytest.mark.parametrize("name", ["every batch size", "every batch size, checked"])
def test_replayed_steps_are_like_those_on_vllms_own_experts(v0_facts: Facts, name: str):
    like = sum(found["rows like vllm's"] for found in v0_facts[name]["steps"].values())
    assert like >= 0.95 * sum(ROWS)  # where a rounding decides the routing, a row is another


def test_every_step_was_one_replay_of_its_bucket(v0_facts: Facts):
    found = v0_facts["every batch size"]
    assert found["recorder"] == "tape"
    assert found["replays"] == MOST
    assert found["fallbacks"] == {}
    assert found["failures"] == {}
    assert found["padding_rows"] == sum(bucket_of(n) - n for n in ROWS)
    wanted = dict.fromkeys(map(str, LADDER), 0)
    for n in ROWS:
        wanted[str(bucket_of(n))] += 1
    assert found["by_bucket"] == wanted


def test_a_batch_is_brought_in_by_one_copy(v0_facts: Facts):
    assert v0_facts["every batch size"]["input_launches"] == MOST


def test_attention_and_norms_are_vllms_and_experts_are_not(v0_facts: Facts):
    found = v0_facts["every batch size"]["steps"]["5"]
    assert found["kernels"] == {
        "fused_add_rms_norm": 4,
        "paged_attention_v1": 2,
        "reshape_and_cache": 2,
        "rms_norm": 1,
        "rotary_embedding": 2,
        "silu_and_mul": 2,  # of the shared experts
    }
    assert found["experts of vLLM"] == 0


def test_every_replay_can_be_checked(v0_facts: Facts):
    assert v0_facts["every batch size, checked"]["verified"] == MOST


@pytest.mark.parametrize("name", ["generation", "generation without graphs", "flash attention"])
def test_forty_tokens_are_those_of_eager_steps(v0_facts: Facts, name: str):
    found = v0_facts[name]
    assert found["same"]
    assert found["different"] > 40  # not one token over and over
    assert found["replays"] == 40
    assert found["fallbacks"] == {}


def test_attention_that_reads_the_steps_metadata_is_called_live(v0_facts: Facts):
    found = v0_facts["flash attention"]
    assert found["backend"] == "flash-attn"
    assert found["failures"] == {}
    assert "breaks: 2 operations of a step run live" in found["lines"][0]
    assert found["calls"]["flash_attn_with_kvcache"] >= 2 * 80  # in 40 replays and 40 eager steps


# -- --enforce-eager -----------------------------------------------------------------------------


def test_enforce_eager_is_left_to_vllm_and_that_is_said_once(v0_facts: Facts):
    found = v0_facts["enforce_eager"]
    assert not found["engine"]
    assert found["graphs"] == 0
    assert found["warnings"] == [
        "graphcap leaves this engine to vLLM: --enforce-eager (no graphs were asked for); with "
        "GRAPHCAP_RECORDER=tape graphcap replays the decode step without one"
    ]
    assert found["experts of vLLM"] == 4  # two GEMMs in each of two layers
    assert found["to vllm"] == 0.0


def test_enforce_eager_with_the_tape_replays(v0_facts: Facts):
    found = v0_facts["enforce_eager, tape"]
    assert found["engine"]
    assert found["graphs"] == MOST
    assert found["replays"] == 1
    assert found["step"]["to eager"] < SAME
    assert found["step"]["tokens"]
    assert found["warnings"] == []
    assert (
        "graphcap takes the decode step: decode buckets 1, 2, 4, 8, 12; mixed batches: eager; left as "
        "the user set it: --enforce-eager"
    ) in found["lines"]


# -- vLLM's own path -----------------------------------------------------------------------------


def test_prefill_and_mixed_batches_keep_vllms_path_and_are_no_fallback(v0_facts: Facts):
    found = v0_facts["prefill"]
    assert found["before"] == found["after"]
    assert found["after"]["replays"] == 0
    assert found["tokens"] == 3
    assert found["prefill tokens"] == 40
    assert not found["graph"]
    assert found["experts"][f"more than {MOST} rows"] >= 2


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
        "raise max_num_seqs to the largest decode batch"
    )
    assert v0_facts["long sequence"]["warnings"][0].endswith(
        "a sequence has 41 tokens and the step is recorded for up to 32: raise max_seq_len_to_capture"
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
        "graphcap records nothing in this engine, steps run eagerly: bucket 8: it failed on another rank"
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
    assert found["warnings"] == ["graphcap leaves this engine to vLLM: prompt adapters"]


# -- what is told --------------------------------------------------------------------------------


def test_block_after_the_capture(v0_facts: Facts):
    text = "\n".join(v0_facts["report"]["lines"])
    assert "graphcap: the decode step is recorded (tape recorder on cpu, " in text
    assert "decode: 3 buckets of 1 to 12 sequences, up to " in text
    assert "2 MoE layers: graphcap's reference kernels up to 12 rows" in text
    assert "fallbacks so far: none" in text


def test_report_is_written(v0_facts: Facts):
    found = v0_facts["report"]
    assert found["plain"] == {
        "host": "vllm",
        "vllm": "0.6.3.post1",
        "rank": 0,
        "moe_layers": {"graphcap's reference kernels up to 12 rows": 2},
        "fallbacks": {},
    }
    assert found["buckets"] == [1, 4, 12]
    assert found["recorder"] == "tape"
    assert found["pool"][0] == found["pool"][1] > 0


def test_census_names_vllms_kernels_and_graphcaps(v0_facts: Facts):
    census = v0_facts["report"]["census"]
    assert census["paged_attention_v1"] == 2
    assert census["reshape_and_cache"] == 2
    assert census["fused_add_rms_norm"] == 4
    for operation in (
        "topk_softmax",
        "moe_align_block_size",
        "fused_moe w1",
        "fused_moe w2",
        "merge",
    ):
        assert census[operation] == 2
