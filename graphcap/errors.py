"""Every error that graphcap raises. Messages say what was expected, what was found, and the cure.

Each message ends with a pointer, such as ``(graphcap explain pool-frozen)``: a command that prints
the section of docs/troubleshooting.md with that title.
"""

from __future__ import annotations

import re
from typing import ClassVar

_POINTER = re.compile(r" \(graphcap explain ([a-z0-9-]+)\)")


def pointed(text: str, anchor: str) -> str:
    """`text` with one pointer, at its end: those of messages that it quotes are taken out."""
    return f"{_POINTER.sub('', text)} (graphcap explain {anchor})"


def anchor_in(text: str, otherwise: str) -> str:
    """The anchor that a quoted message points to, which is nearest to the cause; else `otherwise`."""
    anchors = _POINTER.findall(text)
    return str(anchors[-1]) if anchors else otherwise


class GraphcapError(Exception):
    """Base of all graphcap errors; catching it catches everything graphcap raises on purpose.

    ``str(error)`` is the message with its pointer, ``error.args[0]`` the message alone.

    Attributes:
        anchor: the section of docs/troubleshooting.md about this kind; empty for the base.
    """

    anchor: ClassVar[str] = ""

    def __str__(self) -> str:
        text = super().__str__()
        return pointed(text, self.anchor) if self.anchor else text


class SettingsError(GraphcapError):
    """An environment variable or option has a value that is not accepted."""

    anchor = "settings"


class LadderError(SettingsError):
    """A list of bucket sizes, or a batch size, is not usable."""

    anchor = "ladder"


class InputError(GraphcapError):
    """A batch does not match the slots: unknown name, wrong shape, dtype, device or row count."""

    anchor = "input"


class StateError(GraphcapError):
    """A call that the present state of the object does not allow (life: new, warmed, frozen, recorded)."""

    anchor = "state"


class PoolError(GraphcapError):
    """A buffer was taken or released in a way that the pool cannot serve."""

    anchor = "pool"


class PoolFrozenError(PoolError):
    """A request does not fit the frozen plan. Names the caller, what it asked and what is held."""

    anchor = "pool-frozen"


class PoolLimitError(PoolError):
    """The plan needs more bytes than ``GRAPHCAP_POOL_MIB`` allows."""

    anchor = "pool-limit"


class CaptureError(GraphcapError):
    """A step cannot be recorded. Names the operation, the source line and the cure."""

    anchor = "capture"


class VerificationError(GraphcapError):
    """A replay does not equal the eager step."""

    anchor = "verification"


class StaleRecordingError(GraphcapError):
    """Something a recording points at was rebound, moved or resized after it was recorded."""

    anchor = "stale-recording"


class FallbackError(GraphcapError):
    """A step would have run eagerly while ``GRAPHCAP_STRICT=1`` forbids fallbacks."""

    anchor = "fallback"


class CheckpointError(GraphcapError):
    """A checkpoint folder, its config or its tensors cannot be used. Names the value or tensor."""

    anchor = "checkpoint"


class BackendError(GraphcapError):
    """A kernel backend or recorder was asked for that this machine cannot provide."""

    anchor = "backend"


class ScrapeError(GraphcapError):
    """A metrics endpoint does not answer, or not with what was asked for. Names the address."""

    anchor = "scrape"
