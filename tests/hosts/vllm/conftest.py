"""Real vLLMs; a test that needs one is skipped only where it cannot be installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from environments import (
    HERE,
    PRETEND_H200,
    V0_WHEEL,
    WHEELS,
    EnvironmentUnavailable,
    cpu_engine_environment,
    run_script,
    wheel_environment,
)
from gather import Facts
from gathered import folder_of_run, gathered_once


@pytest.fixture(scope="session", params=WHEELS)
def wheel(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """Version of a CUDA wheel, and an interpreter that imports its Python code."""
    return request.param, _or_skip(lambda: wheel_environment(request.param))


@pytest.fixture(scope="session")
def cpu_engine() -> Path:
    """An interpreter in which `vllm.LLM` runs on the CPU."""
    return _or_skip(cpu_engine_environment)


def _or_skip(build: Callable[[], Path]) -> Path:
    try:
        return build()
    except EnvironmentUnavailable as reason:
        pytest.skip(str(reason))


# -- scenarios in a wheel; see gather.py ---------------------------------------------------------


def _scenarios(request: pytest.FixtureRequest, table: str) -> list[str]:
    """What the test modules of this run name as `table`."""
    modules = {getattr(item, "module", None) for item in request.session.items}
    return sorted({getattr(module, table, None) for module in modules} - {None})


@pytest.fixture(scope="module")
def facts(
    request: pytest.FixtureRequest,
    wheel: tuple[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Facts:
    """Of the scenarios that the test module names as SCENARIOS.

    vLLM is imported once for all test modules of this run that name some.
    """
    version, python = wheel

    def gather() -> dict[str, Any]:
        wanted = _scenarios(request, "SCENARIOS")
        found = run_script(python, HERE / "gather.py", *wanted, env=PRETEND_H200, timeout=600)
        return found["scenarios"]

    found = gathered_once(folder_of_run(tmp_path_factory), version, gather)
    return Facts(version, found[request.module.SCENARIOS])


@pytest.fixture(scope="module")
def v0_facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """The same in the wheel of vLLM 0.6.3, of the scenarios named as V0_SCENARIOS."""
    python = _or_skip(lambda: wheel_environment(V0_WHEEL))

    def gather() -> dict[str, Any]:
        wanted = _scenarios(request, "V0_SCENARIOS")
        return run_script(python, HERE / "gather_v0.py", *wanted, timeout=600)["scenarios"]

    found = gathered_once(folder_of_run(tmp_path_factory), V0_WHEEL, gather)
    return Facts(V0_WHEEL, found[request.module.V0_SCENARIOS])
