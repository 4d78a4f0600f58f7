"""Versions outside the window are refused; inside it, every hook is looked at before it is used."""

from __future__ import annotations

from pathlib import Path

import pytest
from gather import Facts
from scenarios.versions import VERSIONS

from graphcap.hosts.vllm.versions import HOOKS, in_window, window

SCENARIOS = "scenarios.versions"

REFUSED = ("0.6.2", "0.7.3", "0.25.0", "0.34.1", "1.0.0", "dev")
ACCEPTED = tuple(version for version in VERSIONS if version not in REFUSED)
NAMES = [f"{hook.module}.{hook.path}" for hook in HOOKS]

DIRECTLY = {
    # The name under which vLLM's modules import it.
    "vllm.config.vllm.VllmConfig.__post_init__": "vllm.config.VllmConfig.__post_init__",
}


# -- the window ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", REFUSED)
def test_version_outside_the_window_is_refused_with_a_warning_that_names_it(
    facts: Facts, version: str
):
    found = facts[f"version {version}"]
    assert found["state"] == "refused"
    assert found["wrapped"] == {}
    assert found["replaced"] == []
    assert found["warnings"] == [
        f"graphcap stays off: vLLM {version} is outside the versions that graphcap is made for "
        f"({window()}); install one of these, or a newer graphcap (graphcap explain stays-off)"
    ]


@pytest.mark.parametrize("version", ACCEPTED)
def test_version_inside_the_window_is_accepted(facts: Facts, version: str):
    found = facts[f"version {version}"]
    assert found["state"] == "on"
    assert found["warnings"] == []


def test_wheels_are_inside_the_window(wheel: tuple[str, Path]):
    assert in_window(wheel[0])
    assert window() == "0.6.3 and 0.26 to 0.33"


# -- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_hook_is_where_it_is_expected(facts: Facts, name: str):
    found = facts["each hook"][name]
    assert found["as it is"] is None
    assert found["put back"] is None


@pytest.mark.parametrize("name", NAMES)
def test_hook_that_is_gone_is_named(facts: Facts, name: str):
    hook = HOOKS[NAMES.index(name)]
    assert facts["each hook"][name]["gone"] == f"{hook.module} has no {hook.path}"


@pytest.mark.parametrize(
    "name", [n for n, hook in zip(NAMES, HOOKS, strict=True) if hook.parameters]
)
def test_hook_whose_parameter_has_another_name_is_named(facts: Facts, name: str):
    parameters = HOOKS[NAMES.index(name)].parameters
    renamed = facts["each hook"][name]["renamed"]
    assert renamed.startswith(f"{name} has no parameter {parameters[-1]} (found ")


def test_whatever_is_wrapped_is_looked_at_before(facts: Facts):
    found = facts["wrapped and hooked"]
    wrapped = {DIRECTLY.get(name, name) for name in found["wrapped"]}
    assert wrapped <= set(found["hooks"])


# -- parts ---------------------------------------------------------------------------------------


def test_nothing_missing_is_no_warning(facts: Facts):
    found = facts["nothing missing"]
    assert found["warnings"] == []
    assert all(engine["choice"]["taken"] for engine in found["engines"].values())


@pytest.mark.parametrize("part", ["v1", "v2", "experts"])
def test_missing_hook_costs_its_part_and_is_warned_about(facts: Facts, part: str):
    found = facts[f"missing {part}"]
    (gone,) = found["gone"]
    assert found["state"] == "on"
    assert found["parts"][part] == gone
    assert found["warnings"] == [
        f"graphcap: a hook is missing in vLLM {facts.version}: {gone} (graphcap explain missing-hook)"
    ]
    assert {p for p, text in found["parts"].items() if text == gone} == {part}


@pytest.mark.parametrize(
    ("part", "module"),
    [("v1", "vllm.v1.worker.gpu_model_runner"), ("v2", "vllm.v1.worker.gpu.cudagraph_utils")],
)
def test_missing_hook_leaves_the_other_functions_of_its_part_alone(
    facts: Facts, part: str, module: str
):
    whole, without = (facts[name]["wrapped"] for name in ("nothing missing", f"missing {part}"))
    assert any(name.startswith(module) for name in whole)
    assert not any(name.startswith(module) for name in without)
    assert set(without) < set(whole)


def test_missing_hook_of_the_layers_leaves_them_to_vllm(facts: Facts):
    assert facts["nothing missing"]["replaced"] == ["MoERunner", "UnquantizedFusedMoEMethod"]
    assert facts["missing experts"]["replaced"] == []


@pytest.mark.parametrize(("part", "runner"), [("v1", "0"), ("v2", "1")])
def test_engine_whose_model_runner_is_not_hooked_is_left_to_vllm(
    facts: Facts, part: str, runner: str
):
    found = facts[f"missing {part}"]
    engine = found["engines"][runner]
    reason = f"its model runner ({part}) is not hooked: {found['gone'][0]}"
    assert engine["choice"]["why_not"] == [reason]
    (line,) = engine["lines"]
    assert line["level"] == "WARNING"
    assert line["text"] == (
        f"graphcap leaves this engine to vLLM: {reason} (graphcap explain left-to-vllm)"
    )
    assert engine["graphs"] == engine["graphs of vLLM's"]
    other = found["engines"]["1" if runner == "0" else "0"]
    assert other["choice"]["taken"]
    assert other["graphs"] != other["graphs of vLLM's"]


@pytest.mark.parametrize("name", ["missing v1 and v2", "missing all"])
def test_without_both_runners_or_the_base_the_plugin_stays_off(facts: Facts, name: str):
    found = facts[name]
    assert found["state"] == "refused"
    assert found["wrapped"] == {}
    assert found["replaced"] == []
    assert found["warnings"] == [
        f"graphcap stays off: {'; '.join(found['gone'])} (graphcap explain stays-off)"
    ]
