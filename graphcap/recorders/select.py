"""Which recorder this machine gets, and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch

from graphcap.errors import BackendError
from graphcap.recorders.base import Recorder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaptureProbe:
    """Whether a graph of one kernel can be captured and replayed.

    Attributes:
        works: it can.
        detail: the time it took, or the text of the error.
    """

    works: bool
    detail: str


@cache
def probe_capture(device: torch.device) -> CaptureProbe:
    """Try a one-kernel capture on `device`; once per process and device."""
    if device.type != "cuda":
        return CaptureProbe(False, f"{device.type} devices have no graph capture")
    from graphcap.recorders.cuda import probe_capture_once

    try:
        took = probe_capture_once(device)
    except RuntimeError as error:
        return CaptureProbe(False, str(error).splitlines()[0])
    return CaptureProbe(True, f"captured and replayed in {took:.1f} ms")


def select_recorder(wanted: str, device: torch.device) -> Recorder:
    """The recorder for ``GRAPHCAP_RECORDER=wanted`` on `device`.

    ``auto`` is ``cuda`` where a probe captures, otherwise ``tape``; on a CUDA device the latter is
    a WARNING, since a tape launches each operation by itself.

    Raises:
        BackendError: ``cuda`` was asked for and capture does not work; gives the probe's error.
    """
    from graphcap.recorders.tape import TapeRecorder

    if wanted == "tape" or (wanted == "auto" and device.type != "cuda"):
        return TapeRecorder(device)
    probe = probe_capture(device)
    if probe.works:
        from graphcap.recorders.cuda import CudaRecorder

        return CudaRecorder(device)
    if wanted == "cuda":
        raise BackendError(
            f"the cuda recorder was asked for, but {device} cannot capture: {probe.detail}; "
            f"use the tape (GRAPHCAP_RECORDER=tape, --recorder tape)"
        )
    logger.warning("%s cannot capture graphs (%s); the tape is used", device, probe.detail)
    return TapeRecorder(device)
