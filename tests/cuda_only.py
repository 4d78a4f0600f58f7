"""For folders of tests that need a CUDA device: where there is none they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def mark_and_skip(items: list[pytest.Item], folder: str) -> None:
    """Items whose path holds `folder` get the marker ``gpu``, and are skipped without a device."""
    for item in items:
        if folder in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def device_works_afterwards() -> Iterator[None]:
    """Whatever a test does, the device, the allocator and the random generator work after it."""
    yield
    if not torch.cuda.is_available():
        return
    assert not torch.cuda.is_current_stream_capturing()
    torch.manual_seed(1)
    first = torch.rand(1000, device="cuda")
    torch.manual_seed(1)
    assert torch.equal(first, torch.rand(1000, device="cuda"))
    torch.cuda.synchronize()
