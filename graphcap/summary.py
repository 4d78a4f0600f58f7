"""What a capture tells: its report, and the note about what is read and not watched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphcap.capturing import BucketCapture
from graphcap.inputs import Inputs
from graphcap.pool import BufferPool
from graphcap.recorders.base import Recorder, Recording
from graphcap.report import CaptureReport


def report_of(
    captured: BucketCapture,
    recorder: Recorder,
    inputs: Inputs,
    pool: BufferPool,
    step: Any,
    seconds: float,
    notes: Iterable[str | None],
) -> CaptureReport:
    """The report of a capture that took `seconds`; `notes` of None are left out."""
    largest = max(captured.recordings, default=None)
    choice = getattr(step, "bucket_choice", lambda size: "")
    reports = (captured.reports[size] for size in sorted(captured.reports))
    return CaptureReport(
        recorder=recorder.name,
        device=_device_name(inputs.device),
        buckets=tuple(replace(each, choice=str(choice(each.size))) for each in reports),
        failures=captured.failures_text(),
        pool_bytes=pool.nbytes,
        pool_lower_bound_bytes=pool.plan.lower_bound,
        slots_bytes=sum(t.nbytes for t in inputs.pinned.values()),
        seconds=seconds,
        census=None if largest is None else captured.recordings[largest].census(),
        kernels=tuple(getattr(step, "kernel_choices", ())),
        pool_layout=pool.layout,
        notes=tuple(note for note in notes if note),
    )


def unwatched_note(
    recordings: Mapping[int, Recording], known: Sequence[torch.Tensor]
) -> str | None:
    """Say what the recordings read and no name leads to: rebinding it will not be noticed.

    Args:
        known: what is watched, and what belongs to graphcap.
    """
    seen = {t.untyped_storage().data_ptr() for t in known}
    unseen = {
        storage.data_ptr(): storage.nbytes()
        for recording in recordings.values()
        for storage in recording.pinned
        if storage.data_ptr() not in seen
    }
    if not unseen:
        return None
    return (
        f"the step reads {len(unseen)} tensors ({sum(unseen.values()) / 2**20:.2f} MiB) that "
        f"no name leads to from it (a cache, a set, a weak reference): "
        f"they are kept alive, but rebinding them is not noticed"
    )


def stranded_note(recorder: Recorder, recordings: Mapping[int, Recording]) -> str | None:
    """Say how much memory failed recordings keep from being given back."""
    if not recorder.stranded or not recordings:
        return None
    return (
        f"{recorder.stranded / 2**20:.2f} MiB that failed recordings cost stay with the graph memory pool "
        f"that the others share, until these are closed"
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
