"""Scenarios are gathered once, however many processes ask at the same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import HERE, ScriptFailed
from gathered import gathered_once

PROCESS = """
import json, sys, time
from pathlib import Path
from environments import ScriptFailed
from gathered import gathered_once

folder, number, fails = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "fails"

def gather():
    time.sleep(0.5)
    if fails:
        raise ScriptFailed(f"of {number}")
    return {"who": number}

try:
    print(json.dumps(gathered_once(folder, "1.0", gather)))
except ScriptFailed as failure:
    print(f"failed: {failure}")
"""


@pytest.mark.parametrize("outcome", ["returns", "fails"])
def test_processes_that_ask_at_once_are_told_the_same(tmp_path: Path, outcome: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, tmp_path, str(number), outcome],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    answers = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 3
    (answer,) = answers
    assert answer.startswith("failed: of " if outcome == "fails" else '{"who": ')


def test_versions_are_kept_apart_and_come_as_json(tmp_path: Path) -> None:
    assert gathered_once(tmp_path, "1.0", lambda: {"a": (1, 2)}) == {"a": [1, 2]}
    assert gathered_once(tmp_path, "2.0", lambda: {"b": None}) == {"b": None}
    assert gathered_once(tmp_path, "1.0", dict) == {"a": [1, 2]}


def test_a_failure_is_not_tried_again(tmp_path: Path) -> None:
    def fails() -> dict[str, object]:
        raise ScriptFailed("the log")

    for gather in (fails, dict):
        with pytest.raises(ScriptFailed, match="the log"):
            gathered_once(tmp_path, "1.0", gather)
    assert json.loads((tmp_path / "gathered-1.0.json").read_text()) == {"failed": "the log"}
