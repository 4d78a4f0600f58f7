"""Served and OutputViews: what a bucket has served, and the views of its outputs that are handed out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from graphcap.errors import StaleRecordingError
from graphcap.recorders.base import Recording


class OutputViews:
    """The first `rows` rows of the outputs of a recording; read-only, handed out at every run.

    A caller owns the tensors for as long as they are valid and may do what it likes to them. What
    changes a tensor itself and not its contents (``squeeze_``, ``t_``, ``.data =``) must not be met
    again at the next run: `intact` tells.
    """

    __slots__ = ("_handed_out", "outputs")

    def __init__(self, outputs: Mapping[str, torch.Tensor], rows: int) -> None:
        self.outputs = MappingProxyType({name: tensor[:rows] for name, tensor in outputs.items()})
        self._handed_out = tuple(
            (view, view.data_ptr(), view.stride(), view.shape) for view in self.outputs.values()
        )

    def intact(self) -> bool:
        """Whether every view is still what it was when it was made."""
        for view, address, stride, shape in self._handed_out:
            if view.data_ptr() != address or view.stride() != stride or view.shape != shape:
                return False
        return True


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
