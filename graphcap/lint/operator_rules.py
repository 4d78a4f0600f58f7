"""What an operation does to a capture that the recorders' guard does not ask: draws, copies, waits."""

from __future__ import annotations

from typing import Any

import torch

from graphcap.lint.finding import CUDA, RECORDERS, Notes
from graphcap.lint.host_memory import HOST_COPY, MAKE_BEFORE, HostMemory
from graphcap.recorders.guard import COLLECTIVES

_SYNCHRONISES_INSIDE = frozenset({"_linalg_check_errors"})
"""Operations that wait for the device inside, and tell torch nothing of it."""


def note_draw(
    notes: Notes,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_known: bool,
    seeded: str | None,
) -> None:
    """Notes an operation that draws random numbers.

    Args:
        is_known: the generator, if one was given, is the default one or listed as state.
        seeded: what seeded torch's generators before, in the same run of the step.
    """
    is_given = any(isinstance(v, torch.Generator) for v in (*args, *kwargs.values()))
    if is_given and not is_known:
        notes.note(
            "random draw",
            f"{func} with a generator of its own",
            "a capture advances registered generators only and refuses others",
            "draw from the default generator, or list this one in state= of CaptureManager "
            "(lint: return it as third of the callable's results)",
            breaks=(CUDA,),
        )
    elif is_given or (
        torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs)
    ):
        if seeded:
            notes.note(
                "random draw",
                f"{func} after {seeded}",
                "the step draws the same numbers at each run and replays, which do not seed, others "
                "(verification refuses the bucket)",
                "seed before run(), outside the step, or draw before the step and pass a slot",
                breaks=RECORDERS,
            )
            return
        notes.note(
            "random draw",
            str(func),
            "replays advance the generator, so that each draws anew and a seed reproduces them",
            "nothing, if that is meant; otherwise draw before the step and pass a slot",
        )


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation that can draw does: with a dropout of 0 attention does not."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            default = argument.default_value if argument.has_default_value() else None
            value = args[index] if index < len(args) else kwargs.get(argument.name, default)
            return bool(value != 0)
    return True


def note_collective(notes: Notes, func: Any) -> None:
    if func.namespace not in COLLECTIVES or "wait" in func.overloadpacket.__name__:
        return
    if func.overloadpacket.__name__ == "barrier":
        notes.note(
            "collective",
            str(func),
            "it waits for the device on the host",
            "take it out of the step",
            breaks=(CUDA,),
        )
    else:
        notes.note(
            "collective",
            str(func),
            "all ranks have to record and replay the same bucket",
            "give run() agreed_batch, the same on each rank",
        )


def note_host_copy(
    notes: Notes, host: HostMemory, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    packet, why = func.overloadpacket.__name__, HOST_COPY
    if not host.joins(packet, (args, kwargs)):
        return
    if packet == "copy_" and host.is_pinned(args[1]):
        why = "every replay copies from that memory again, which is gone when the step ends"
    what = f"{func} with a tensor made on the host"
    notes.note("host copy", what, why, MAKE_BEFORE, breaks=(CUDA,))


def note_wait_inside(notes: Notes, func: Any) -> None:
    if func.overloadpacket.__name__ in _SYNCHRONISES_INSIDE:
        notes.note(
            "synchronisation",
            str(func),
            "it waits for the device to check for errors",
            "use the form that does not check, such as torch.linalg.inv_ex",
            breaks=(CUDA,),
        )
