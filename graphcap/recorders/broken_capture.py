"""What a capture that broke tells its user."""

from __future__ import annotations

from collections.abc import Iterator

from graphcap.errors import CaptureError
from graphcap.recorders.source import is_out_of_memory

_INVALIDATED = ("previous error during capture", "StreamCaptureInvalidated", "CAPTURE_INVALIDATED")
"""cudaErrorStreamCaptureInvalidated: the call that is refused is not the one that is to blame."""
_REFUSED = (
    *("not permitted when stream is capturing", "StreamCaptureUnsupported", "CAPTURE_UNSUPPORTED"),
    *("depend on a capturing blocking stream", "StreamCaptureImplicit", "CAPTURE_IMPLICIT"),
)
"""The call that breaks a capture, as the driver tells the one who made it."""


def says_invalidated(error: BaseException) -> bool:
    """Whether `error` is the driver's answer to a call that meets a capture which is broken already."""
    return any(text in str(error) for text in _INVALIDATED)


def explained(
    error: Exception, bucket: int, line: str, invalidated: bool | None = None
) -> CaptureError:
    """What to raise for `error`, which ended the capture of `bucket` at `line`.

    Args:
        invalidated: whether the driver had given the capture up when `error` came. Libraries tell of
            that in words of their own (CUBLAS_STATUS_EXECUTION_FAILED), if at all. None: it could not
            be asked.
    """
    if is_out_of_memory(error):
        return CaptureError(
            f"bucket {bucket}: out of device memory at {line} while recording: {error}; record "
            f"fewer or smaller buckets (GRAPHCAP_BUCKETS) or leave the device more free memory"
        )
    if any(map(says_invalidated, _chain(error))):
        return CaptureError(
            f"bucket {bucket}: the capture was broken before {line}: {error}; nothing that the step "
            f"calls shows why: keep other threads from waiting for the device (torch.cuda.synchronize) "
            f"while capture() runs, or use GRAPHCAP_RECORDER=tape"
        )
    if invalidated and not any(text in str(e) for e in _chain(error) for text in _REFUSED):
        return CaptureError(
            f"bucket {bucket}: the capture was broken before or at {line}, where {type(error).__name__} "
            f"came of it: {error}; keep other threads from waiting for the device "
            f"(torch.cuda.synchronize) while capture() runs; if it breaks without them, remove what "
            f"synchronises or allocates outside torch there, or use GRAPHCAP_RECORDER=tape"
        )
    return CaptureError(
        f"bucket {bucket}: {type(error).__name__} at {line} while recording: {error}; remove what "
        f"synchronises or allocates outside torch there, or use GRAPHCAP_RECORDER=tape"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and what it was raised from. Not what was merely being handled: an earlier capture's."""
    at: BaseException | None = error
    seen: list[BaseException] = []
    while at is not None and at not in seen:  # `raise error from error` is a circle
        seen.append(at)
        yield at
        at = at.__cause__
