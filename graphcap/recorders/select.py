"""Which recorder this machine gets, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch

from graphcap.errors import BackendError
from graphcap.explain import warn
from graphcap.recorders.base import Recorder
from graphcap.recorders.probe import CaptureProbe, probe_capture

__all__ = ["CaptureProbe", "probe_capture", "select_recorder"]

logger = logging.getLogger(__name__)


def select_recorder(
    wanted: str,
    device: torch.device,
    probe: Callable[[torch.device], CaptureProbe] | None = None,
) -> Recorder:
    """The recorder for ``GRAPHCAP_RECORDER=wanted`` on `device`.

    ``auto`` is ``cuda`` where the probe captures, otherwise ``tape``. On a CUDA device the latter is
    one WARNING per process, and stands in the capture report's notes.

    Args:
        probe: asked whether `device` captures; None: `probe_capture`.

    Raises:
        BackendError: ``cuda`` was asked for and capture does not work; gives the probe's error.
        StateError: the probe has not run yet and this thread is capturing.
    """
    from graphcap.recorders.tape import TapeRecorder

    if wanted == "tape" or (wanted == "auto" and device.type != "cuda"):
        return TapeRecorder(device)
    found = (probe or probe_capture)(device)
    if found.works:
        from graphcap.recorders.cuda import CudaRecorder

        return CudaRecorder(device)
    if wanted == "cuda":
        raise BackendError(
            f"the cuda recorder was asked for, but {device} cannot capture: {found.detail}; "
            f"use the tape (GRAPHCAP_RECORDER=tape, --recorder tape)"
        )
    _warn_once(device, found.detail)
    recorder = TapeRecorder(device)
    recorder.why = f"the tape was chosen: {device} cannot capture graphs ({found.detail})"
    return recorder


@cache
def _warn_once(device: torch.device, detail: str) -> None:
    warn(
        logger,
        "no-graph-capture",
        "%s cannot capture graphs (%s); the tape is used, which launches each operation by itself",
        device,
        detail,
    )
