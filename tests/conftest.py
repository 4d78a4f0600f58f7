"""Set before anything imports torch or Triton: threads, and Triton's interpreter where there is no GPU.
With pytest-xdist, which is not needed: how the tests are shared among its processes."""

import gc
import os
import signal

# The models here are tiny: threads that wait for each other cost more than the work. What the tests
# start inherits it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell that starts the tests in the background has them, and what they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Tables are as wide as the terminal, and pytest-xdist tells its processes how wide that is.
os.environ.pop("COLUMNS", None)

import pytest
import torch
from spread import longest_first, processes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)

try:
    from hypothesis import settings
except ImportError:  # a machine that runs tests/gpu alone
    pass
else:
    # How long an example takes says nothing where other processes compute too.
    settings.register_profile("graphcap", deadline=None)
    settings.load_profile("graphcap")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> "int | None":
    """Of ``-n auto``."""
    return processes()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        # By the number of their tests, files of a few long tests would come last.
        config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: "list[pytest.Item]") -> None:
    if hasattr(config, "workerinput"):
        longest_first(items)


def pytest_collection_finish() -> None:
    # Each capture collects garbage: it need not walk torch, transformers and thousands of tests.
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or nanobind, at exit, takes what is frozen for leaked
