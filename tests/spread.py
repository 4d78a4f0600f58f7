"""How the tests are spread over the processes of `pytest -n auto --dist loadfile`.

A process is given a file at a time, so that what a module's fixtures start (an engine, a server, a
browser) is started once. Files are given out in this order, and the run is as long as its last file.
"""

from __future__ import annotations

import os

import pytest
import torch

LONGEST = (
    "hosts/vllm/test_cpu_engine.py",
    "hosts/vllm/test_environments.py",
    "hosts/vllm/test_wheel_first_runner.py",  # gathers for all modules of its kind: see gathered.py
    "cli/test_doctor_vllm.py",
    "hosts/vllm/test_cpu_hybrid.py",
    "moe/test_triton_pairs.py",
    "hosts/vllm/test_wheel_063_decode.py",  # as test_wheel_first_runner.py
    "decode/test_parity_hybrid.py",
    "decode/test_fused_layer.py",
    "decode/test_triton_fused_kernels.py",
    "bench/test_speed.py",
    "test_containment.py",
    "test_soak.py",
    "test_lint_agrees.py",
    "decode/test_parity.py",
    "moe/test_triton_compiles.py",
    "decode/test_ixformer_parity.py",
    "moe/test_triton_kernels.py",
    "test_manager.py",
    "cli/report_page/test_browser.py",
    "cli/test_decode_command.py",
    "docs/test_prometheus.py",
    "cli/test_top_command.py",
    "cli/report_page/test_hostile.py",
    "cli/report_page/test_page.py",
    "decode/test_ixformer_step.py",
)
"""Files of ten seconds and more, the longest first; the others follow as collected. `--durations=50`
shows when this has become wrong, which costs time and nothing else."""

MOST = 8
"""More processes than this wait for the longest file."""

_ORDER = {path: place for place, path in enumerate(LONGEST)}


def processes() -> int | None:
    """One for each CPU; none besides pytest's own where there is a GPU, which tests share badly: its
    memory, its times and the state of the driver are what many of them look at. None: as
    PYTEST_XDIST_AUTO_NUM_WORKERS says."""
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    if torch.cuda.is_available():
        return 0
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cpus or 1, MOST)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort `items` by their files as in LONGEST."""

    def place(item: pytest.Item) -> int:
        path = item.nodeid.split("::")[0].removeprefix("tests/")
        return _ORDER.get(path, len(_ORDER))

    items.sort(key=place)
