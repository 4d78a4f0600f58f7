"""The entry point in a real vLLM: when it is loaded, and what it does when it is off, on, or misset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from environments import run_script
from gather import Facts

SCENARIOS = "scenarios.plugin"

ALL_PARTS = {
    "v1": "installed",
    "v2": "installed",
    "experts": "MoE layers registered",
    "metrics": "graphcap metrics are shown at vLLM's /metrics endpoint",
}


def is_untouched(state: dict[str, Any]) -> bool:
    return state["wrapped"] == {} and state["replaced"] == []


# -- discovery -----------------------------------------------------------------------------------


@pytest.mark.parametrize("plugins", ["all", "named"])
def test_vllm_discovers_and_calls_the_entry_point(facts: Facts, plugins: str):
    found = facts[plugins]
    assert found["state"] == "on"
    assert found["parts"] == ALL_PARTS
    assert "vllm.config.vllm.VllmConfig.__post_init__" in found["wrapped"]
    assert found["replaced"] == ["MoERunner", "UnquantizedFusedMoEMethod"]


@pytest.mark.parametrize("plugins", ["another named", "none named"])
def test_vllm_plugins_restricts_it(facts: Facts, plugins: str):
    found = facts[plugins]
    assert not found["imported"]
    assert is_untouched(found)
    assert found["lines"] == []


# -- off is off ----------------------------------------------------------------------------------

REGISTER = """
import os, sys
from environments import report
import logging

records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append([record.levelname, record.name])
logging.getLogger().addHandler(Keep())
logging.getLogger("graphcap").setLevel(logging.DEBUG)

found = {}
for value in (None, "0", "", " "):
    os.environ.pop("GRAPHCAP", None)
    if value is not None:
        os.environ["GRAPHCAP"] = value
    from graphcap.hosts.vllm import plugin
    plugin.register()
    found[str(value)] = [plugin.STATUS.state, *sorted({"torch", "vllm", "numpy"} & set(sys.modules))]
report({"found": found, "records": records})
"""


def test_off_imports_neither_torch_nor_vllm_and_is_silent(wheel: tuple[str, Path]):
    _, python = wheel
    found = run_script(python, REGISTER)
    assert found["found"] == {value: ["off"] for value in ("None", "0", "", " ")}
    assert {level for level, _ in found["records"]} == {"DEBUG"}


@pytest.mark.parametrize("value", ["unset", "0", "empty"])
def test_off_changes_nothing_in_vllm(facts: Facts, value: str):
    found = facts[value]
    assert found["imported"]
    assert found["state"] == "off"
    assert is_untouched(found)
    assert found["lines"] == []


@pytest.mark.parametrize("value", ["unset", "0", "empty"])
def test_off_leaves_the_compile_hash_as_it_is_without_graphcap(facts: Facts, value: str):
    assert facts[value]["hash"] == facts["another named"]["hash"]


# -- on ------------------------------------------------------------------------------------------


def test_on_salts_the_compile_hash(facts: Facts):
    assert facts["all"]["hash"] != facts["another named"]["hash"]
    assert facts["all"]["hash"] == facts["named"]["hash"] == facts["hashes"]["here"]


def test_kernels_are_part_of_the_compile_hash(facts: Facts):
    assert facts["hash with reference kernels"] not in (
        facts["all"]["hash"],
        facts["another named"]["hash"],
    )


def test_compile_hash_is_the_same_in_every_process(facts: Facts):
    assert facts["hashes"]["here"] == facts["hashes"]["elsewhere"]


@pytest.mark.parametrize("when", ["once", "again", "anew", "forked"])
def test_registering_again_wraps_nothing_twice(facts: Facts, when: str):
    found = facts["twice"]
    assert set(found[when]["wrapped"].values()) == {1}
    assert found[when] == found["once"]
    assert found["lines"] == []


def test_messages_go_where_vllms_go_unless_the_user_has_a_handler(facts: Facts):
    found = facts["log of the user"]
    assert found["without"] == "vllm"
    assert found["with"].startswith("<RootLogger root")


# -- misset --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "accepted"),
    [
        (
            "GRAPHCAP_BUCKETS=banana",
            "auto, or positive integers such as 1,2,4,8,64, or plan:FILE",
        ),
        ("GRAPHCAP_RECORDER=vinyl", "one of auto, cuda, tape"),
        ("GRAPHCAP=yes", "0 or 1"),
    ],
)
def test_bad_setting_ends_the_start_and_says_what_is_accepted(
    facts: Facts, setting: str, accepted: str
):
    name, value = setting.split("=")
    found = facts[setting]
    assert found["raised"] == [
        "SettingsError",
        f"{name}: expected {accepted}, found '{value}'; correct or unset it (graphcap explain settings)",
    ]
    assert is_untouched(found)


def test_misspelt_setting_is_warned_about(facts: Facts):
    found = facts["misspelt"]
    assert found["state"] == "on"
    assert found["lines"][0] == {
        "level": "WARNING",
        "by": "graphcap.settings",
        "text": "GRAPHCAP_BUKETS is not a graphcap variable and has no effect; "
        "did you mean GRAPHCAP_BUCKETS? (graphcap explain unknown-variable)",
    }


def test_module_that_breaks_on_import_costs_its_part(facts: Facts):
    found = facts["fails to install"]
    fault = "vllm.v1.worker.gpu.model_runner cannot be imported: no driver"
    assert found["parts"] == {**ALL_PARTS, "v2": fault}
    assert [line["text"] for line in found["lines"] if line["level"] == "WARNING"] == [
        f"graphcap: a hook is missing in vLLM {facts.version}: {fault} (graphcap explain missing-hook)"
    ]
