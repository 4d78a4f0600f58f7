"""Reports of real runs: what `graphcap report` draws."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toy import moe_manager

from graphcap.cli import main


@pytest.fixture(scope="session")
def decoded() -> dict[str, Any]:
    """Of ``graphcap decode --json --timeline`` on the tiny preset."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        assert main(["decode", "--json", "--timeline", "--tokens", "6"]) == 0
    return json.loads(written.getvalue())


@pytest.fixture(scope="session")
def captured() -> dict[str, Any]:
    """Of `CaptureManager.capture`, of two MoE layers."""
    _, manager = moe_manager()
    with manager:
        return json.loads(json.dumps(manager.capture().to_json()))


@pytest.fixture(scope="session")
def plugged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the plugin's `Reporter`, whose engine is stood in for: its managers and its pool are real."""
    from graphcap.hosts.vllm.choice import Choice
    from graphcap.hosts.vllm.reporting import Reporter
    from graphcap.settings import Settings

    path: Path = tmp_path_factory.mktemp("plugin") / "report.json"
    choice = Choice(taken=True, mixed="full", decode=(1, 2, 4, 8), chosen=("cudagraph_mode=FULL",))
    ranks = SimpleNamespace(parallel_config=SimpleNamespace(rank=0))
    _, decode = moe_manager()
    _, mixed = moe_manager(16, (8,))
    with decode, mixed, pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.99.0"))
        engine = SimpleNamespace(
            pool=decode.pool,
            failed=None,
            experts=SimpleNamespace(
                layers=Counter({"pooled": 2}),
                choices=lambda: (),
                plans={},
                plans_by_title={},
            ),
        )
        reporter = Reporter(choice, Settings(report=path), ranks)
        reporter.fell_back("cascade_attention", 3)
        reporter.fell_back("cascade_attention", 2)
        reports = {"mixed": mixed.capture(), "decode": decode.capture()}
        reporter.captured(engine, reports, ["a note of the engine"])
    return json.loads(path.read_text())
