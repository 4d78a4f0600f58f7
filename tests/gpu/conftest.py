"""Everything in this folder needs a CUDA device and is skipped where there is none."""

import logging
from collections.abc import Iterator

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


class _Failed(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.plans: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "(graphcap explain plan-failed)" in text:
            self.plans.append(text)


@pytest.fixture(autouse=True)
def every_plan_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rows whose plan cannot run are served without it, so that a test of its kernels would pass."""
    handler, logger = _Failed(), logging.getLogger("graphcap")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if request.node.get_closest_marker("plan_fails") is None:
        assert handler.plans == []
