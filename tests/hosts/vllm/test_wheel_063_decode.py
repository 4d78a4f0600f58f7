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
        "GRAPHCAP_RECORDER=tape graphcap replays the decode step without one "
        "(graphcap explain left-to-vllm)"
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
    assert found["experts"]["a prefill"] >= 2


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
