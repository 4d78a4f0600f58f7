"""Triton's launch hook: how a tape learns of kernels that are launched behind its back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def triton_launches_seen_by(callback: Callable[[str], None]) -> Iterator[None]:
    """Call `callback` with the kernel's name before every Triton launch of this process.

    Triton that was not imported yet cannot launch; one that the step imports is seen at the next
    recording only.
    """
    if "triton" not in sys.modules:
        yield
        return

    def enter(metadata: Any) -> None:
        details = metadata.get() if hasattr(metadata, "get") else {}
        callback(str(details.get("name", "?")))

    knobs = sys.modules.get("triton.knobs")
    chain = getattr(getattr(knobs, "runtime", None), "launch_enter_hook", None)
    if chain is not None and hasattr(chain, "add"):
        chain.add(enter)
        try:
            yield
        finally:
            chain.remove(enter)
        return
    # Triton before 3.4: one hook, an attribute of the compiled kernel's class (or of knobs).
    owner: Any = getattr(knobs, "runtime", None)
    if owner is None or not hasattr(owner, "launch_enter_hook"):
        from triton.compiler import CompiledKernel

        owner = CompiledKernel
    previous = owner.launch_enter_hook

    def both(metadata: Any) -> None:
        enter(metadata)
        if previous is not None:
            previous(metadata)

    owner.launch_enter_hook = both
    try:
        yield
    finally:
        owner.launch_enter_hook = previous
