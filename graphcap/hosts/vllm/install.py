"""Installing the plugin: version window, hooks by signature, then one part after the other."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphcap.explain import warn
from graphcap.hosts.vllm import versions
from graphcap.hosts.vllm.choice import Choice
from graphcap.hosts.vllm.config import (
    apply_after_on_cpu,
    apply_before,
    decide,
    withdraw,
)
from graphcap.hosts.vllm.patching import wrap
from graphcap.hosts.vllm.plugin import PluginStatus
from graphcap.settings import Settings

logger = logging.getLogger(__name__)


def install(settings: Settings, status: PluginStatus) -> None:
    """Install what this vLLM has the hooks for; fills `status`."""
    _speak_like_vllm()
    import vllm

    generation = versions.generation(vllm.__version__)
    if generation is None:
        _refuse(
            status,
            f"vLLM {vllm.__version__} is outside the versions that graphcap is made for "
            f"({versions.window()}); install one of these, or a newer graphcap",
        )
    elif generation == "V0":
        _install_v0(vllm.__version__, settings, status)
    else:
        _install_v1(vllm.__version__, settings, status)


def _install_v0(version: str, settings: Settings, status: PluginStatus) -> None:
    faults = _faults(versions.V0_HOOKS, status)
    if "all" in faults or "v0" in faults:
        _refuse(status, _listed(faults))
        return
    _warn_of(faults, version)
    from graphcap.hosts.vllm.v0 import operations, runner

    operations.install()
    if "experts" not in faults:
        from graphcap.hosts.vllm.v0 import experts

        operations.install_experts()
        status.parts["experts"] = experts.install()
    runner.install()
    status.parts["v0"] = "installed"
    from graphcap.hosts.vllm import counter_directory, metrics, served

    counter_directory.share_directory()
    served.write_at_exit(settings.report)
    status.parts["metrics"] = metrics.join_vllm_endpoint()
    status.state, status.why = "on", ""
    logger.info("graphcap is on for vLLM %s (V0 engine)", version)


def _faults(hooks: Sequence[versions.Hook], status: PluginStatus) -> dict[str, list[str]]:
    faults = versions.faults(hooks)
    for part, texts in faults.items():
        status.parts[part] = "; ".join(texts)
    return faults


def _listed(faults: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(text for texts in faults.values() for text in texts)


def _warn_of(faults: Mapping[str, Sequence[str]], version: str) -> None:
    for text in (text for texts in faults.values() for text in texts):
        warn(logger, "missing-hook", "graphcap: a hook is missing in vLLM %s: %s", version, text)


def _install_v1(version: str, settings: Settings, status: PluginStatus) -> None:
    from vllm.platforms import current_platform

    device = current_platform.device_type
    hooks = versions.HOOKS + (versions.CPU_HOOKS if device == "cpu" else ())
    faults = _faults(hooks, status)
    if "all" in faults or ("v1" in faults and "v2" in faults) or "cpu" in faults:
        _refuse(status, _listed(faults))
        return
    _warn_of(faults, version)

    _install_config(settings, device, status)
    if "v1" not in faults:
        from graphcap.hosts.vllm import runner_v1

        runner_v1.install()
        status.parts["v1"] = "installed"
        if device == "cpu":
            from graphcap.hosts.vllm import norms_cpu, runner_cpu

            runner_cpu.install()
            status.parts["cpu"] = "installed"
            status.parts["norms"] = norms_cpu.register()
    if "v2" not in faults and device == "cuda":
        from graphcap.hosts.vllm import runner_v2

        runner_v2.install()
        status.parts["v2"] = "installed"
    if device == "cuda":
        from graphcap.hosts.vllm import opened

        opened.install()
    if "experts" not in faults:
        from graphcap.hosts.vllm import experts

        status.parts["experts"] = experts.register()
    from graphcap.hosts.vllm import calls, counter_directory, metrics, served

    calls.install()
    counter_directory.share_directory()
    served.write_at_exit(settings.report)
    status.parts["metrics"] = metrics.join_vllm_endpoint()
    status.state, status.why = "on", ""
    logger.info("graphcap is on for vLLM %s (%s)", version, device)


def _refuse(status: PluginStatus, why: str) -> None:
    status.state, status.why = "refused", why
    warn(logger, "stays-off", "graphcap stays off: %s", why)


def _install_config(settings: Settings, device: str, status: PluginStatus) -> None:
    from vllm.config import VllmConfig

    def around(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        """Why: the last place where everything the user set is known and nothing is derived yet."""
        choice = Choice.of(self)
        fresh = choice is None and self.model_config is not None
        if fresh:
            choice = decide(self, settings, device=device, hopper=_is_hopper(device))
            set_back = _setter_back(self)
            apply_before(self, choice)
        result = original(self, *args, **kwargs)
        if choice is not None and choice.taken:
            gap = _gap(self, status, device)
            if gap is not None:
                choice = withdraw(self, choice, gap)
                if fresh:  # sizes and modes made for graphcap's recordings are none for vLLM's
                    set_back()
                    result = original(self, *args, **kwargs)
            elif device == "cpu":
                apply_after_on_cpu(self, choice)
        if fresh and choice is not None:
            if choice.taken:
                logger.info("%s", choice.text())
            else:
                warn(logger, "left-to-vllm", "%s", choice.text())
        return result

    wrap(VllmConfig, "__post_init__", around)


def _setter_back(config: Any) -> Callable[[], None]:
    """What puts the parts of a `VllmConfig` that the plugin writes into back to what they are now. They
    stay the same objects: whoever made them may still hold them."""
    parts = [
        part
        for part in (config.compilation_config, getattr(config, "kernel_config", None))
        if part is not None
    ]
    values = [copy.deepcopy(vars(part)) for part in parts]
    eager = config.model_config.enforce_eager

    def set_back() -> None:
        config.model_config.enforce_eager = eager
        for part, value in zip(parts, values, strict=True):
            vars(part).clear()
            vars(part).update(value)

    return set_back


def _gap(config: Any, status: PluginStatus, device: str) -> str | None:
    """What stands in the way of an engine as vLLM's own checks have left it."""
    mode = config.compilation_config.cudagraph_mode
    if device == "cuda" and not mode.has_full_cudagraphs():
        return f"vLLM came to cudagraph_mode={mode.name}, in which no whole step is captured"
    runner = "v2" if getattr(config, "use_v2_model_runner", False) else "v1"
    part = status.parts.get(runner, f"graphcap has no hooks for it on the platform {device}")
    return None if part == "installed" else f"its model runner ({runner}) is not hooked: {part}"


def _is_hopper(device: str) -> bool:
    if device != "cuda":
        return False
    from vllm.platforms import current_platform

    return bool(current_platform.is_device_capability(90))


def _speak_like_vllm() -> None:
    """Have graphcap's messages go where vLLM's go, also when vLLM sets up its logger later: it sets up
    only its own. Left alone where the user gave graphcap handlers."""
    ours = logging.getLogger("graphcap")
    if all(isinstance(handler, logging.NullHandler) for handler in ours.handlers):
        ours.parent = logging.getLogger("vllm")
