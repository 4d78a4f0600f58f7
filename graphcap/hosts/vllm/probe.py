"""What ``graphcap doctor --vllm`` asks of vLLM, in a process of its own: `main` writes the answer as JSON.

Of its own because vLLM is slow to import, prints, sets up logging, keeps what it found for the life of
the process, and may end it. The caller has set ``GRAPHCAP=1`` for it: whatever the user's shell says, the
question is what the plugin would do.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from graphcap.errors import InputError
from graphcap.hosts.vllm import plugin, versions
from graphcap.settings import Settings


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--given", type=json.loads, default=[])
    options = parser.parse_args(arguments)
    found = look(options.model, options.given)
    options.result.write_text(json.dumps(found))


def look(model: str | None = None, given: Sequence[str] = ()) -> dict[str, Any]:
    """What is there, what the plugin did with it, and, for a `model` with the options `given`, what it
    would choose.

    Keys that could not be reached are missing; ``why_not`` (a list) and ``warnings`` say why.
    """
    found: dict[str, Any] = {"why_not": [], "warnings": []}
    try:
        import vllm

        found["vllm"] = vllm.__version__
        if not versions.in_window(vllm.__version__):
            plugin.register()
            found["why_not"].append(plugin.STATUS.why)
            return found
        generation = versions.generation(vllm.__version__)
        found |= _platform() if generation == "V1" else _platform_v0()
        hooks = versions.V0_HOOKS
        if generation == "V1":
            hooks = versions.HOOKS + (versions.CPU_HOOKS if found["device"] == "cpu" else ())
        found["hooks"] = [
            {
                "needed_for": hook.needed_for,
                "name": f"{hook.module}.{hook.path}",
                "fault": hook.fault(),
            }
            for hook in hooks
        ]
        found["loaded_by_vllm"] = _load()
    except Exception as error:  # of any kind: other people's code is imported and run
        found["why_not"].append(f"vLLM cannot be asked: {_text(error)}")
        return found
    status = plugin.STATUS
    found["parts"] = dict(status.parts)
    found["prometheus_client"] = _version("prometheus-client")
    if status.state != "on":
        found["why_not"].append(status.why or "the plugin is off")
        return found
    if found["device"] not in ("cuda", "cpu"):
        found["why_not"].append(
            f"vLLM finds no device that graphcap serves (its platform is {found['platform']})"
        )
        return found
    found |= _recorder_and_kernels(found, generation == "V0")
    if model is not None and generation == "V0":
        found["warnings"].append(
            f"vLLM {vllm.__version__} decides on a model when its engine has loaded it: the line 'graphcap "
            f"takes the decode step' of its log says what was chosen"
        )
    elif model is not None:
        found["model"] = _choice_for(model, given)
        found["warnings"] += found["model"].pop("warnings", [])
        found["why_not"] += found["model"]["why_not"]
    return found


def _platform() -> dict[str, Any]:
    from vllm.platforms import current_platform

    device = str(current_platform.device_type)
    name = type(current_platform).__name__
    if device == "cuda":
        name = current_platform.get_device_name()
        capability = current_platform.get_device_capability()
        if capability is not None:
            name += f", compute capability {capability.major}.{capability.minor}"
    return {"device": device, "platform": name}


def _platform_v0() -> dict[str, Any]:
    """vLLM 0.6.3 asks torch for a device; its own platform may be unknown to it, such as a vendor's."""
    import torch
    from vllm.platforms import current_platform

    if torch.cuda.is_available():
        return {"device": "cuda", "platform": torch.cuda.get_device_name()}
    return {"device": "cpu", "platform": type(current_platform).__name__}


def _load() -> bool:
    """Load vLLM's plugins as an engine does. Returns whether graphcap was among them."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    loaded = plugin.STATUS.state != "off"
    plugin.register()  # where it was not: the rest is worth knowing all the same
    return loaded


def _recorder_and_kernels(found: dict[str, Any], v0: bool) -> dict[str, Any]:
    import torch

    from graphcap.errors import BackendError
    from graphcap.hosts.vllm.experts import MOST_TOKENS, PooledExperts
    from graphcap.pool import BufferPool
    from graphcap.recorders.select import probe_capture, select_recorder

    settings = Settings.from_env()
    device = torch.device(found["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        found["warnings"].append(
            "torch sees no CUDA device in this process, so that capture was not tried; vLLM will "
            "not start here either"
        )
        recorder = "cuda, not tried"
    else:
        try:
            recorder = select_recorder(settings.recorder, device).name
        except BackendError as error:
            found["why_not"].append(str(error))
            recorder = "none"
        if device.type == "cuda":
            recorder += f" ({probe_capture(device).detail})"
    experts = PooledExperts(BufferPool(device), settings, device)
    if experts.kernels is None:
        kernels = f"vLLM's own: {experts.why}"
    else:
        most = "the largest bucket" if v0 else f"{MOST_TOKENS} tokens"
        kernels = f"graphcap's {experts.kernels.name}, up to {most}: {experts.why}"
    return {"recorder": recorder, "kernels": kernels}


def _choice_for(model: str, given: Sequence[str]) -> dict[str, Any]:
    """What the plugin makes of the configuration that ``vllm serve model`` would run with, `given` these
    options. Those that are the server's and not the engine's change nothing, which a warning says."""
    from vllm.usage.usage_lib import UsageContext

    from graphcap.hosts.vllm.choice import Choice

    try:
        arguments, others = _engine_arguments(model, given)
        # Sizes that are not given depend on the use.
        config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:
        return {"why_not": [f"vLLM makes no configuration for {model}: {_text(error)}"]}
    choice = Choice.of(config)
    if choice is None:
        return {"why_not": [f"the plugin has not seen the configuration of {model}"]}
    compilation = config.compilation_config
    left_out = f"no options of an engine, left out: {' '.join(others)}"
    return {
        "warnings": [left_out] if others else [],
        "why_not": list(choice.why_not),
        "choice": choice.to_plain(),
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "cudagraph_mode": getattr(compilation.cudagraph_mode, "name", None),
        "mode": getattr(compilation.mode, "name", None),
    }


def _engine_arguments(model: str, given: Sequence[str]) -> tuple[Any, list[str]]:
    """vLLM's ``EngineArgs``, and what of `given` is no option of an engine.

    Raises:
        InputError: vLLM refuses an option; says what it says.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options, others = parser.parse_known_args([f"--model={model}", *given])
    except SystemExit:  # what argparse does
        last = (said.getvalue().strip().splitlines() or ["no reason"])[-1]
        raise InputError(f"options of the engine: {last}") from None
    return EngineArgs.from_cli_args(options), others


def _text(error: Exception) -> str:
    """An error in one line, without what pydantic says for developers."""
    text = re.sub(r"\s*\[type=.*", "", str(error), flags=re.DOTALL)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
