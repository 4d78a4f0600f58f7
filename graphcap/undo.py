"""What makes up for a failure: an undo that does not stay half done, and an error that keeps no tensors."""

from __future__ import annotations

import traceback
from collections.abc import Callable


def surely(undo: Callable[[], object]) -> None:
    """Run `undo`, which comes to the same however often it runs: once more where it was interrupted."""
    try:
        undo()
    except BaseException:
        undo()
        raise


def let_go(error: BaseException, handled: BaseException | None) -> None:
    """Clear the frames that `error` and the errors behind it came through.

    Their variables keep the tensors of a step alive as long as the error lives, and where one of them
    leads back to the error, until the next garbage collection, which is held during a capture.

    Args:
        handled: the error that somebody was handling already (``sys.exc_info()[1]``) when what failed
            was begun; it is none of ours.
    """
    seen = {id(handled)}
    behind: list[BaseException | None] = [error]
    while behind:
        one = behind.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            behind += [one.__cause__, one.__context__]
