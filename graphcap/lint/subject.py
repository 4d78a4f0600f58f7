"""Subject: a step and its inputs, as lint is given them on the command line."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from graphcap.errors import GraphcapError, InputError
from graphcap.inputs import Slot, StaticInputs
from graphcap.lint.places import Step
from graphcap.pool import BufferPool
from graphcap.recorders.source import raising_line

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


@dataclass
class Subject:
    """What is linted.

    Attributes:
        inputs: the slots, holding a batch (or only padding) to run the step on.
        pool: where the step takes its buffers, if its maker says; it is frozen after the warm-up.
        generators: random generators of the step's own.
    """

    name: str
    step: Step
    inputs: StaticInputs
    pool: BufferPool | None = None
    generators: tuple[torch.Generator, ...] = ()


def subject_of_module(name: str, inputs: Sequence[str], device: torch.device) -> Subject:
    """The step that ``pkg.mod:callable`` names.

    Args:
        name: of a function without arguments that returns (step, inputs) or (step, inputs, state), or
            of a step, with `inputs`.
        inputs: ``name=shape:dtype[:fill]``, each a slot of the step; empty: see `name`.
        device: lint's. Factories without a device make their tensors there.

    Raises:
        InputError: the name, what it stands for, or `inputs` cannot be used.
    """
    target = _resolved(name)
    if inputs:
        slots = dict(parse_input(text) for text in inputs)
        return Subject(name, target, static_inputs({k: v.to(device) for k, v in slots.items()}))
    made = _called(target, name, device)
    if not isinstance(made, (tuple, list)) or len(made) not in (2, 3) or not callable(made[0]):
        raise InputError(
            f"{name}: expected it to return (step, inputs) or (step, inputs, state), found "
            f"{type(made).__name__}; if it is a step itself, give its slots with --input"
        )
    step, given, *rest = made
    if isinstance(given, Mapping):
        given = static_inputs(given)
    if not isinstance(given, StaticInputs):
        raise InputError(
            f"{name}: expected inputs as StaticInputs or as a mapping of names to tensors, found "
            f"{type(given).__name__}"
        )
    if given.device.type != device.type:
        raise InputError(
            f"{name}: expected slots on {device.type}, found them on {given.device}; make them on the "
            f"default device, or take an argument named device"
        )
    state = list(rest[0]) if rest else []
    generators = tuple(item for item in state if isinstance(item, torch.Generator))
    return Subject(name, step, given, generators=generators)


def static_inputs(example: Mapping[str, torch.Tensor]) -> StaticInputs:
    """Slots for `example`, name -> tensor (n, *row shape), and holding it.

    Raises:
        InputError: not tensors of one number of rows, on one device.
    """
    for name, tensor in example.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
            found = "one number" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise InputError(f"input {name!r}: expected a tensor of rows, found {found}")
    if not example:
        raise InputError("a step needs at least one input, found none")
    rows = {tensor.shape[0] for tensor in example.values()}
    if len(rows) != 1:
        raise InputError(
            f"expected inputs of one number of rows, their first dimension, found "
            f"{', '.join(f'{name} {tuple(t.shape)}' for name, t in example.items())}; what has no "
            f"rows is no slot: keep it in the step"
        )
    slots = {name: Slot(tuple(t.shape[1:]), t.dtype) for name, t in example.items()}
    (count,) = rows
    inputs = StaticInputs(count, slots, next(iter(example.values())).device)
    inputs.load(example, inputs.check(example))
    return inputs


def parse_input(text: str) -> tuple[str, torch.Tensor]:
    """``name=8x64:float32[:fill]`` -> name and tensor. Without a fill floating-point numbers are drawn
    from N(0, 1) and others are 0.

    Raises:
        InputError: says which part is wrong.
    """
    name, equals, rest = text.partition("=")
    shape_text, *more = rest.split(":")
    expected = f"--input {text!r}: expected name=shape:dtype[:fill], such as x=8x64:float32"
    if not (name and equals and len(more) in (1, 2)):
        raise InputError(expected)
    sizes = shape_text.replace(",", "x").split("x")
    if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
        raise InputError(f"{expected}; the shape {shape_text!r} is not one of positive integers")
    dtype = getattr(torch, more[0], None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"{expected}; torch has no dtype {more[0]!r}")
    shape = tuple(map(int, sizes))
    if len(more) == 2:
        try:
            value = float(more[1])
            return name, torch.full(shape, int(value) if value.is_integer() else value).to(dtype)
        except ValueError:
            raise InputError(f"{expected}; the fill {more[1]!r} is not a number") from None
    if not dtype.is_floating_point:
        return name, torch.zeros(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    return name, torch.randn(shape, generator=generator).to(dtype)


def _resolved(name: str) -> Any:
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise InputError(f"--module {name!r}: expected pkg.mod:callable")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # code that exits has not shown that it is clean
        raise InputError(
            f"--module {name}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise InputError(f"--module {name}: {module_name} has no {path}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"--module {name}: expected a callable, found {type(found).__name__}")
    return found


def _called(maker: Callable[..., Any], name: str, device: torch.device) -> Any:
    """What a maker returns; its factories without a device use lint's."""
    try:
        parameters = inspect.signature(maker).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    arguments = {"device": device} if "device" in parameters else {}
    needed = [
        p.name
        for p in parameters.values()
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and p.name not in arguments
    ]
    if needed:
        raise InputError(
            f"{name}: expected a function without arguments that returns (step, inputs), found one "
            f"that takes {', '.join(needed)}; if it is a step itself, give its slots with --input"
        )
    # Entered on meta only: elsewhere it would hide from lint which factories name a device.
    default: AbstractContextManager[Any] = device if device.type == "meta" else nullcontext()
    try:
        with default:
            return maker(**arguments)
    except GraphcapError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{name}: {type(error).__name__} at {raising_line(error.__traceback__)} while it made the "
            f"step: {error}"
        ) from error
