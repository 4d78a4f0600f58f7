"""Everything in this folder needs a CUDA device and is skipped where there is none."""

import pytest
import torch
from cuda_only import device_works_afterwards, mark_and_skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_and_skip(items, "tests/gpu")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda:0")


@pytest.fixture(autouse=True)
def usable_afterwards():
    yield from device_works_afterwards()
