"""The README, and the pages that it sends to, say what the code does."""

import ast
import configparser
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphcap.hosts.vllm.obstacles import OBSTACLES
from graphcap.hosts.vllm.v0.choice import OBSTACLES as V0_OBSTACLES
from graphcap.hosts.vllm.versions import NEWEST, OLDEST, V0, window
from graphcap.settings import VARIABLES, Settings

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
VLLM = (DOCS / "vllm.md").read_text()
TROUBLES = (DOCS / "troubleshooting.md").read_text()
TROUBLESHOOTING = README.split("## Troubleshooting")[1].split("\n## ")[0]
PLUGIN = sorted((ROOT / "graphcap" / "hosts" / "vllm").rglob("*.py"))


def test_the_python_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["torch.Size([3,", "64])", "1"]


def shown(table: str) -> list[str]:
    """The words of what `graphcap decode` prints, without numbers, which differ from run to run."""
    return re.sub(r"[━┏┓┗┛┡┩╇┳└┘┴─│┃…]|\d[\d.,]*", " ", table).split()


def test_the_output_shown_for_decode_is_what_it_prints():
    run = subprocess.run(
        [sys.executable, "-m", "graphcap", "decode"],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"},
    )
    assert run.returncode == 0, run.stderr
    printed = shown(run.stdout)
    page = (DOCS / "cli.md").read_text()
    (sample,), (beginning,) = (
        re.findall(r"```\n(tiny, 4 layers.*?)```", text, re.DOTALL) for text in (page, README)
    )
    assert shown(sample) == printed
    assert sample.startswith(beginning), "the README shows the same run"
    assert all(count in beginning for count in ("operations", "launches", "allocations"))


def test_every_environment_variable_is_listed_with_its_default():
    listed = dict(re.findall(r"^\| `(GRAPHCAP\w*)` \| `?(\w+)`? \|", README, re.MULTILINE))
    assert listed == {v.name: Settings().value_of(v.name) for v in VARIABLES}


def test_messages_under_troubleshooting_are_in_the_page_of_all_messages():
    page = (DOCS / "troubleshooting.md").read_text()  # whose own are checked against the code
    quoted = re.findall(r"^\| `(.*?)` \|", TROUBLESHOOTING, re.MULTILINE)
    assert len(quoted) >= 5
    for message in quoted:
        assert f"`{message.removesuffix('…').strip()}" in page, message


def calls_in_the_plugin(name: str) -> Iterator[ast.Call]:
    """Calls of a function or method `name` in the vLLM plugin."""
    for path in PLUGIN:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == name:
                yield node


def literal(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def test_every_reason_of_a_fallback_is_explained():
    listed = set(re.findall(r"^\| `(\w+)` \|", TROUBLES, re.MULTILINE))
    reasons = {
        literal(call.args[1])
        for name in ("fall_back", "drop")
        for call in calls_in_the_plugin(name)
        if len(call.args) > 1
    }
    reasons = {reason for reason in reasons if reason is not None} | {"not_recorded"}
    assert len(reasons) >= 6
    assert reasons <= listed


def test_features_that_are_left_to_vllm_are_listed():
    begin, end = "<!-- left to vLLM: begin -->", "<!-- left to vLLM: end -->"
    text = " ".join(VLLM.split(begin)[1].split(end)[0].split())
    listed = re.split(r", (?:or )?", text.strip(" ."))
    assert sorted(listed) == sorted(name for name, _ in OBSTACLES)


def test_features_of_vllm_0_6_3_that_are_left_to_it_are_listed():
    begin, end = "<!-- left to vLLM 0.6.3: begin -->", "<!-- left to vLLM 0.6.3: end -->"
    text = " ".join(VLLM.split(begin)[1].split(end)[0].split())
    listed = re.split(r", (?:or )?", text.strip(" ."))
    assert sorted(listed) == sorted(name for name, _ in V0_OBSTACLES)


def test_metrics_are_listed():
    source = (ROOT / "graphcap" / "hosts" / "vllm" / "metrics.py").read_text()
    families = re.findall(r'_Family\(\s*"(\w+)",\s*"(graphcap_\w+)"', source)
    assert {kind for kind, _ in families} == {"counter", "gauge"}
    names = {f"{name}_total" if kind == "counter" else name for kind, name in families}
    names.add(*re.findall(r'HistogramMetricFamily\(\s*"(graphcap_\w+)"', source))
    page = (DOCS / "metrics.md").read_text()
    assert set(re.findall(r"^\| `(graphcap_\w+)` \|", page, re.MULTILINE)) == names


def test_the_window_of_vllm_versions_is_the_same_everywhere():
    for text in (README, VLLM, (DOCS / "compatibility.md").read_text()):
        assert f"The window is vLLM {window()}." in text
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    major, minor = NEWEST
    assert (
        config["options.extras_require"]["vllm"].strip() == f"vllm>={oldest},<{major}.{minor + 1}"
    )
    run_or_bound = re.findall(r"^\| (\d+\.\d+)\.\d+\S* \| \*\*", VLLM, re.MULTILINE)
    v0 = ".".join(map(str, V0[:2]))
    assert (run_or_bound[0], run_or_bound[1], run_or_bound[-1]) == (v0, oldest, newest)


def test_measured_tables_come_from_the_result_files():
    run = subprocess.run([sys.executable, str(ROOT / "bench" / "tables.py"), "--check"])
    assert run.returncode == 0


@pytest.mark.parametrize("marker", ["<!-- run command -->", "<!-- test command -->"])
def test_the_two_commands_are_there(marker):
    command = README.split(marker)[1].split("```")[1]
    assert command.count("\n") == 2, "one line, for CI to run word for word"
