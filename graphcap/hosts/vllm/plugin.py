"""The entry point that vLLM calls in every process: ``vllm.general_plugins`` -> `register`.

Importing this module imports neither torch nor vLLM: without ``GRAPHCAP=1`` nothing else happens.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass
class PluginStatus:
    """What `register` found and did in this process; ``graphcap doctor --vllm`` shows it.

    Attributes:
        state: ``off``, ``refused`` or ``on``.
        why: of a refusal.
        parts: what is installed (or why not), by part: v0, v1, v2, cpu, experts, metrics.
    """

    state: str = "off"
    why: str = ""
    parts: dict[str, str] = field(default_factory=dict)


STATUS = PluginStatus()


def register() -> None:
    """Install the plugin where ``GRAPHCAP=1``. Idempotent; never raises into vLLM but for settings.

    Raises:
        SettingsError: a ``GRAPHCAP*`` variable has a value that is not accepted.
    """
    if os.environ.get("GRAPHCAP", "0").strip() in ("", "0"):
        logger.debug("graphcap is installed and off; GRAPHCAP=1 turns it on")
        return
    if STATUS.state == "on":
        return
    from graphcap.settings import Settings

    settings = Settings.from_env()
    if not settings.enabled:
        return
    from graphcap.hosts.vllm.install import install

    install(settings, STATUS)
