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

_gathered: dict[str, dict[str, Any]] = {}


@pytest.fixture(scope="module")
def facts(request: pytest.FixtureRequest, wheel: tuple[str, Path]) -> Facts:
    """Of the scenarios that the test module names as SCENARIOS.

    vLLM is imported once for all test modules of this run that name some.
    """
    version, python = wheel
    name = request.module.SCENARIOS
    if name not in _gathered.get(version, {}):
        modules = (getattr(item, "module", None) for item in request.session.items)
        wanted = {getattr(module, "SCENARIOS", None) for module in modules} - {None}
        found = run_script(
            python, HERE / "gather.py", *sorted(wanted), env=PRETEND_H200, timeout=600
        )
        _gathered[version] = found["scenarios"]
    return Facts(version, _gathered[version][name])


@pytest.fixture(scope="module")
def v0_facts(request: pytest.FixtureRequest) -> Facts:
    """The same in the wheel of vLLM 0.6.3, of the scenarios named as V0_SCENARIOS."""
    name = request.module.V0_SCENARIOS
    if name not in _gathered.get(V0_WHEEL, {}):
        python = _or_skip(lambda: wheel_environment(V0_WHEEL))
        modules = (getattr(item, "module", None) for item in request.session.items)
        wanted = {getattr(module, "V0_SCENARIOS", None) for module in modules} - {None}
        found = run_script(python, HERE / "gather_v0.py", *sorted(wanted), timeout=600)
        _gathered[V0_WHEEL] = found["scenarios"]
    return Facts(V0_WHEEL, _gathered[V0_WHEEL][name])
