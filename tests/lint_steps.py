"""Steps with faults, one of each kind, for the tests of lint. Lines marked `# here` are to blame."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

Inputs = Mapping[str, torch.Tensor]
Step = Callable[[Inputs], Mapping[str, torch.Tensor]]

TABLE = torch.arange(12.0).view(3, 4)


def line_of(mark: str, file: str = __file__) -> int:
    """The line that has `mark` behind its code."""
    lines = Path(file).read_text().splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {mark}")]
    return found


class Counter:
    """Counts its runs in Python."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, inputs: Inputs) -> Inputs:
        self.runs += 1
        return {"y": inputs["x"] * self.runs}  # here: counter


class Carried:
    """Keeps a tensor that it binds anew at each run."""

    def __init__(self) -> None:
        self.hidden = torch.zeros(1, 4)

    def __call__(self, inputs: Inputs) -> Inputs:
        y = inputs["x"] + self.hidden  # here: carried is read
        self.hidden = y[:1] * 0.5  # here: carried is bound
        return {"y": y}


class Growing:
    """A cache that grows by concatenation."""

    def __init__(self) -> None:
        self.kept = torch.zeros(4, 0)

    def __call__(self, inputs: Inputs) -> Inputs:
        column = inputs["x"].sum().expand(4, 1)
        self.kept = torch.cat([self.kept, column], 1)  # here: growing
        return {"y": inputs["x"] + self.kept.sum()}


