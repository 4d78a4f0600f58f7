"""Everything in this folder needs a CUDA device and is skipped where there is none."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda:0")


@pytest.fixture(autouse=True)
def usable_afterwards(request: pytest.FixtureRequest):
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
