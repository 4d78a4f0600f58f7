"""The README says what the code does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphcap.settings import VARIABLES, Settings

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["torch.Size([3,", "64])", "1"]


def test_every_environment_variable_is_listed_with_its_default():
    listed = dict(re.findall(r"^\| `(GRAPHCAP\w*)` \| `?(\w+)`? \|", README, re.MULTILINE))
    assert listed == {v.name: Settings().value_of(v.name) for v in VARIABLES}


def test_messages_under_troubleshooting_are_messages_of_the_code():
    section = README.split("## Troubleshooting")[1].split("##")[0]
    cells = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    quoted = [message for cell in cells for message in re.findall(r"`(.*?)`", cell)]
    assert len(quoted) >= 7
    source = " ".join(path.read_text() for path in (ROOT / "graphcap").rglob("*.py"))
    # Messages stand in the source as adjacent string literals, with values in braces.
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    source = re.sub(r"\{[^{}]*\}|%s|%d", "…", source)
    for message in quoted:
        for part in re.split(r"…| N |: ", message):
            part = part.strip(" :;()")
            assert part in source, part


def test_measured_tables_come_from_the_result_files():
    run = subprocess.run([sys.executable, str(ROOT / "bench" / "tables.py"), "--check"])
    assert run.returncode == 0


@pytest.mark.parametrize("marker", ["<!-- run command -->", "<!-- test command -->"])
def test_the_two_commands_are_there(marker):
    command = README.split(marker)[1].split("```")[1]
    assert command.count("\n") == 2, "one line, for CI to run word for word"
