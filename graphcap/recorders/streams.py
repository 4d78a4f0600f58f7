"""The streams on which captures run: lent to a recorder, and lent again when it is done.

torch keeps a workspace of cuBLAS (32 MiB on an H100) for every stream that ever multiplied. A process that
captures again and again on new streams would grow by one each time. A graph holds the address of the
workspace, which torch gives back where somebody asks it to (``torch._C._cuda_clearCublasWorkspaces``:
torch.compile does, in mode "reduce-overhead"). So it lies in a memory pool of the stream's own, out of
which nobody else is given memory, whether the workspace is there or not.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from typing import Any

import torch

logger = logging.getLogger(__name__)

_idle: dict[torch.device, list[tuple[torch.cuda.Stream, Any]]] = {}


class StreamLease:
    """A stream that is nobody else's as long as this object lives: recordings made on it use its
    workspace, so they hold it too.

    Attributes:
        pool: id of the memory pool of the stream's workspaces; None: this torch has no such pools.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        idle = _idle.setdefault(self._device, [])
        kept = idle.pop() if idle else (torch.cuda.Stream(device), _new_pool())
        self.stream, self._pool = kept
        self.pool: tuple[int, int] | None = None if self._pool is None else self._pool.id
        weakref.finalize(self, idle.append, kept).atexit = False

    def take_workspace(self) -> None:
        """Have cuBLAS take its workspaces for this thread and stream, from the stream's own pool, unless
        it has them.

        Raises:
            torch.cuda.OutOfMemoryError: there is no room for them; the step could not run either.
        """
        if self._pool is None:
            return
        try:
            with torch.cuda.use_mem_pool(self._pool, self._device), torch.cuda.stream(self.stream):
                for dtype in (torch.float32, torch.float16):
                    square = torch.zeros(16, 16, device=self._device, dtype=dtype)
                    torch.mm(square, square)
                    torch.addmm(square[0], square, square)  # cuBLASLt has one of its own
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:  # such as an allocator that has no pools
            self.pool = None  # the pointer check then calls them "unnamed"
            logger.info("workspaces of cuBLAS are torch's to give back: %s", error)


def _new_pool() -> Any:
    if not hasattr(torch.cuda, "use_mem_pool"):  # before torch 2.6
        return None
    pool = torch.cuda.MemPool()
    # Never destroyed: at the end of the process that would be after CUDA's own end.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    return pool
