"""What a capture that broke tells its user."""

from __future__ import annotations

from graphcap.errors import CaptureError
from graphcap.recorders.source import is_out_of_memory

_INVALIDATED = "previous error during capture"
"""cudaErrorStreamCaptureInvalidated: the call that is refused is not the one that is to blame."""


def explained(error: Exception, bucket: int, line: str) -> CaptureError:
    """What to raise for `error`, which ended the capture of `bucket` at `line`."""
    if is_out_of_memory(error):
        return CaptureError(
            f"bucket {bucket}: out of device memory at {line} while recording: {error}; record "
            f"fewer or smaller buckets (GRAPHCAP_BUCKETS) or leave the device more free memory"
        )
    if _INVALIDATED in str(error):
        return CaptureError(
            f"bucket {bucket}: the capture was broken before {line}: {error}; nothing that the step "
            f"calls shows why: keep other threads from waiting for the device (torch.cuda.synchronize) "
            f"while capture() runs, or use GRAPHCAP_RECORDER=tape"
        )
    return CaptureError(
        f"bucket {bucket}: {type(error).__name__} at {line} while recording: {error}; remove what "
        f"synchronises or allocates outside torch there, or use GRAPHCAP_RECORDER=tape"
    )
