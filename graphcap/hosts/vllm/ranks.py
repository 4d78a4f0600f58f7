"""What the tensor-parallel ranks of an engine decide together: over the host, never over the device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphcap.errors import BackendError
from graphcap.explain import warn
from graphcap.recorders.base import Recorder
from graphcap.recorders.select import select_recorder

logger = logging.getLogger(__name__)


def alone() -> bool:
    """Whether this process is the only rank."""
    group = _group()
    return group is None or bool(group.world_size == 1)


def _group() -> Any:
    """vLLM's group of the ranks; None where it has made none."""
    from vllm.distributed.parallel_state import get_tp_group

    try:
        return get_tp_group()
    except AssertionError:
        return None


def agreed(mine: bool) -> bool:
    """Whether all ranks say yes. Every rank must come here."""
    return bool(_lowest(int(mine)))


def same(mine: int) -> bool:
    """Whether all ranks have this number, of at most 31 bits. Every rank must come here."""
    return _lowest(mine) == -_lowest(-mine)


def _lowest(mine: int) -> int:
    group = _group()
    if group is None or group.world_size == 1:
        return mine
    vote = torch.tensor([mine], dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(vote.item())


@contextmanager
def no_vote_on_error() -> Iterator[None]:
    """What raises here (``GRAPHCAP_STRICT=1``, an interrupt) still votes no: the others wait for it."""
    try:
        yield
    except BaseException:
        agreed(False)
        raise


_NONE, _TAPE, _CUDA = range(3)


def common_recorder(wanted: str, device: torch.device) -> Recorder:
    """`select_recorder`, with one answer for all ranks: the capture of one that records graphs has
    exchanges with the others that no tape makes. Every rank must come here.

    Raises:
        BackendError: what was asked for works not here, or not on another rank.
    """
    from graphcap.recorders.tape import TapeRecorder

    try:
        recorder = select_recorder(wanted, device)
    except BaseException:
        _lowest(_NONE)
        raise
    mine = _CUDA if recorder.name == "cuda" else _TAPE
    found = _lowest(mine)
    if found == _NONE:
        raise BackendError(
            f"GRAPHCAP_RECORDER={wanted}: expected it to work on every tensor-parallel rank; it does here, "
            f"and another rank's log says why not there; use GRAPHCAP_RECORDER=tape"
        )
    if found < mine:
        tape = TapeRecorder(device)
        tape.why = "the tape was chosen: another tensor-parallel rank cannot capture graphs"
        warn(
            logger,
            "no-graph-capture",
            "%s cannot capture graphs (%s); the tape is used on all of them",
            "another tensor-parallel rank",
            "its log says why",
        )
        return tape
    return recorder


def leave_graph_buffers_alone() -> None:
    """Keep vLLM from exchanging the all-reduce buffers of graphs that are gone: at the end of its capture
    context the ranks pair them by index, and after a failure on one rank their numbers differ."""
    from vllm.distributed.parallel_state import get_tp_group

    communicator = getattr(get_tp_group(), "device_communicator", None)
    custom = getattr(communicator, "ca_comm", None)
    if custom is not None and hasattr(custom, "register_graph_buffers"):
        custom.register_graph_buffers = lambda: None
