"""Served: what is kept of one bucket while it serves."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphcap.recorders.base import Recording


class Served:
    """A bucket: its recording, what it has served so far, the views it returns by row count."""

    __slots__ = ("batches", "recording", "replays", "size", "views")

    def __init__(self, size: int) -> None:
        self.size = size
        self.recording: Recording | None = None
        self.replays = 0
        self.batches: dict[int, int] = {}
        """Real rows -> replays."""
        self.views: dict[int, Mapping[str, torch.Tensor]] = {}

    @property
    def rows(self) -> int:
        return sum(rows * replays for rows, replays in self.batches.items())

    @property
    def padding_rows(self) -> int:
        return self.replays * self.size - self.rows
