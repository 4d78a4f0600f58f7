"""``graphcap doctor --shape NAME``: on which kernels the experts of a model are silently slow."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graphcap.cli.options import SHAPES, not_empty, positive, print_json
from graphcap.errors import CheckpointError, InputError
from graphcap.moe.slow_shapes import (
    BACKENDS,
    SLOW,
    ExpertShape,
    Finding,
    ixformer_findings,
    mlx_findings,
    vllm_findings,
)


def add_to(parser: argparse.ArgumentParser) -> None:
    asked = parser.add_argument_group(
        "slow shapes",
        "Tells for each kernel backend whether the model's experts have a tuned configuration or meet "
        "the kernel's alignment. Runs no kernel; the exit code is 0 whatever is found.",
    )
    asked.add_argument(
        "--shape",
        type=not_empty,
        metavar="NAME",
        help=f"one of {', '.join(SHAPES)}, a checkpoint folder, or a config.json of any "
        "mixture-of-experts model",
    )
    asked.add_argument("--backend", choices=BACKENDS, help="only this one")
    asked.add_argument("--bits", type=positive, metavar="B", help="mlx: bits of a weight (all)")
    asked.add_argument("--tp", type=positive, metavar="N", help="tensor-parallel ranks (1)")
    asked.add_argument(
        "--device-name",
        type=not_empty,
        metavar="CARD",
        help="vllm: a card other than the one here, such as 'NVIDIA H200'",
    )


def is_asked(options: argparse.Namespace) -> bool:
    """Whether the command is about slow shapes.

    Raises:
        InputError: an option misses the one that it belongs to, or excludes another.
    """
    for given, name in (
        (options.backend, "--backend"),
        (options.bits, "--bits"),
        (options.tp, "--tp"),
        (options.device_name, "--device-name"),
    ):
        if given is not None and options.shape is None:
            raise InputError(f"{name} belongs to --shape; see graphcap doctor --help")
    if options.shape is None:
        return False
    if options.vllm:
        raise InputError("--shape and --vllm are two questions; ask one at a time")
    for given, name, backend in (
        (options.bits, "--bits", "mlx"),
        (options.device_name, "--device-name", "vllm"),
    ):
        if given is not None and options.backend not in (None, backend):
            raise InputError(f"{name} belongs to {backend}, not to --backend {options.backend}")
    return True


def run(options: argparse.Namespace) -> int:
    shape = expert_shape(options.shape, options.tp or 1)
    backends = [options.backend] if options.backend else BACKENDS
    device_name = options.device_name
    if device_name is None and "vllm" in backends:
        device_name = _card_here()
    findings = [
        finding
        for backend in backends
        for finding in _findings(backend, shape, options.bits, device_name)
    ]
    result = {
        **asdict(shape),
        "device_name": device_name,
        "findings": [asdict(finding) for finding in findings],
        "slow": sum(finding.verdict in SLOW for finding in findings),
    }
    if options.json:
        print_json(result)
    else:
        _print(result)
    return 0


def expert_shape(name: str, tp: int) -> ExpertShape:
    """The experts of a preset, of a checkpoint folder or of a config.json.

    Raises:
        CheckpointError: there is no such preset or file, or it does not describe experts.
    """
    from graphcap.decode.config_json import expert_fields
    from graphcap.decode.safetensors_files import read_json
    from graphcap.decode.shapes import PRESETS

    if name in PRESETS:
        preset = PRESETS[name]
        fields = {
            field: getattr(preset, field)
            for field in ("num_experts", "top_k", "hidden_size", "moe_intermediate_size")
        }
        return ExpertShape(name, **fields, tp=tp)
    path = Path(name).expanduser()
    if not path.exists():
        raise CheckpointError(
            f"--shape: expected a preset ({', '.join(PRESETS)}), a checkpoint folder or a "
            f"config.json, found {name!r}, which is none of them"
        )
    file = path / "config.json" if path.is_dir() else path
    return ExpertShape(name, **expert_fields(read_json(file), name), tp=tp)


def _findings(
    backend: str, shape: ExpertShape, bits: int | None, device_name: str | None
) -> list[Finding]:
    if backend == "mlx":
        return mlx_findings(shape, bits)
    if backend == "ixformer":
        return ixformer_findings(shape, _version("ixformer"))
    if backend == "vllm":
        tuned = os.environ.get("VLLM_TUNED_CONFIG_FOLDER")
        return vllm_findings(shape, _vllm_package(), device_name, Path(tuned) if tuned else None)
    from graphcap.moe.slow_shapes_triton import triton_findings

    return triton_findings(shape)


def _vllm_package() -> Path | None:
    """The folder of the installed vllm. Nothing is imported."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:  # a folder of that name has no origin
        return None
    return Path(spec.origin).parent


def _version(package: str) -> str | None:
    if find_spec(package) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return "version unknown"


def _card_here() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _print(result: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from graphcap.cli.tables import console_of_terminal

    console = console_of_terminal()
    ranks = f", {result['tp']} ranks" if result["tp"] > 1 else ""
    console.print(
        f"{result['name']}: {result['num_experts']} experts, top-{result['top_k']}, hidden "
        f"{result['hidden_size']}, expert intermediate {result['moe_intermediate_size']}{ranks}",
        highlight=False,
        markup=False,
    )
    table = Table()
    for label in ("backend", "kernel and sizes", "verdict", "why"):
        table.add_column(label)
    for finding in result["findings"]:
        style = "yellow" if finding["verdict"] in SLOW else ""
        table.add_row(
            finding["backend"],
            escape(finding["what"]),
            f"[{style}]{finding['verdict']}[/]" if style else finding["verdict"],
            escape(finding["detail"]),
        )
    console.print(table)
    count = len(result["findings"])
    console.print(
        f"{result['slow']} of {count} would run slowly: untuned, or off their kernel's alignment",
        highlight=False,
    )
