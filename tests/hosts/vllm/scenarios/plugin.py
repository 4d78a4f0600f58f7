"""The entry point: when it is loaded, what it does when it is off, twice, and with bad settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

from scenarios.common import (
    engine_config,
    from_graphcap,
    load_plugins,
    log_records,
    replaced_classes,
    set_variables,
    turn_on,
    wrapped_functions,
)

PLATFORM = "graphcap_test_platform"


def state() -> dict[str, Any]:
    """What the plugin has done to this process."""
    plugin = sys.modules.get("graphcap.hosts.vllm.plugin")
    return {
        "imported": "graphcap" in sys.modules,
        "state": None if plugin is None else plugin.STATUS.state,
        "parts": None if plugin is None else plugin.STATUS.parts,
        "wrapped": wrapped_functions(),
        "replaced": replaced_classes(),
    }


def loaded(graphcap: str | None, plugins: str | None) -> dict[str, Any]:
    """The state after vLLM has loaded its plugins, and the hash of a configuration made then."""
    set_variables({"GRAPHCAP": graphcap, "VLLM_PLUGINS": plugins})
    with log_records() as records:
        load_plugins()
    return {**state(), "lines": from_graphcap(records), "hash": engine_config().compute_hash()}


def log_of_the_user() -> dict[str, Any]:
    """Where the plugin's messages go, with and without handlers of the user's own."""
    import logging

    logger = logging.getLogger("graphcap")
    logger.addHandler(logging.StreamHandler())
    turn_on()
    with_handler = str(logger.parent)
    logger.handlers.clear()
    from graphcap.hosts.vllm.plugin import STATUS, register

    STATUS.state = "off"
    register()
    return {"with": with_handler, "without": logger.parent and logger.parent.name}


def twice() -> dict[str, Any]:
    turn_on()
    from graphcap.hosts.vllm.plugin import STATUS, register

    once = state()
    with log_records() as records:
        register()
        load_plugins()
    again = state()
    STATUS.state = "off"  # as if the module had been loaded anew
    register()
    anew = state()
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        register()
        STATUS.state = "off"
        register()
        os.write(writer, json.dumps(state()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        forked = json.load(pipe)
    os.waitpid(process, 0)
    lines = from_graphcap(records)
    return {"once": once, "again": again, "anew": anew, "forked": forked, "lines": lines}


def bad_setting(name: str, value: str) -> dict[str, Any]:
    """`vllm serve` loads plugins while it sets up its command line."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    set_variables({"GRAPHCAP": "1", name: value})
    raised = None
    try:
        AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    except Exception as error:
        raised = [type(error).__name__, str(error)]
    return {**state(), "raised": raised}


def misspelt() -> dict[str, Any]:
    with log_records() as records:
        turn_on(bukets="1,2,4")
    return {**state(), "lines": from_graphcap(records)}


def fails_to_install() -> dict[str, Any]:
    """A module that the plugin needs breaks on import, with an error of any kind."""
    from importlib.abc import MetaPathFinder

    class Breaks(MetaPathFinder):
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "vllm.v1.worker.gpu.model_runner":
                raise RuntimeError("no driver")

    del sys.modules["vllm.v1.worker.gpu.model_runner"]
    sys.meta_path.insert(0, Breaks())
    with log_records() as records:
        turn_on()
    return {**state(), "lines": from_graphcap(records)}


HASH = """
from environments import report
from scenarios.common import engine_config, turn_on
turn_on()
report({"hash": engine_config().compute_hash()})
"""


def hashes() -> dict[str, str]:
    """Of one configuration: in this process, in another one that orders its sets otherwise, and with
    other kernels."""
    import environments

    turn_on()
    here = engine_config().compute_hash()
    done = subprocess.run(
        [sys.executable, "-c", HASH],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [x for x in done.stdout.splitlines() if x.startswith(environments.REPORT_MARKER)]
    elsewhere = json.loads(line.removeprefix(environments.REPORT_MARKER))["hash"]
    return {"here": here, "elsewhere": elsewhere}


def hash_with(**variables: str) -> str:
    turn_on(**variables)
    return engine_config().compute_hash()


SCENARIOS = {
    "hashes": hashes,  # first: it takes the longest
    "named": partial(loaded, "1", f"graphcap,{PLATFORM}"),
    "another named": partial(loaded, "1", PLATFORM),
    "none named": partial(loaded, "1", ""),
    "all": partial(loaded, "1", None),
    "unset": partial(loaded, None, None),
    "0": partial(loaded, "0", None),
    "empty": partial(loaded, "", None),
    "log of the user": log_of_the_user,
    "twice": twice,
    "GRAPHCAP_BUCKETS=banana": partial(bad_setting, "GRAPHCAP_BUCKETS", "banana"),
    "GRAPHCAP_RECORDER=vinyl": partial(bad_setting, "GRAPHCAP_RECORDER", "vinyl"),
    "GRAPHCAP=yes": partial(bad_setting, "GRAPHCAP", "yes"),
    "misspelt": misspelt,
    "fails to install": fails_to_install,
    "hash with reference kernels": partial(hash_with, kernels="reference"),
}
