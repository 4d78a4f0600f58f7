"""How the tests are spread over processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import spread
import torch

TESTS = Path(__file__).resolve().parent


def test_files_that_start_first_exist() -> None:
    assert [path for path in spread.LONGEST if not (TESTS / path).is_file()] == []
    assert len(set(spread.LONGEST)) == len(spread.LONGEST)


def test_the_longest_files_come_first_and_nothing_else_moves() -> None:
    first, second = (f"tests/{path}" for path in spread.LONGEST[:2])
    given = ["tests/test_a.py::x", f"{second}::a", "tests/test_b.py::x", f"{first}::C::a"]
    given += ["tests/test_a.py::y", f"{second}::b"]
    items = [SimpleNamespace(nodeid=name) for name in given]
    spread.longest_first(items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == [given[i] for i in (3, 1, 5, 0, 2, 4)]


@pytest.mark.parametrize(
    ("gpu", "cpus", "chosen", "processes"),
    [(False, 2, "", 2), (False, 96, "", 8), (True, 16, "", 0), (True, 16, "3", None)],
)
def test_processes_of_auto(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, cpus: int, chosen: str, processes: int | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cpus)), raising=False)
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", chosen)
    assert spread.processes() == processes


PYTEST = """
import sys, pytest, torch
torch.cuda.is_available = lambda: sys.argv[1] == "gpu"
options = ["-n", "auto", "--maxprocesses", "1", "--dist", "loadfile", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*options, sys.argv[2]]))
"""


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_auto_shares_a_cpu_and_not_a_gpu(device: str, tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    script = "import os\ndef test(): assert ('PYTEST_XDIST_WORKER' in os.environ) == {}\n"
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_where.py").write_text(script.format(device == "cpu"))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-c", PYTEST, device, str(tmp_path)],
        env={**kept, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
