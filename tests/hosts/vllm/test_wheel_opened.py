"""Operators of a real vLLM that a tape looks into; what others start on the GPU could not be seen."""

from __future__ import annotations

from gather import Facts

SCENARIOS = "scenarios.opened"


def test_operators_are_there_with_the_layer_where_it_is_looked_for(facts: Facts):
    found = facts["operators"]
    assert {name: each["argument"] for name, each in found.items()} == dict.fromkeys(
        (
            *("unified_attention_with_output", "unified_kv_cache_update"),
            *("moe_forward", "moe_forward_shared"),
        ),
        "layer_name",
    )
    assert all(each["opened"] for each in found.values())


def test_kernels_of_other_libraries_are_called_live(facts: Facts):
    assert facts["layers"] == {
        "unquantised, Triton": [True, True],
        "unquantised, FlashInfer": [False, False],
        "FP8, Marlin": [True, True],
        "FP8, DeepGEMM": [False, False],
        "no backend named": [False, False],
        "TritonAttentionImpl": [True, True],
        "FlashAttentionImpl": [True, True],
        "FlashInferImpl": [False, False],
        "unknown layer": [None],
    }


def test_backends_are_named_as_vllm_names_them(facts: Facts):
    assert {"TRITON", "MARLIN", "DEEPGEMM", "FLASHINFER_TRTLLM"} <= set(facts["backends"])
