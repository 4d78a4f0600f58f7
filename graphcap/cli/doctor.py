"""``graphcap doctor``: what this machine has, what graphcap would choose, and why."""

from __future__ import annotations

import argparse
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from graphcap.cli import doctor_ixformer, doctor_shapes, doctor_vllm
from graphcap.cli.doctor_ixformer import VENDOR_VARIABLES
from graphcap.cli.options import default_device, print_json


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show what this machine has and what graphcap chooses on it",
        description="Shows versions, whether graph capture works (by capturing a graph of one "
        "kernel), the recorder and kernels that would be chosen and why, and every environment "
        "variable with its origin. Exit code 1 if something that was asked for is not to be had.",
    )
    doctor_vllm.add_to(parser)
    doctor_shapes.add_to(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if doctor_shapes.is_asked(options):
        return doctor_shapes.run(options)
    if doctor_vllm.is_asked(options):
        return doctor_vllm.run(options)
    import torch

    from graphcap import __version__
    from graphcap.errors import BackendError, SettingsError
    from graphcap.moe.kernels import choose_backend
    from graphcap.recorders.loop_probe import probe_loops
    from graphcap.recorders.select import probe_capture, select_recorder
    from graphcap.settings import VARIABLES, Settings, misspelt

    problems: list[str] = []
    warnings = misspelt(os.environ)
    try:
        settings = Settings.from_env()
    except SettingsError as error:
        problems.append(str(error))
        settings = Settings()
    if settings.enabled and not doctor_vllm.has_vllm():
        warnings.append("GRAPHCAP=1 has no effect: vLLM is not installed for this Python")
    device = default_device()
    probe = probe_capture(device)
    loops = probe_loops(device)
    chosen = {"recorder": "none", "kernels": "none"}
    backend = None
    try:
        chosen["recorder"] = select_recorder(settings.recorder, device).name
    except BackendError as error:
        problems.append(str(error))
    try:
        backend = choose_backend(settings.kernels, device)
        chosen["kernels"] = f"{backend.name}: {backend.why}"
    except BackendError as error:
        problems.append(str(error))
    result = {
        "machine": {
            "graphcap": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": _device(device),
            "graph capture": f"{'works' if probe.works else 'no'}: {probe.detail}",
            "many tokens a launch": f"{'works' if loops.works else 'no'}: {loops.detail}",
            **chosen,
            "triton": _version("triton"),
            "cuda-bindings": _version("cuda-bindings", module="cuda"),
            "vllm": _version("vllm"),
            "ixformer": _version("ixformer"),
        },
        "capture_works": probe.works,
        "kernels": doctor_ixformer.kernel_rows(backend),
        "ixformer": doctor_ixformer.ixformer_rows(),
        "variables": [
            {
                "name": variable.name,
                "value": os.environ.get(variable.name, settings.value_of(variable.name)),
                "origin": "environment" if variable.name in os.environ else "default",
                "meaning": variable.meaning,
            }
            for variable in VARIABLES
        ]
        + [
            {"name": name, "value": os.environ[name], "origin": "environment", "meaning": "CoreX"}
            for name in VENDOR_VARIABLES
            if name in os.environ
        ],
        "problems": problems,
        "warnings": warnings,
    }
    if options.json:
        print_json(result)
    else:
        from graphcap.cli.tables import print_doctor

        print_doctor(result)
    return 1 if problems else 0


def _device(device: Any) -> str:
    import torch

    if device.type != "cuda":
        return f"cpu, {torch.get_num_threads()} threads"
    free, total = torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    return (
        f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}, "
        f"CUDA {torch.version.cuda}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    )


def _version(distribution: str, module: str | None = None) -> str:
    """The version from the package's metadata; nothing is imported."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "there, version unknown" if find_spec(module or distribution) else "not installed"
