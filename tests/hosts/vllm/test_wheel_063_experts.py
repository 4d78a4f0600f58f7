"""``fused_experts`` of vLLM 0.6.3: the pooled one against vLLM's own and against float64."""

from __future__ import annotations

import pytest
from gather import Facts
from scenarios.v0_experts import MOST, OTHERS, SHAPES

V0_SCENARIOS = "scenarios.v0_experts"

KINDS = [f"{dtype} {how}" for dtype in ("bfloat16", "float16") for how in ("renormalized", "plain")]
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}  # of the largest value
OURS = f"graphcap's reference kernels up to {MOST} rows"
OF_VLLM = {"invoke_fused_moe_kernel", "moe_align_block_size", "silu_and_mul", "topk_softmax"}


@pytest.mark.parametrize("shape", [f"{m} {k}" for m, k in SHAPES])
@pytest.mark.parametrize("kind", KINDS)
def test_pooled_result_equals_vllms_and_float64(v0_facts: Facts, kind: str, shape: str):
    found, allowed = v0_facts[kind]["shapes"][shape], TOLERANCE[kind.split()[0]]
    assert found["vllm"] < allowed  # the reference is what vLLM computes
    assert found["outside"] < allowed
    assert found["inside"] < allowed
    assert found["to vllm"] < 2 * allowed
    assert found["to outside"] < allowed  # vLLM's top-k there, graphcap's here


@pytest.mark.parametrize("kind", KINDS)
def test_vllms_own_code_ran_where_it_was_compared_with(v0_facts: Facts, kind: str):
    before, outside, inside = v0_facts[kind]["kernels of vLLM"]
    assert before == {
        "invoke_fused_moe_kernel": 2 * len(SHAPES),
        "moe_align_block_size": len(SHAPES),
        "silu_and_mul": len(SHAPES),
        "topk_softmax": len(SHAPES),
    }
    assert outside == {"topk_softmax": len(SHAPES)}
    assert inside == {}  # in a step the routing is graphcap's as well


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_pool_serves_every_shape(v0_facts: Facts, kind: str):
    found = v0_facts[kind]
    assert found["allocations inside"] == 0
    assert found["calls"] == {"graphcap": 3 * len(SHAPES)}
    assert found["layers"] == {OURS: len(SHAPES)}  # each call has weights of its own here


@pytest.mark.parametrize("routing", ["vLLM's top-k", "grouped"])
def test_padding_reaches_no_expert(v0_facts: Facts, routing: str):
    found = v0_facts["padding"]
    assert found[routing]["real rows"] < TOLERANCE["bfloat16"]
    assert found[routing]["padding"] == 0.0
    assert found["calls"] == {"graphcap": 2}


def test_above_the_largest_bucket_vllms_chunk_loop_runs(v0_facts: Facts):
    found = v0_facts["above"]
    chunks = found["chunks"]
    assert chunks > 3
    assert found["above"]["kernels"] == {
        "invoke_fused_moe_kernel": 2 * chunks,
        "moe_align_block_size": chunks,
        "silu_and_mul": chunks,
        "topk_softmax": 1,
    }
    assert found["above"]["error"] < TOLERANCE["bfloat16"]


def test_up_to_it_nothing_is_chunked(v0_facts: Facts):
    found = v0_facts["above"]
    assert found["at"]["kernels"] == {"topk_softmax": 1}
    assert found["at"]["error"] < TOLERANCE["bfloat16"]
    assert found["calls"] == {f"more than {MOST} rows": 1, "graphcap": 1}


def test_quantised_experts_stay_vllms(v0_facts: Facts):
    found = v0_facts["quantised"]
    assert found["error"] < TOLERANCE["bfloat16"]
    assert found["kernels"]["invoke_fused_moe_kernel"] == 2
    assert found["calls"] == {"quantised (use_int8_w8a16, w1_scale, w2_scale)": 1}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_go_to_vllm_with_the_reason(v0_facts: Facts, name: str):
    reasons = {
        "configuration": "asked for (override_config)",
        "float32": "its dtypes (torch.float32, torch.float32, torch.float32)",
        "routing": "its routing (torch.bfloat16, (5, 2), (5, 2))",
    }
    found = v0_facts["others"][name]
    assert found["reason"] == reasons[name]
    assert found["error"] < TOLERANCE["bfloat16"]


def test_without_kernels_of_graphcap_layers_stay_on_vllms(v0_facts: Facts):
    found = v0_facts["without kernels"]
    assert found["error"] < TOLERANCE["bfloat16"]
    assert found["calls"] == {"GRAPHCAP_KERNELS=vllm": 1}
    assert found["layers"] == {"vLLM's kernels: GRAPHCAP_KERNELS=vllm": 1}


def test_a_prefill_keeps_vllms_path_however_short(v0_facts: Facts):
    found = v0_facts["prefill"]
    assert found["calls"] == {"a prefill": 1, "graphcap": 1}
    assert set(found["kernels"]) == OF_VLLM
    assert found["error"] < TOLERANCE["bfloat16"]


def test_top_k_and_fused_moe_are_ranges_where_asked_for(v0_facts: Facts):
    top_k, fused = ["top-k", "end"], ["fused MoE", "end"]
    assert v0_facts["ranges"] == {"in a step": top_k + fused, "outside": fused}


def test_without_an_engine_nothing_is_graphcaps(v0_facts: Facts):
    found = v0_facts["no engine"]
    assert found["error"] < TOLERANCE["bfloat16"]
    assert set(found["kernels"]) == OF_VLLM
