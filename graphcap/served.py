"""Served: what is kept of one bucket while it serves."""

from __future__ import annotations

import torch

from graphcap.errors import StaleRecordingError
from graphcap.output_views import OutputViews
from graphcap.recorders.base import Recording


class Served:
    """A bucket: its recording, what it has served so far, the views it returns by row count."""

    __slots__ = ("_addresses", "batches", "recording", "replays", "size", "views")

    def __init__(self, size: int) -> None:
        self.size = size
        self.recording: Recording | None = None
        self.replays = 0
        self.batches: dict[int, int] = {}
        """Real rows -> replays."""
        self.views: dict[int, OutputViews] = {}
        self._addresses: tuple[tuple[str, torch.Tensor, int], ...] = ()

    def serve(self, recording: Recording) -> None:
        """From here on `recording` serves the bucket."""
        self.recording = recording
        self._addresses = tuple(
            (name, tensor, tensor.data_ptr()) for name, tensor in recording.outputs.items()
        )

    def stop(self) -> None:
        """No recording serves the bucket any more."""
        self.recording = None
        self.views.clear()
        self._addresses = ()

    def check_outputs(self) -> None:
        """Raises `StaleRecordingError` where memory that a replay writes to was given away: what is
        written there next may belong to somebody else."""
        for name, tensor, address in self._addresses:
            if tensor.data_ptr() != address:
                raise StaleRecordingError(
                    f"output {name!r} of bucket {self.size} has moved to another address, expected "
                    f"the memory that was recorded: its storage was resized. Outputs belong to the "
                    f"recording: clone() what you resize or free; close() this manager and capture "
                    f"again"
                )

    @property
    def rows(self) -> int:
        return sum(rows * replays for rows, replays in self.batches.items())

    @property
    def padding_rows(self) -> int:
        return self.replays * self.size - self.rows