class Rebinding(torch.nn.Module):
    """Gives its layer another weight at each run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, inputs: Inputs) -> Inputs:
        self.layer.weight = torch.nn.Parameter(torch.ones(4, 4))  # here: rebinding
        return {"y": self.layer(inputs["x"])}


def clean(inputs: Inputs) -> Inputs:
    return {"y": torch.where(inputs["x"] > 0, inputs["x"], 0.0)[torch.arange(1) * 0]}


def make_two_faults() -> tuple[Step, Inputs]:
    def step(inputs: Inputs) -> Inputs:
        x = inputs["x"]
        if x.max() > 0:  # here: first
            x = x * 2
        return {"y": x + helper(x)}  # here: called from

    return step, {"x": torch.ones(8, 4)}


def helper(x: torch.Tensor) -> float:
    return x.sum().item()  # here: second


def make_clean() -> tuple[Step, Inputs]:
    return only_doubles, {"x": torch.ones(4, 4)}


def only_doubles(inputs: Inputs) -> Inputs:
    print("noise of the step")
    return {"y": inputs["x"] * 2}


def make_on(device: torch.device) -> tuple[Step, Inputs]:
    weight = torch.ones(4, 4, device=device)
    return lambda inputs: {"y": inputs["x"] @ weight}, {"x": torch.ones(4, 4, device=device)}


def side_stream(x: torch.Tensor, *, fork: bool = True, join: bool = True) -> torch.Tensor:
    side = torch.cuda.Stream()
    main = torch.cuda.current_stream()
    if fork:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x * 2
    if join:
        main.wait_stream(side)
    return y


def by_events(x: torch.Tensor, *, join: bool = True) -> torch.Tensor:
    side, forked, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    forked.record()
    with torch.cuda.stream(side):
        forked.wait()
        y = x * 2
        done.record()
    if join:
        torch.cuda.current_stream().wait_event(done)
    return y


def joined_twice(x: torch.Tensor) -> torch.Tensor:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    for _ in range(2):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x = x * 2
        main.wait_stream(side)
    return x


def works_after_it_joined(x: torch.Tensor) -> None:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(main)
    main.wait_stream(side)
    with torch.cuda.stream(side):
        x * 2


def on_default_stream(x: torch.Tensor) -> torch.Tensor:
    with torch.cuda.stream(torch.cuda.default_stream()):
        return x * 2


def synchronised_event(x: torch.Tensor) -> None:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    event.synchronize()


def pinned_copy(x: torch.Tensor, pinned: torch.Tensor) -> None:
    x.clone().copy_(pinned, non_blocking=True)


def outside_event(x: torch.Tensor) -> None:
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())


GENERATOR = torch.Generator()

NEEDS_CUDA_TO_TELL: dict[str, tuple[Callable[[torch.Tensor], Any], str | None]] = {
    # What a CPU's recorder cannot refuse: name -> (function, kind of the break; None: no break)
    "torch.cuda.synchronize": (lambda x: torch.cuda.synchronize(), "synchronisation"),
    "stream.synchronize": (
        lambda x: torch.cuda.current_stream().synchronize(),
        "synchronisation",
    ),
    "event.synchronize": (synchronised_event, "synchronisation"),
    "fork and join": (side_stream, None),
    "fork and join by events": (by_events, None),
    "fork and join twice": (joined_twice, None),
    "not joined": (lambda x: side_stream(x, join=False), "stream"),
    "works after it joined": (works_after_it_joined, "stream"),
    "not joined by an event": (lambda x: by_events(x, join=False), "stream"),
    "constant on the device": (
        lambda x: x + torch.tensor([1.0, 2, 3, 4], device=x.device),
        "host copy",
    ),
    "number on the device": (lambda x: x + torch.tensor(2.0, device=x.device), "host copy"),
    "number on the host": (lambda x: x + torch.tensor(2.0), None),
    "as_tensor on the device": (
        lambda x: x + torch.as_tensor([1.0, 2, 3, 4], device=x.device),
        "host copy",
    ),
    "new_tensor": (lambda x: x + x.new_tensor([1.0, 2, 3, 4]), "host copy"),
    "arange moved": (lambda x: x + torch.arange(4).to(x.device), "host copy"),
    "arange on the device": (lambda x: x + torch.arange(4, device=x.device), None),
    "moved to where it is": (lambda x: x.to(x.device) + 1, None),
    "zeros named cuda": (lambda x: x + torch.zeros(4, device="cuda"), None),
    "zeros moved by cuda()": (lambda x: x + torch.zeros(4).cuda(), "host copy"),
    "moved from numpy": (
        lambda x: x + torch.from_numpy(np.ones(4, dtype=np.float32)).to(x.device),
        "host copy",
    ),
    "copied from a list": (
        lambda x: x.clone().copy_(torch.tensor([1.0, 2, 3, 4]), non_blocking=True),
        "host copy",
    ),
    "indexed with a list": (lambda x: x[[0, 1]], "host copy"),
    "indexed with a host tensor": (lambda x: x[torch.tensor([0, 1])], "host copy"),
    "assigned at a list": (lambda x: x.clone().__setitem__([0, 1], 1.0), "host copy"),
    "assigned a number": (lambda x: x.clone().__setitem__(0, 1.0), None),
    "to the host": (lambda x: x.to("cpu"), "host copy"),
    "own generator": (
        lambda x: torch.rand(
            4, 4, generator=torch.Generator(x.device).manual_seed(1), device=x.device
        ),
        "random draw",
    ),
    "default generator": (lambda x: F.dropout(x) + torch.rand_like(x), None),
}

TELLS_BY_TABLE = {"synchronisation", "stream", "host copy", "random draw"}
"""Kinds of which only a CUDA device's recorder could tell."""

BAKED: dict[str, Callable[[], Step]] = {
    "a Python counter": Counter,
    "a tensor bound anew": Carried,
    "the clock": lambda: lambda inputs: {"y": inputs["x"] * (time.perf_counter_ns() % 1_000_003)},
    "Python's random": lambda: lambda inputs: {"y": inputs["x"] + random.random()},
    "a numpy draw": lambda: (
        lambda inputs: {"y": inputs["x"] + torch.from_numpy(np.random.rand(4).astype(np.float32))}
    ),
}


def drawing_after_a_seed(inputs: Inputs) -> Inputs:
    torch.manual_seed(4)
    return {"y": inputs["x"] + torch.rand_like(inputs["x"])}


def waiting(inputs: Inputs) -> Inputs:
    torch.cuda.synchronize()
    return {"y": inputs["x"] * 2}


def takes_three(inputs: Inputs) -> Inputs:
    return {"y": inputs["x"] * inputs["ids"][:, None] * inputs["on"][:, None]}


def make_nonsense() -> int:
    return 3


def make_uneven() -> tuple[Step, Inputs]:
    return clean, {"x": torch.ones(4), "weight": torch.ones(3)}


def make_raising() -> tuple[Step, Inputs]:
    raise ZeroDivisionError("on purpose")
