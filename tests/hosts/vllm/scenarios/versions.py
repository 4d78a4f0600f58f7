"""Versions of vLLM that the plugin refuses, and hooks that are not where it expects them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from scenarios.common import (
    engine_config,
    from_graphcap,
    log_records,
    set_variables,
    turn_on,
    warnings_in,
)
from scenarios.plugin import state

VERSIONS = (
    "0.6.2",
    "0.7.3",
    "0.25.0",
    "0.26.1",
    "0.33.1",
    "0.33.0+cu130",
    "0.34.1",
    "1.0.0",
    "dev",
)


def version(text: str) -> dict[str, Any]:
    """The plugin in a vLLM that says it is another version."""
    import vllm

    vllm.__version__ = text
    with log_records() as records:
        turn_on()
    from graphcap.hosts.vllm.plugin import STATUS

    lines = from_graphcap(records)
    return {**state(), "why": STATUS.why, "lines": lines, "warnings": warnings_in(records)}


def owner_of(path: str, module: str) -> tuple[Any, str]:
    owner = import_module(module)
    *classes, name = path.split(".")
    for class_name in classes:
        owner = getattr(owner, class_name)
    return owner, name


def each_hook(table: str = "HOOKS") -> dict[str, Any]:
    """What is said of each hook as it is, when it is gone, and when its last parameter is."""
    from graphcap.hosts.vllm import versions

    found = {}
    for hook in getattr(versions, table):
        as_it_is = hook.fault()
        owner, name = owner_of(hook.path, hook.module)
        inherited = isinstance(owner, type) and any(name in vars(c) for c in owner.__mro__[1:])
        without = hook.path.split(".")[0] if inherited else hook.path
        holder, gone_name = owner_of(without, hook.module)
        original = vars(holder)[gone_name]
        delattr(holder, gone_name)
        gone = hook.fault()
        setattr(holder, gone_name, original)

        function = vars(owner).get(name)
        setattr(owner, name, _function_of(hook.parameters[:-1]))
        renamed = hook.fault()
        if function is None:
            delattr(owner, name)
        else:
            setattr(owner, name, function)
        found[f"{hook.module}.{hook.path}"] = {
            "as it is": as_it_is,
            "gone": gone,
            "renamed": renamed,
            "put back": hook.fault(),
        }
    return found


def _function_of(names: Sequence[str]) -> Any:
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]

    def function(*args: Any, **kwargs: Any) -> None: ...

    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def missing(*parts: str) -> dict[str, Any]:
    """The plugin where one hook of each of `parts` is gone; then an engine for each model runner."""
    set_variables({"VLLM_PLUGINS": "graphcap,graphcap_test_platform"})
    gone = []
    for part in parts:
        module, path = GONE[part]
        delattr(*owner_of(path, module))
        gone.append(f"{module} has no {path}")
    with log_records() as records:
        turn_on()
    from graphcap.hosts.vllm.plugin import STATUS

    found = {**state(), "why": STATUS.why, "gone": gone, "warnings": warnings_in(records)}
    if STATUS.state == "on":
        found["engines"] = {}
        for runner in ("0", "1"):
            set_variables({"VLLM_USE_V2_MODEL_RUNNER": runner})
            with log_records() as records:
                config = engine_config()
            # One that says that it has been decided against is left as vLLM makes it.
            plain = engine_config(additional_config={"graphcap": {"taken": False}})
            found["engines"][runner] = {
                "choice": config.additional_config["graphcap"],
                "lines": from_graphcap(records),
                "graphs": _graphs(config),
                "graphs of vLLM's": _graphs(plain),
            }
    return found


def _graphs(config: Any) -> dict[str, Any]:
    settings = config.compilation_config
    return {
        "mode": settings.mode.name,
        "cudagraph_mode": settings.cudagraph_mode.name,
        "sizes": settings.cudagraph_capture_sizes,
        "largest": settings.max_cudagraph_capture_size,
        "splitting": settings.splitting_ops,
    }


GONE = {
    "v1": ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._warmup_and_capture"),
    "v2": ("vllm.v1.worker.gpu.cudagraph_utils", "CudaGraphManager.run_fullgraph"),
    "experts": (
        "vllm.model_executor.layers.fused_moe.runner.moe_runner",
        "MoERunner._forward_impl",
    ),
    "all": ("vllm.forward_context", "get_forward_context"),
}


def wrapped_and_hooked() -> dict[str, Any]:
    """What is wrapped or replaced, beside what is checked before."""
    turn_on()
    from graphcap.hosts.vllm.versions import HOOKS

    return {**state(), "hooks": [f"{hook.module}.{hook.path}" for hook in HOOKS]}


SCENARIOS = {
    **{f"version {text}": partial(version, text) for text in VERSIONS},
    "each hook": each_hook,
    "wrapped and hooked": wrapped_and_hooked,
    "nothing missing": missing,
    "missing v1": partial(missing, "v1"),
    "missing v2": partial(missing, "v2"),
    "missing v1 and v2": partial(missing, "v1", "v2"),
    "missing experts": partial(missing, "experts"),
    "missing all": partial(missing, "all"),
}
