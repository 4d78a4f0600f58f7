"""Every error that graphcap raises. Messages say what was expected, what was found, and the cure."""

from __future__ import annotations


class GraphcapError(Exception):
    """Base of all graphcap errors; catching it catches everything graphcap raises on purpose."""


class SettingsError(GraphcapError):
    """An environment variable or option has a value that is not accepted."""


class LadderError(SettingsError):
    """A list of bucket sizes, or a batch size, is not usable."""


class InputError(GraphcapError):
    """A batch does not match the slots: unknown name, wrong shape, dtype, device or row count."""


class StateError(GraphcapError):
    """A call that the present state of the object does not allow (life: new, warmed, frozen, recorded)."""


class PoolError(GraphcapError):
    """A buffer was taken or released in a way that the pool cannot serve."""


class PoolFrozenError(PoolError):
    """A request does not fit the frozen plan. Names the caller, what it asked and what is held."""


class PoolLimitError(PoolError):
    """The plan needs more bytes than ``GRAPHCAP_POOL_MIB`` allows."""


class CaptureError(GraphcapError):
    """A step cannot be recorded. Names the operation, the source line and the cure."""


class VerificationError(GraphcapError):
    """A replay does not equal the eager step."""


class StaleRecordingError(GraphcapError):
    """Something a recording points at was rebound, moved or resized after it was recorded."""


class FallbackError(GraphcapError):
    """A step would have run eagerly while ``GRAPHCAP_STRICT=1`` forbids fallbacks."""


class CheckpointError(GraphcapError):
    """A checkpoint folder, its config or its tensors cannot be used. Names the value or tensor."""


class BackendError(GraphcapError):
    """A kernel backend or recorder was asked for that this machine cannot provide."""


class ScrapeError(GraphcapError):
    """A metrics endpoint does not answer, or not with what was asked for. Names the address."""
