"""The plugin in the wheel of vLLM 0.6.3: entry point, off is off, both windows, every hook."""

from __future__ import annotations

import pytest
from gather import Facts
from scenarios.v0_plugin import FUSED, VERSIONS

from graphcap.hosts.vllm.versions import V0_HOOKS, generation, window

V0_SCENARIOS = "scenarios.v0_plugin"

ACCEPTED = tuple(v for v in VERSIONS if v.startswith("0.6.3"))
REFUSED = tuple(v for v in VERSIONS if v not in ACCEPTED)
NAMES = [f"{hook.module}.{hook.path}" for hook in V0_HOOKS]
RUNNER = "vllm.worker.model_runner"

WRAPPED = {
    f"{RUNNER}.GPUModelRunnerBase.capture_model",
    f"{RUNNER}.ModelInputForGPUBuilder._get_cuda_graph_pad_size",
    "vllm.worker.worker.Worker._warm_up_model",
    f"{FUSED}.fused_experts",
    f"{FUSED}.invoke_fused_moe_kernel",
}


# -- off and on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["unset", "0"])
def test_off_is_off(v0_facts: Facts, name: str):
    found = v0_facts[name]
    assert found["imported"]  # vLLM found the entry point and called it
    assert found["state"] == "off"
    assert found["wrapped"] == {}
    assert found["lines"] == []


def test_plugin_that_is_not_named_is_not_loaded(v0_facts: Facts):
    assert not v0_facts["another named"]["imported"]


def test_on_installs_its_parts_and_says_so(v0_facts: Facts):
    found = v0_facts["on"]
    assert found["state"] == "on"
    assert found["parts"]["v0"] == "installed"
    assert found["wrapped"].keys() >= WRAPPED
    texts = [(line["level"], line["text"]) for line in found["lines"]]
    assert texts == [("INFO", "graphcap is on for vLLM 0.6.3.post1 (V0 engine)")]


def test_what_else_is_wrapped_are_functions_that_write_into_their_arguments(v0_facts: Facts):
    from graphcap.hosts.vllm.v0.operations import WRITE_INTO_ARGUMENTS

    others = v0_facts["on"]["wrapped"].keys() - WRAPPED
    assert others == {
        f"vllm._custom_ops.{name}" for name in (*WRITE_INTO_ARGUMENTS, "topk_softmax")
    }


@pytest.mark.parametrize("when", ["once", "anew", "forked"])
def test_registering_again_wraps_nothing_twice(v0_facts: Facts, when: str):
    found = v0_facts["twice"]
    assert set(found[when]["wrapped"].values()) == {1}
    assert found[when]["wrapped"] == found["once"]["wrapped"]


# -- fused_experts -------------------------------------------------------------------------------


def test_every_module_that_holds_fused_experts_gets_the_pooled_one(v0_facts: Facts):
    found = v0_facts["holders"]
    assert set(found["before"]) >= {
        FUSED,
        "vllm.model_executor.layers.fused_moe",
        "vllm.model_executor.models.arctic",
        "a_vendors_plugin",
    }
    assert found["still"] == []
    assert found["after"] == found["before"]
    assert found["later"]
    assert found["original kept"]
    assert found["part"] == f"fused_experts replaced in {len(found['before'])} modules"


# -- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", REFUSED)
def test_version_in_neither_window_is_refused_and_both_are_named(v0_facts: Facts, version: str):
    found = v0_facts[f"version {version}"]
    assert found["state"] == "refused"
    assert found["wrapped"] == {}
    assert found["warnings"] == [
        f"graphcap stays off: vLLM {version} is outside the versions that graphcap is made for "
        f"(0.6.3 and 0.26 to 0.33); install one of these, or a newer graphcap (graphcap explain stays-off)"
    ]


@pytest.mark.parametrize("version", ACCEPTED)
def test_post_releases_and_vendors_builds_are_inside(v0_facts: Facts, version: str):
    found = v0_facts[f"version {version}"]
    assert found["state"] == "on"
    assert found["warnings"] == []


def test_generations():
    assert window() == "0.6.3 and 0.26 to 0.33"
    assert [generation(v) for v in ("0.6.3", "0.6.30", "0.26.0", "0.33.9+cpu", "dev", "0.6")] == [
        *("V0", None, "V1", "V1", None, None)
    ]


# -- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_hook_is_where_it_is_expected(v0_facts: Facts, name: str):
    found = v0_facts["each hook"][name]
    assert found["as it is"] is None
    assert found["put back"] is None


@pytest.mark.parametrize("name", NAMES)
def test_hook_that_is_gone_or_renamed_is_named(v0_facts: Facts, name: str):
    hook, found = V0_HOOKS[NAMES.index(name)], v0_facts["each hook"][name]
    assert found["gone"] == f"{hook.module} has no {hook.path}"
    assert found["renamed"].startswith(f"{name} has no parameter {hook.parameters[-1]} (found ")


def test_without_the_runners_hooks_the_plugin_stays_off(v0_facts: Facts):
    found = v0_facts["no pad size"]
    gone = f"{RUNNER} has no ModelInputForGPUBuilder._get_cuda_graph_pad_size"
    assert found["state"] == "refused"
    assert found["wrapped"] == {}
    assert found["warnings"] == [f"graphcap stays off: {gone} (graphcap explain stays-off)"]


def test_without_fused_experts_the_layers_stay_vllms(v0_facts: Facts):
    found = v0_facts["no fused_experts"]
    gone = f"{FUSED} has no fused_experts"
    assert found["state"] == "on"
    assert found["parts"]["experts"] == gone
    assert found["warnings"] == [
        f"graphcap: a hook is missing in vLLM 0.6.3.post1: {gone} (graphcap explain missing-hook)"
    ]
    assert not any(name.startswith(FUSED) for name in found["wrapped"])


# -- doctor --------------------------------------------------------------------------------------


def test_doctor_looks_at_the_hooks_of_this_engine(v0_facts: Facts):
    found = v0_facts["looked at"]
    assert found["why_not"] == []
    assert found["vllm"] == "0.6.3.post1"
    assert {hook["name"] for hook in found["hooks"]} == set(NAMES)
    assert all(hook["fault"] is None for hook in found["hooks"])
    assert found["loaded_by_vllm"]
    assert found["parts"]["v0"] == "installed"
    assert found["recorder"] == "tape"
    assert found["warnings"] == [
        "vLLM 0.6.3.post1 decides on a model when its engine has loaded it: the line 'graphcap takes the "
        "decode step' of its log says what was chosen"
    ]
