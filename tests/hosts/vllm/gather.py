"""Runs scenarios inside the environment of a wheel, each in a process of its own.

    python gather.py scenarios.plugin scenarios.config

A module of scenarios has a table `SCENARIOS`: name -> function that returns facts which JSON can hold.
vLLM is imported once, which takes ten seconds and more; each scenario then runs in a fork of that
process, so that none meets what another wrapped, registered or set. What they found is reported by
module and name: {"facts": ...} or {"error": traceback}. Tests read it through the fixture `facts` of
conftest.py.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from environments import ScriptFailed, report
from scenarios.common import FOLDER_VARIABLE, KINDS, checkpoint

Scenario = Callable[[], Any]

IMPORTED_ONCE = (
    "vllm.engine.arg_utils",
    "vllm.model_executor.layers.fused_moe.layer",
    "vllm.v1.cudagraph_dispatcher",
    "vllm.v1.worker.gpu.cudagraph_utils",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
)
"""None of these loads plugins or runs an operation, whose threads would not survive a fork."""


class Facts:
    """What the scenarios of one module found in one wheel, by name."""

    def __init__(self, version: str, results: Mapping[str, Any]) -> None:
        self.version = version
        self._results = results

    def __getitem__(self, name: str) -> Any:
        result = self._results[name]
        if "error" in result:
            raise ScriptFailed(
                f"scenario {name!r} failed in vLLM {self.version}:\n{result['error']}"
            )
        return result["facts"]


def gather(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Results of all scenarios of the modules `names`."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    waiting = [
        (name, *item) for name in names for item in importlib.import_module(name).SCENARIOS.items()
    ]
    running: dict[int, tuple[str, str, Path]] = {}
    at_once = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < at_once:
                module, name, scenario = waiting.pop(0)
                path = Path(folder) / f"{len(waiting)}.json"
                running[_fork(scenario, path)] = (module, name, path)
            process, status = os.wait()
            if process in running:
                module, name, path = running.pop(process)
                code = os.waitstatus_to_exitcode(status)
                written = path.read_text() if path.exists() else ""
                found[module][name] = (
                    json.loads(written) if written else {"error": f"ended with code {code}"}
                )
    return found


def _fork(scenario: Scenario, path: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    try:
        try:
            result = {"facts": scenario()}
            text = json.dumps(result)
        except BaseException:
            text = json.dumps({"error": traceback.format_exc()})
        path.write_text(text)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)  # nothing of the parent's may run twice: no exit handler, no temporary folder


def main() -> None:
    import torch

    torch.set_num_threads(1)
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork need not walk, and copy, all that was imported
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = folder
        for kind in KINDS:
            checkpoint(kind)  # before there are two processes that could write it
        report({"scenarios": gather(sys.argv[1:])})


if __name__ == "__main__":
    main()
