"""The streams on which captures run: lent to a recorder, and lent again when it is done.

torch keeps a workspace of cuBLAS (32 MiB on an H100) for every stream that ever multiplied, for good. A
process that captures again and again on new streams would grow by one each time.
"""

from __future__ import annotations

import weakref

import torch

_idle: dict[torch.device, list[torch.cuda.Stream]] = {}


class StreamLease:
    """A stream that is nobody else's as long as this object lives: recordings made on it use its
    workspace, so they hold it too."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        idle = _idle.setdefault(torch.device("cuda", index), [])
        self.stream = idle.pop() if idle else torch.cuda.Stream(device)
        weakref.finalize(self, idle.append, self.stream).atexit = False
