"""Options that several commands share, and what they turn into."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphcap.errors import SettingsError

if TYPE_CHECKING:
    import torch

    from graphcap.decode.shapes import ModelShape
    from graphcap.manager import Progress
    from graphcap.settings import Settings

LARGEST = 1_000_000

DTYPES = ("auto", "float32", "bfloat16", "float16")
SHAPES = ("tiny", "tiny-hybrid", "seed-64", "qwen3-30b-a3b", "qwen3.6-35b-a3b")


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    return _bounded(text, 1, LARGEST)


def not_empty(text: str) -> str:
    """An argparse type: any text but an empty one, as of a shell variable that is not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"expected a name, found {text!r}")
    return text


def seed(text: str) -> int:
    """An argparse type: what torch takes as a seed."""
    return _bounded(text, 0, 2**63 - 1)


def _bounded(text: str, least: int, most: int) -> int:
    digits = text.isascii() and text.isdigit() and len(text) < 20
    if not digits or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(
            f"expected an integer of at least {least} and at most {most:,}, found {text!r}"
        )
    return int(text)


def add_model(parser: argparse.ArgumentParser, default_shape: str) -> None:
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--checkpoint", metavar="DIR", help="a Hugging Face checkpoint folder")
    model.add_argument(
        "--shape",
        default=default_shape,
        metavar="NAME",
        help=f"random weights of a known shape: {', '.join(SHAPES)} (default {default_shape})",
    )
    parser.add_argument("--layers", type=positive, metavar="N", help="only the first N layers")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def default_device() -> torch.device:
    import torch

    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def chosen_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is what the device is made for: bfloat16 on CUDA, float32 on a CPU."""
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def chosen_shape(options: argparse.Namespace) -> ModelShape:
    """The shape of ``--checkpoint`` or ``--shape``, cut to ``--layers``."""
    from graphcap.decode.checkpoint import load_checkpoint
    from graphcap.decode.shapes import preset

    if options.checkpoint:
        return load_checkpoint(options.checkpoint, device="meta", layers=options.layers).shape
    shape = preset(options.shape)
    if options.layers and options.layers > shape.num_layers:
        raise SettingsError(
            f"--layers {options.layers}: the shape {shape.name} has {shape.num_layers} layers"
        )
    return shape.with_layers(options.layers) if options.layers else shape


def settings_with(**changes: Any) -> Settings:
    """The environment's settings with what the command line says put over them."""
    from graphcap.settings import Settings

    return replace(Settings.from_env(), **{k: v for k, v in changes.items() if v is not None})


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A bar on stderr for work that may take longer than a second; nothing where nobody looks."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        task = bars.add_task(title, total=None)

        def advance(done: int, total: int, what: str = "") -> None:
            bars.update(
                task, completed=done, total=total, description=f"{title}: {what}" if what else title
            )

        yield advance


def print_json(value: Mapping[str, Any]) -> None:
    json.dump(value, sys.stdout, indent=2)
    print()
