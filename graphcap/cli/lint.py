"""``graphcap lint``: what would break or weaken the capture of a step, with file and line, without a GPU."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from graphcap.cli.options import DTYPES, not_empty, positive, print_json
from graphcap.errors import InputError

if TYPE_CHECKING:
    import torch

    from graphcap.lint.subject import Subject

_READ_UP_TO = 1 << 30
"""Bytes of weights up to which a checkpoint is read and its step really computed."""

_DESCRIPTION = """\
Runs a step on CPU or meta tensors and lists what would break or weaken its capture, with file and line.
It goes on after the first fault. 'breaks cuda' and 'breaks tape' name the recorder that refuses the step.

  --module pkg.mod:callable   a function without arguments (or with one named device) that returns
                                (step, inputs)  or  (step, inputs, state)
                              where step(inputs) takes a mapping of names to tensors and returns one,
                              inputs is a StaticInputs or a mapping of names to example tensors whose
                              first dimension is the batch, and state lists what the step changes, such
                              as random generators, as for CaptureManager.
                              With --input the callable is the step itself.
  --checkpoint DIR            graphcap's own decode step for a Hugging Face checkpoint.

Devices named "cuda" in the step are taken for lint's, and torch.cuda's streams and events are stood in
for. What a step does only where torch.cuda.is_available() or tensor.is_cuda is not seen.

Exit code: 0 nothing would break, 1 something would (with --strict: or weaken), 2 bad arguments, or a
step that this machine cannot run to its end."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "lint",
        help="list what would break or weaken the capture of a step",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--module", type=not_empty, metavar="PKG.MOD:CALLABLE", help="a step")
    subject.add_argument(
        "--checkpoint", type=not_empty, metavar="DIR", help="a Hugging Face checkpoint folder"
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=SHAPE:DTYPE[:FILL]",
        help="a slot of the step that --module names, such as x=8x64:float32 or ids=8:int64:1; once "
        "for each. Without a fill, drawn from N(0, 1), or 0 for integers",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "meta"),
        default="auto",
        help="meta: nothing is computed and no weight is read, for big models; what depends on values "
        "cannot run there. auto: cpu, and meta for checkpoints of more than 1 GiB",
    )
    parser.add_argument(
        "--recorder",
        choices=("both", "cuda", "tape"),
        default="both",
        help="whose refusals count (default both)",
    )
    parser.add_argument(
        "--batches",
        type=_batches,
        metavar="N,…",
        help="the batch sizes to run (the largest, and up to three smaller ones)",
    )
    parser.add_argument(
        "--max-batch", type=positive, metavar="N", help="with --checkpoint: rows (default 8)"
    )
    parser.add_argument(
        "--layers", type=positive, metavar="N", help="with --checkpoint: the first N"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="with --checkpoint")
    parser.add_argument("--strict", action="store_true", help="exit code 1 also for what weakens")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.set_defaults(run=run)


def _batches(text: str) -> list[int]:
    """An argparse type: sizes with commas between."""
    return [positive(part) for part in text.split(",")]


def run(options: argparse.Namespace) -> int:
    _check(options)
    import torch

    from graphcap.cli.options import progress_bar
    from graphcap.lint.finding import RECORDERS
    from graphcap.lint.run import lint, lint_surroundings
    from graphcap.lint.subject import subject_of_module

    device, note = _device(options)
    # What the step prints is not part of what lint prints.
    with (
        redirect_stdout(sys.stderr),
        lint_surroundings(torch.device(device)) as cuda,
        progress_bar("linting"),
    ):
        if options.checkpoint:
            subject = _decode_step(options, torch.device(device))
        else:
            subject = subject_of_module(options.module, options.input, torch.device(device))
        recorders = RECORDERS if options.recorder == "both" else (options.recorder,)
        report = lint(subject, cuda, options.batches, recorders)
    report.notes += note
    if options.json:
        print_json(report.to_json())
    else:
        from graphcap.cli.lint_view import print_lint

        print_lint(report)
    return report.exit_code(strict=options.strict)


def _check(options: argparse.Namespace) -> None:
    if options.checkpoint:
        if options.input:
            raise InputError("--input belongs to --module; a checkpoint's step has its own slots")
        return
    for given, name in ((options.max_batch, "--max-batch"), (options.layers, "--layers")):
        if given is not None:
            raise InputError(f"{name} belongs to --checkpoint; a module's inputs give the batch")
    if options.dtype != "auto":
        raise InputError("--dtype belongs to --checkpoint; a module's tensors have theirs")


def _device(options: argparse.Namespace) -> tuple[str, list[str]]:
    """The device, and what to tell of the choice."""
    if not options.checkpoint:
        return ("cpu" if options.device == "auto" else options.device), []
    from graphcap.decode.checkpoint import load_checkpoint

    weights = load_checkpoint(
        options.checkpoint, device="meta", dtype=_dtype(options), layers=options.layers
    )
    size = weights.nbytes / (1 << 30)
    device = options.device
    if device == "auto":
        device = "cpu" if weights.nbytes <= _READ_UP_TO else "meta"
    if device == "cpu":
        return device, [f"the step ran on its real weights ({size:.2f} GiB)"]
    return device, [f"the step ran on meta tensors: its {size:.2f} GiB of weights were not read"]


def _dtype(options: argparse.Namespace) -> torch.dtype | None:
    """None: the checkpoint's own."""
    from graphcap.decode.shapes import DTYPES as NAMED

    return None if options.dtype == "auto" else NAMED[options.dtype]


def _decode_step(options: argparse.Namespace, device: torch.device) -> Subject:
    import torch

    from graphcap.cli.options import settings_with
    from graphcap.decode.cache import PagedCache
    from graphcap.decode.checkpoint import load_checkpoint
    from graphcap.decode.examples import example_batches
    from graphcap.decode.kernels import decode_kernels
    from graphcap.decode.step import DecodeStep, decode_slots
    from graphcap.inputs import StaticInputs
    from graphcap.lint.subject import Subject
    from graphcap.moe.kernels import choose_backend
    from graphcap.pool import BufferPool

    weights = load_checkpoint(
        options.checkpoint, device=device, dtype=_dtype(options), layers=options.layers
    )
    kernels = decode_kernels(choose_backend(settings_with().kernels, torch.device("cpu")))
    batch = options.max_batch or 8
    cache = PagedCache(
        weights.shape,
        num_sequences=batch,
        max_context=256,
        device=device,
        dtype=weights.dtype,
        format=kernels.cache_format,
    )
    pool = BufferPool(device)
    step = DecodeStep(weights, cache, kernels, pool)
    slots = decode_slots(
        cache.blocks_per_sequence, cache.format.slot_dtype, states=cache.states is not None
    )
    inputs = StaticInputs(batch, slots, device)
    if device.type != "meta":
        example = example_batches(cache, weights.shape.vocab_size)
        inputs.load(example(batch, torch.Generator().manual_seed(0)), batch)
    return Subject(options.checkpoint, step, inputs, pool)
