"""vLLM 0.6.3: the entry point, off and on, hooks and versions, and who holds ``fused_experts``."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from v0.worker import turn_on

from scenarios.common import (
    from_graphcap,
    log_records,
    set_variables,
    warnings_in,
    wrapped_functions,
)
from scenarios.versions import each_hook

FUSED = "vllm.model_executor.layers.fused_moe.fused_moe"

VERSIONS = (
    *("0.6.2", "0.6.4.post1", "0.7.0", "0.8.5", "0.16.0", "0.25.0", "0.34.0"),
    *("0.6.3", "0.6.3.post1", "0.6.3+corex.3.2.3", "0.6.3.post1+corex.4.1"),
)


def state() -> dict[str, Any]:
    plugin = sys.modules.get("graphcap.hosts.vllm.plugin")
    return {
        "imported": "graphcap" in sys.modules,
        "state": None if plugin is None else plugin.STATUS.state,
        "parts": None if plugin is None else plugin.STATUS.parts,
        "wrapped": wrapped_functions(),
    }


def loaded(graphcap: str | None, plugins: str | None = None) -> dict[str, Any]:
    from vllm.plugins import load_general_plugins

    set_variables({"GRAPHCAP": graphcap, "VLLM_PLUGINS": plugins})
    with log_records() as records:
        load_general_plugins()
    return {**state(), "lines": from_graphcap(records)}


def twice() -> dict[str, Any]:
    turn_on()
    from graphcap.hosts.vllm.plugin import STATUS, register

    once = state()
    turn_on()
    STATUS.state = "off"  # as if the module had been loaded anew
    register()
    anew = state()
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        STATUS.state = "off"
        register()
        os.write(writer, json.dumps(state()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        forked = json.load(pipe)
    os.waitpid(process, 0)
    return {"once": once, "anew": anew, "forked": forked}


def holders() -> dict[str, Any]:
    """Modules that took the function by name before the plugin came, and one that comes later."""
    fused = import_module(FUSED)
    original = fused.fused_experts
    theirs = ModuleType("a_vendors_plugin")
    theirs.fused_experts = original
    sys.modules["a_vendors_plugin"] = theirs
    before = _holding(original)
    turn_on()
    later: dict[str, Any] = {}
    exec("from vllm.model_executor.layers.fused_moe import fused_experts", later)
    return {
        "before": before,
        "still": _holding(original),
        "after": _holding(fused.fused_experts),
        "later": later["fused_experts"] is fused.fused_experts,
        "original kept": fused.fused_experts.__wrapped__ is original,
        "part": state()["parts"]["experts"],
    }


def _holding(function: Any) -> list[str]:
    return sorted(
        name
        for name, module in list(sys.modules.items())
        if getattr(module, "__dict__", {}).get("fused_experts") is function
    )


def version(text: str) -> dict[str, Any]:
    """The plugin in a vLLM that says it is another version."""
    import vllm

    vllm.__version__ = text
    with log_records() as records:
        turn_on()
    return {**state(), "warnings": warnings_in(records)}


def missing(module: str, path: str) -> dict[str, Any]:
    owner = import_module(module)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    delattr(owner, name)
    with log_records() as records:
        turn_on()
    return {**state(), "warnings": warnings_in(records)}


def looked_at() -> dict[str, Any]:
    """What ``graphcap doctor --vllm`` asks."""
    from graphcap.hosts.vllm.probe import look

    set_variables({"GRAPHCAP": "1"})
    return look("a/model")


SCENARIOS = {
    "looked at": looked_at,
    "unset": partial(loaded, None),
    "0": partial(loaded, "0"),
    "another named": partial(loaded, "1", "another"),
    "on": partial(loaded, "1"),
    "twice": twice,
    "holders": holders,
    "each hook": partial(each_hook, "V0_HOOKS"),
    **{f"version {text}": partial(version, text) for text in VERSIONS},
    "no pad size": partial(
        missing, "vllm.worker.model_runner", "ModelInputForGPUBuilder._get_cuda_graph_pad_size"
    ),
    "no fused_experts": partial(missing, FUSED, "fused_experts"),
}
