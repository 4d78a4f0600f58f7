"""Choice: what the plugin decided for one engine, as plain values that travel in vLLM's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from graphcap import __version__

KEY = "graphcap"
"""Where it is in ``VllmConfig.additional_config``."""


@dataclass(frozen=True)
class Choice:
    """What the plugin decided for one engine.

    Attributes:
        taken: decode steps are graphcap's.
        why_not: where it is not taken, what stands in the way.
        mixed: how mixed prefill-decode batches run: ``full`` (graphcap records them as well),
            ``piecewise`` (vLLM's own compiled pieces), ``eager``.
        decode: sizes of the ladder, in sequences.
        mixed_tokens: sizes of the mixed ladder, in tokens; empty unless `mixed` is ``full``.
        chosen: what the plugin set, in vLLM's words.
        left_alone: what the user had set, and the plugin did not touch.
        recorder: ``cuda``, or ``tape``, which needs the model uncompiled.
        version: graphcap's, so that the compile hash follows it.
        kernels: what GRAPHCAP_KERNELS asks for: the traced model may depend on it.
    """

    taken: bool
    why_not: tuple[str, ...] = ()
    mixed: str = "eager"
    decode: tuple[int, ...] = ()
    mixed_tokens: tuple[int, ...] = ()
    chosen: tuple[str, ...] = ()
    left_alone: tuple[str, ...] = ()
    recorder: str = "cuda"
    version: str = __version__
    kernels: str = "auto"

    def to_plain(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def of(cls, vllm_config: Any) -> Choice | None:
        """The choice made for `vllm_config`; None where the plugin has not seen it."""
        extra = getattr(vllm_config, "additional_config", None)
        plain = extra.get(KEY) if isinstance(extra, Mapping) else None
        if plain is None:
            return None
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()
        }
        return cls(**fields)

    def text(self) -> str:
        if not self.taken:
            return f"graphcap leaves this engine to vLLM: {'; '.join(self.why_not)}"
        parts = [f"decode buckets {_short(self.decode)}", f"mixed batches: {self.mixed}"]
        if self.chosen:
            parts.append("set " + ", ".join(self.chosen))
        if self.left_alone:
            parts.append("left as the user set it: " + ", ".join(self.left_alone))
        return "graphcap takes the decode step: " + "; ".join(parts)


def _short(sizes: tuple[int, ...]) -> str:
    if len(sizes) <= 6:
        return ", ".join(map(str, sizes))
    return f"{', '.join(map(str, sizes[:4]))} … {sizes[-1]} ({len(sizes)})"
