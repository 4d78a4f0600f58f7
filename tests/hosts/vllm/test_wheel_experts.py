"""MoE blocks of vLLM's model code on graphcap's pool and kernels, held against float64."""

from __future__ import annotations

from typing import Any

import pytest
from gather import Facts

SCENARIOS = "scenarios.experts"

TOLERANCE = 1e-2  # of the largest value; the layers are bfloat16
OURS = "graphcap's reference kernels up to 64 tokens"
THEIRS = {"vLLM's gate": 1, "vLLM's routing": 1, "vLLM's experts": 1}
"""Calls of vLLM's own path."""

KINDS = {
    "renormalized": {},
    "not renormalized": {},
    "shared expert": {"vLLM's shared_expert_gate": 1},  # runs in either case
}


def is_vllms(run: dict[str, Any]) -> bool:
    return run["called"] == THEIRS and run["error"] < TOLERANCE


# -- inside a step of graphcap's -----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_layer_is_graphcaps_class_over_vllms_weights(facts: Facts, kind: str):
    found = facts[kind]
    assert found["classes"] == ["PooledMoERunner", "PooledMoEMethod"]
    assert found["backend"] == "TRITON"
    assert found["renormalize"] == (kind != "not renormalized")


@pytest.mark.parametrize("run", ["inside", "inside again"])
@pytest.mark.parametrize("kind", KINDS)
def test_result_equals_float64(facts: Facts, kind: str, run: str):
    assert facts[kind][run]["error"] < TOLERANCE
    assert facts[kind][run]["layers"] == {OURS: 1}


@pytest.mark.parametrize("kind", KINDS)
def test_neither_gate_nor_routing_nor_experts_of_vllm_run(facts: Facts, kind: str):
    assert facts[kind]["inside"]["called"] == KINDS[kind]


@pytest.mark.parametrize("kind", ["renormalized", "not renormalized"])
def test_padding_reaches_no_expert(facts: Facts, kind: str):
    assert facts[kind]["inside"]["padding"] == 0.0
    assert facts[kind]["outside"]["padding"] > 0.1  # it would give something


def test_padding_has_the_shared_expert_and_nothing_else(facts: Facts):
    assert facts["shared expert"]["inside"]["padding"] < 0.03
    assert facts["shared expert"]["outside"]["padding"] > 0.1


# -- vLLM's own path -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_outside_of_a_step_the_layer_is_vllms(facts: Facts, kind: str):
    found = facts[kind]
    assert found["outside"]["called"] == {**THEIRS, **KINDS[kind]}
    assert found["outside"]["error"] < TOLERANCE
    assert not found["monolithic outside"]


def test_names_of_weights_are_those_without_graphcap(facts: Facts):
    found = facts["without graphcap"]
    assert found["classes"] == ["MoERunner", "UnquantizedFusedMoEMethod"]
    assert found["parameters"] == facts["renormalized"]["parameters"]
    assert is_vllms(found["outside"])


def test_more_tokens_than_a_decode_batch_are_vllms(facts: Facts):
    found = facts["many rows"]
    assert found["most"]["called"] == {}
    assert found["most"]["error"] < TOLERANCE
    assert is_vllms(found["one more"])


@pytest.mark.parametrize(
    ("scenario", "why"),
    [
        ("no slots", "its step does not tell padding"),
        ("GRAPHCAP_KERNELS=vllm", "GRAPHCAP_KERNELS=vllm"),
        ("GRAPHCAP_KERNELS=auto", "vLLM's kernels are the faster ones on cpu"),
    ],
)
def test_layer_that_stays_on_vllms_kernels_is_counted_with_the_reason(
    facts: Facts, scenario: str, why: str
):
    assert is_vllms(facts[scenario])
    assert facts[scenario]["layers"] == {f"vLLM's kernels: {why}": 1}


def test_step_that_fails_half_way_leaves_the_layer_as_it_was(facts: Facts):
    found = facts["raises inside"]
    assert found["raised"] == "half way"
    assert is_vllms(found["outside"])
    assert found["inside"]["called"] == {}
    assert found["inside"]["error"] < TOLERANCE


# -- layers that graphcap's kernels cannot run ---------------------------------------------------

OBSTACLES = {
    "quantised": "quantised (Quantised)",
    "router outside": "its router runs outside the layer",
    "other router": "GroupedTopKRouter",
    "routing returned": "its routing is returned",
    "sigmoid": "its scores are no softmax",
    "activation": "its activation is not SiLU",
    "weighted input": "it weights its input",
    "spread experts": "its experts are spread over ranks",
    "biases": "its experts have biases",
    "clamped": "its SwiGLU is clamped",
    "fused gate": "its shared expert is fused into the router",
    "transformed input": "it transforms its input",
    "biased router": "its router has a bias",
    "other layout": "its weight layout",
    "not contiguous": "its weights are not contiguous",
    "other dtype": "its dtypes (torch.bfloat16, torch.float32)",
    "other gate dtype": "its dtypes (torch.float32, torch.bfloat16)",
    "other shapes": "its weight shapes",
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_obstacle_is_found_and_named(facts: Facts, name: str):
    assert facts["obstacles"][name] == OBSTACLES[name]


@pytest.mark.parametrize("name", ["none", "none, put back"])
def test_plain_layer_has_no_obstacle(facts: Facts, name: str):
    assert facts["obstacles"][name] is None


# -- other plugins -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "registered"),
    [("MoERunner", "TheirRunner"), ("UnquantizedFusedMoEMethod", "TheirMethod")],
)
def test_class_of_another_plugin_stays_theirs(facts: Facts, name: str, registered: str):
    found = facts[f"their {name}"]
    assert found["state"] == "on"
    assert found["registered"] == {name: registered}
    assert found["part"] == (f"{name} replaced by another plugin: MoE layers stay on its kernels")
