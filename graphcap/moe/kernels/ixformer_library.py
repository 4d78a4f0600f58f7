"""The ixformer that this process can import: which generation it is, and how its operations are called.

ixformer is Iluvatar CoreX's library of fused operations. It ships with their images only, so nothing
here was run on a card: names and orders of arguments were read from public code that calls or copies
it. Two generations exist whose orders differ (``rms_norm`` swaps ``output`` and ``eps``), so that an
operation is bound to a `Form`, a known order, which ``inspect.signature`` must confirm where the
operation is Python. What tells no signature (a builtin, a wrapper of ``*args``) is taken by the
generation of its module alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from graphcap.errors import BackendError

IMPORT_PATHS = ("ixformer.inference.functions", "ixformer.functions")
"""Where the operations are, the newer place first."""

FIRST = "0.4"
NEWER = "newer"

MARKERS: Mapping[str, tuple[str, ...]] = {
    FIRST: (
        "fused_add_rms_norm",
        "vllm_rotary_embedding_neox",
        "vllm_single_query_cached_kv_attention",
    ),
    NEWER: (
        "residual_rms_norm",
        "vllm_rotary_embedding",
        "vllm_paged_attention",
        "reshape_and_cache_flash",
    ),
}
"""Names that tell the generations apart. Images with some of both exist: the one with the larger share
is taken, the newer of equals."""


@dataclass(frozen=True)
class Form:
    """A known way to call an operation, all arguments by position.

    Attributes:
        name: of the operation in ixformer.
        arguments: how many are passed.
        places: parameter -> its place, for those that must be there under this name. Not all: the
            library itself spells some parameters in more than one way.
        generation: the one that has this form; None: both.
    """

    name: str
    arguments: int
    places: Mapping[str, int] = field(default_factory=dict)
    generation: str | None = None

    def disagreement(self, function: Callable[..., Any]) -> str | None:
        """What `function`'s signature says against this form; None if nothing, or if it has none."""
        parameters = _parameters(function)
        if parameters is None:
            return None
        by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names = [p.name for p in by_place]
        wrong = [
            f"{name} as parameter {place + 1}"
            for name, place in self.places.items()
            if names[place : place + 1] != [name]
        ]
        if len(by_place) < self.arguments and not wrong:
            wrong = [f"at least {self.arguments} parameters"]
        rest = [p for p in parameters if p not in by_place[: self.arguments]]
        required = [p.name for p in rest if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        if required and not wrong:
            wrong = [f"no further required parameters than the first {self.arguments}"]
        if not wrong:
            return None
        return f"{self.name}({', '.join(p.name for p in parameters)}): expected {', '.join(wrong)}"


@dataclass(frozen=True)
class Found:
    """An operation of the library and the form in which it is called."""

    call: Callable[..., Any]
    form: Form

    @property
    def implementation(self) -> str:
        """What a census says about it."""
        return f"ixformer: {self.form.name}"


@dataclass(frozen=True)
class Library:
    """An imported ixformer.

    Attributes:
        module: holds the operations.
        path: its import path.
        generation: `FIRST` or `NEWER`.
        version: of the distribution; None: not known.
    """

    module: ModuleType
    path: str
    generation: str
    version: str | None

    @property
    def title(self) -> str:
        return f"ixformer {self.version or 'of unknown version'}, generation {self.generation}"

    def find(self, *forms: Form) -> Found | str:
        """The first of `forms` that the library has; else why it has none, for people to read."""
        problems: list[str] = []
        absent: list[str] = []
        for form in sorted(forms, key=lambda form: form.generation not in (None, self.generation)):
            own = form.generation in (None, self.generation)
            try:
                function = getattr(self.module, form.name, None)
            except Exception as error:  # a module that loads its operations when they are asked for
                problems += [f"{form.name} cannot be loaded: {_first_line(error)}"] if own else []
                continue
            if not callable(function):
                if own and form.name not in absent:
                    absent.append(form.name)
                continue
            if not own and not _tells_its_order(function):
                continue  # nothing confirms an order that the generation does not have
            problem = form.disagreement(function)
            if problem is None:
                return Found(function, form)
            problems.append(problem)
        if problems:
            return f"in {self.path}, {problems[0]}"
        return f"{self.path} has no {' or '.join(absent or sorted({f.name for f in forms}))}"


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Of `function`; None where it tells none, as a builtin or a bare ``(*args, **kwargs)`` wrapper."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    return None if any(p.kind is p.VAR_POSITIONAL for p in parameters) else parameters


def _tells_its_order(function: Callable[..., Any]) -> bool:
    return _parameters(function) is not None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def _is_there(module: ModuleType, name: str) -> bool:
    try:
        return callable(getattr(module, name, None))
    except Exception:  # of a module that loads its operations when they are asked for
        return False


def load_library() -> Library:
    """Import ixformer and tell its generation. Called when a step is built, never inside one.

    Raises:
        BackendError: it cannot be imported, or is of neither generation; names paths and names.
    """
    failures: list[str] = []
    strangers: list[tuple[str, ModuleType]] = []
    for path in IMPORT_PATHS:
        try:
            module = import_module(path)
        except Exception as error:  # a missing libmpi is an OSError, a broken binding anything
            failures.append(f"{path}: {_first_line(error)}")
            continue
        generation = _generation(module)
        if generation is not None:
            return Library(module, path, generation, _version())
        strangers.append((path, module))
    if strangers:
        lacking = "; ".join(
            f"generation {generation} needs one of {', '.join(names)}"
            for generation, names in MARKERS.items()
        )
        raise BackendError(
            f"ixformer {_version() or ''} is of neither generation that graphcap knows: "
            f"{' and '.join(path for path, _ in strangers)} have none of these names: {lacking}; "
            f"use GRAPHCAP_KERNELS=triton or reference"
        )
    raise BackendError(
        f"ixformer cannot be imported ({'; '.join(failures)}); it ships with CoreX images, whose "
        f"LD_LIBRARY_PATH it needs; use GRAPHCAP_KERNELS=auto, triton or reference elsewhere"
    )


def _generation(module: ModuleType) -> str | None:
    shares = {
        generation: sum(_is_there(module, name) for name in names) / len(names)
        for generation, names in MARKERS.items()
    }
    if not any(shares.values()):
        return None
    return FIRST if shares[FIRST] > shares[NEWER] else NEWER


def _version() -> str | None:
    try:
        return version("ixformer")
    except PackageNotFoundError:
        return None
