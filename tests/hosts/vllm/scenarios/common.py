"""What scenarios share: engine configurations, log records, the functions that are wrapped."""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "TEST_FOLDER_OF_VLLM"
"""Where checkpoints are: one place for all processes, since the path of a model is part of the hash."""

KINDS = ("qwen3", "qwen3_moe", "qwen3_next")

MARK = "__graphcap__"
"""What graphcap leaves on a function of vLLM that it has wrapped (hosts/vllm/patching.py)."""

Records = list[dict[str, str]]


def set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# -- logs ----------------------------------------------------------------------------------------


@contextmanager
def log_records() -> Iterator[Records]:
    """What is logged meanwhile, by whomever, at every level that their loggers let through.

    Taken where records are made: vLLM sets up its handlers when it likes, and removes others.
    """
    found: Records = []
    make = logging.getLogRecordFactory()

    def keep(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        found.append({"level": record.levelname, "by": record.name, "text": record.getMessage()})
        return record

    logging.setLogRecordFactory(keep)
    try:
        yield found
    finally:
        logging.setLogRecordFactory(make)


def from_graphcap(records: Records) -> Records:
    return [record for record in records if record["by"].startswith("graphcap")]


def warnings_in(records: Records) -> list[str]:
    return [r["text"] for r in from_graphcap(records) if r["level"] == "WARNING"]


# -- the plugin ----------------------------------------------------------------------------------


def load_plugins() -> None:
    """As every process of vLLM does on its way."""
    from vllm import plugins

    plugins.plugins_loaded = False
    plugins.load_general_plugins()


def turn_on(**variables: str) -> None:
    """The plugin in this process, with these ``GRAPHCAP_*`` variables (names without the prefix)."""
    set_variables(
        {"GRAPHCAP": "1"} | {f"GRAPHCAP_{name.upper()}": v for name, v in variables.items()}
    )
    load_plugins()


def wrapped_functions() -> dict[str, int]:
    """Everything in vLLM that graphcap has wrapped, and in how many layers."""
    found: dict[str, int] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name != "vllm" and not module_name.startswith("vllm."):
            continue
        for owner_name, owner in list(vars(module).items()):
            if getattr(owner, "__module__", None) != module_name:
                continue  # imported from where it is
            where = f"{module_name}.{owner_name}"
            inside = vars(owner) if isinstance(owner, type) else {"": owner}
            for name, value in list(inside.items()):
                layers = _layers(getattr(value, "__func__", value))  # a class method's function
                if layers:
                    found[f"{where}.{name}".rstrip(".")] = layers
    return found


def _layers(value: Any) -> int:
    layers = 0
    while isinstance(value, types.FunctionType):
        layers += MARK in vars(value)
        value = vars(value).get("__wrapped__")
    return layers


def replaced_classes() -> list[str]:
    """Names under which graphcap has registered classes for vLLM to instantiate in place of its own."""
    from vllm.model_executor.custom_op import op_registry_oot

    return sorted(n for n, c in op_registry_oot.items() if c.__module__.startswith("graphcap"))


# -- engines -------------------------------------------------------------------------------------


def checkpoint(kind: str, changes: Mapping[str, Any] | None = None) -> Path:
    """config.json of a small model; see checkpoints.py."""
    import checkpoints

    name = "-".join([kind, *(f"{field}={value}" for field, value in (changes or {}).items())])
    folder = Path(os.environ[FOLDER_VARIABLE]) / name
    return folder if folder.exists() else checkpoints.write_config(folder, kind, **(changes or {}))


def engine_config(
    kind: str = "qwen3_moe", changes: Mapping[str, Any] | None = None, **args: Any
) -> Any:
    """A `VllmConfig`, made from `EngineArgs` as `vllm serve` makes one; `changes` go to the model's
    configuration."""
    from vllm.engine.arg_utils import EngineArgs

    defaults: dict[str, Any] = {
        "max_num_seqs": 30,
        "max_num_batched_tokens": 8192,
        "max_model_len": 1024,
    }
    return EngineArgs(
        model=str(checkpoint(kind, changes)), skip_tokenizer_init=True, **{**defaults, **args}
    ).create_engine_config()


def compilation(**values: Any) -> dict[str, Any]:
    """The argument of `engine_config` that sets fields of vLLM's `CompilationConfig`."""
    return {"compilation_config": values}
