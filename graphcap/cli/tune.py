"""``graphcap tune``: measure the schedules and tiles of each bucket, and keep the fastest."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphcap.cli.options import (
    add_model,
    chosen_dtype,
    chosen_shape,
    default_device,
    not_empty,
    positive,
    print_json,
    progress_bar,
    settings_with,
)
from graphcap.errors import SettingsError

if TYPE_CHECKING:
    import torch

    from graphcap.decode.plan_files import PlanFile
    from graphcap.decode.shapes import ModelShape
    from graphcap.decode.weights import ModelWeights
    from graphcap.tuning.tune import Tuning

_LAYERS = 12  # of which caches hold next to nothing; a plan is as fast in each layer
_BATCHES = "1,2,4,8,16,32,64"
_COMPILING = 0.25  # of the time, at the most: what is left compiles when it is tried


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure schedules and tiles for each bucket on this GPU, and keep the fastest",
        description="Measures whole captured steps of a model, on its first layers (--layers, default "
        "12), by one plan after another, for each batch and context. The fastest plan of each goes into "
        "a file in GRAPHCAP_TUNE_CACHE (default: graphcap/tune in the user's cache), from which steps "
        "of schedule auto on the same device and shape take it, and the experts of any model with the "
        "same sizes, in vLLM too. Of a hybrid the experts are tuned, between layers of full attention. "
        "Exit code 1 if a load has no plan that works.",
    )
    add_model(parser, default_shape="seed-64")
    parser.add_argument(
        "--batches", type=_sizes, default=_BATCHES, metavar="1,2,4", help=f"(default {_BATCHES})"
    )
    parser.add_argument(
        "--contexts",
        type=_sizes,
        default="256",
        metavar="N,…",
        help="tokens of every sequence (default 256)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=600,
        metavar="N",
        help="start no new plan after so long (default 600)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=positive,
        default=1,
        metavar="N",
        help="tune for one of N ranks of vLLM's tensor parallelism: its share of heads and experts",
    )
    parser.add_argument("--export", metavar="FILE", help="also write the plans to FILE")
    parser.add_argument(
        "--commit", type=not_empty, metavar="ID", help="of the sources, to be noted in the file"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list what would be tried; needs Triton, but no GPU"
    )
    parser.set_defaults(run=run)


def _sizes(text: str) -> list[int]:
    """An argparse type: sizes with commas between, each once, in order."""
    return sorted({positive(part.strip()) for part in text.split(",")})


def run(options: argparse.Namespace) -> int:
    import torch

    from graphcap.decode.kernels import decode_kernels
    from graphcap.decode.plan_files import cache_folder
    from graphcap.decode.plan_key import PlanKey
    from graphcap.moe.kernels import choose_backend
    from graphcap.tuning.tunable import check_device, check_tunable

    settings = settings_with()
    folder = cache_folder(settings.tune_cache)
    device = default_device()
    if not options.dry_run:
        check_device(device)
    layers, options.layers = options.layers, None
    whole, shape = _shapes(options)
    if layers and layers > shape.num_layers:
        raise SettingsError(
            f"--layers {layers}: the shape {shape.name} has {shape.num_layers} layers"
        )
    options.layers = min(layers or _LAYERS, shape.num_layers)
    if shape != whole:
        options.checkpoint = None  # its weights are not of this shape: random ones are as fast
    short = shape.with_layers(options.layers)
    loads = [(rows, context) for context in options.contexts for rows in options.batches]
    if options.dry_run:
        return _dry_run(options, short, loads, folder)

    kernels = decode_kernels(choose_backend(settings.kernels, device))
    dtype = chosen_dtype(options.dtype, device)
    check_tunable(short, dtype, device, kernels)
    from graphcap.tuning.known import known_plans
    from graphcap.tuning.tune import plan_file, tune

    path = folder / PlanKey.of(shape, dtype, torch.cuda.get_device_name(device)).file_name
    _check_writable(folder, "GRAPHCAP_TUNE_CACHE", path.name)
    if options.export:
        export = Path(options.export).absolute()
        _check_writable(export.parent, "--export", export.name)
    known = known_plans(path, shape, dtype, device)
    file = plan_file(path, shape, dtype, device, options.commit)
    # First: the processes that compile need room for a layer each.
    spent, compiled = _compile(options, short, device, dtype, loads)
    weights = _weights(options, short, device, dtype)
    found: list[Tuning] = []
    with progress_bar("tuning") as progress:

        def show(row: dict[str, Any]) -> None:
            took = f"{row['ms']:.3f} ms" if "ms" in row else "failed"
            what = f"{row['rows']} rows at {row['context']}: {row['knob']}, {took}"
            progress(len(found), len(loads), what)

        left = options.seconds - spent
        for tuning in tune(weights, kernels, loads, left, show, known=known):
            found.append(tuning)
            if tuning.bucket is not None:  # written each time: a run that is cut short keeps these
                file = file.with_buckets([tuning.bucket])
                file.write(path)
    if options.export:
        file.write(Path(options.export))
    _print(options, file, path, found, compiled)
    return 0 if all(tuning.bucket for tuning in found) else 1


def _shapes(options: argparse.Namespace) -> tuple[ModelShape, ModelShape]:
    """The model's shape, and the one that is measured for it. A checkpoint must hold the weights only where
    the two are the same."""
    from graphcap.decode.checkpoint import checkpoint_shape
    from graphcap.tuning.stand_in import measured_shape

    ranks = options.tensor_parallel
    if options.checkpoint:
        whole = checkpoint_shape(Path(options.checkpoint))
        measured = measured_shape(whole, ranks)
        if measured != whole:
            return whole, measured
    whole = chosen_shape(options)
    return whole, measured_shape(whole, ranks)


def _check_writable(folder: Path, name: str, file: str) -> None:
    """Before minutes are spent on what could not be kept as `file` of `folder`."""
    if folder.parts[:1] and folder.parts[0].startswith("~"):
        raise SettingsError(
            f"{name}: expected a folder, found {folder}, and this user has no home; name a folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise SettingsError(
            f"{name}: expected a folder that can be written, found {folder}; name another"
        )
    if (folder / file).is_dir():
        raise SettingsError(
            f"{name}: expected a file, or none, at {folder / file}, found a folder; take it away"
        )


def _weights(
    options: argparse.Namespace, short: ModelShape, device: torch.device, dtype: torch.dtype
) -> ModelWeights:
    from graphcap.decode.checkpoint import load_checkpoint
    from graphcap.decode.random_weights import random_weights

    if options.checkpoint:
        with progress_bar("loading weights") as progress:
            return load_checkpoint(
                options.checkpoint,
                device=device,
                dtype=dtype,
                layers=options.layers,
                progress=lambda done, total: progress(done, total, ""),
            )
    with progress_bar("drawing weights") as progress:
        return random_weights(
            short,
            device=device,
            dtype=dtype,
            seed=0,
            progress=lambda done, total: progress(done, total, ""),
        )


def _compile(
    options: argparse.Namespace,
    short: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    loads: list[tuple[int, int]],
) -> tuple[float, str]:
    """Compile the kernels of all plans beforehand, in several processes; the seconds that it took, and
    what to say of it."""
    import time

    from graphcap.tuning.compiling import compile_all

    started = time.monotonic()
    name = str(dtype).removeprefix("torch.")
    with progress_bar("compiling"):
        told = compile_all(short, str(device), loads, options.seconds * _COMPILING, name)
    return time.monotonic() - started, told


def _dry_run(
    options: argparse.Namespace, short: ModelShape, loads: list[tuple[int, int]], folder: Path
) -> int:
    from dataclasses import asdict

    import torch

    from graphcap.tuning.tunable import check_shape, check_triton

    check_triton()
    from graphcap.tuning.tune import forecast

    dtype = chosen_dtype(options.dtype, torch.device("cuda"))
    check_shape(short, dtype)
    forecasts = [forecast(short, dtype, *load) for load in loads]
    result = {
        "shape": short.name,
        "layers": short.num_layers,
        "cache": str(folder),
        "seconds_at_most": options.seconds,
        "loads": [asdict(each) for each in forecasts],
    }
    if options.json:
        print_json(result)
    else:
        from graphcap.cli.tune_view import print_forecast

        print_forecast(result)
    return 0


def _print(
    options: argparse.Namespace, file: PlanFile, path: Path, found: list[Tuning], compiled: str
) -> None:
    from graphcap.decode.plan_json import plan_to_json

    result = {
        "shape": file.shape,
        "layers": options.layers,
        "device": file.key.device,
        "dtype": file.key.dtype,
        "cache": str(path),
        "export": options.export,
        "compiled": compiled,
        "loads": [
            {
                "rows": tuning.rows,
                "context": tuning.context,
                "winner": None if tuning.bucket is None else plan_to_json(tuning.bucket.plan),
                "ms": None if tuning.bucket is None else tuning.bucket.ms,
                "candidates": [
                    {**row, "plan": plan_to_json(row["plan"])} for row in tuning.candidates
                ],
            }
            for tuning in found
        ],
    }
    if options.json:
        print_json(result)
    else:
        from graphcap.cli.tune_view import print_tuned

        print_tuned(result)
