"""Tensor parallelism: the ranks agree on every bucket, on the host, in the first model runner."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from scenarios.common import FOLDER_VARIABLE, log_records, warnings_in
from scenarios.fakes import Toy
from scenarios.first_runner import capture, make_runner, stats


def two_ranks(other: bool, fails: bool = False) -> dict[str, Any]:
    """A group of two, of which the other one is a vote; this one fails in bucket 4."""
    import vllm.distributed.parallel_state as parallel_state

    toy = Toy()
    toy.fails_at = {4: 2} if fails else {}
    runner = make_runner(toy)
    parallel_state._TP = SimpleNamespace(world_size=2, cpu_group=None)
    votes: list[int] = []

    def all_reduce(vote: torch.Tensor, op: Any = None, group: Any = None) -> None:
        votes.append(int(vote))
        vote.clamp_(max=int(other or len(votes) == 1))  # the first one is about the recorder

    torch.distributed.all_reduce = all_reduce
    with log_records() as records:
        capture(runner)
    steps = [runner.step([1] * n, seed=n) for n in (1, 4, 12)]
    found = stats(runner.model.engine)
    return {"votes": votes, "steps": steps, "warnings": warnings_in(records), **found}


def this_rank_fails_strictly() -> dict[str, Any]:
    """With GRAPHCAP_STRICT=1 the failure is an error here, and the other rank waits for a vote."""
    import vllm.distributed.parallel_state as parallel_state

    os.environ["GRAPHCAP_STRICT"] = "1"
    toy = Toy()
    toy.fails_at = {4: 2}
    runner = make_runner(toy)
    parallel_state._TP = SimpleNamespace(world_size=2, cpu_group=None)
    votes: list[int] = []
    torch.distributed.all_reduce = lambda vote, op=None, group=None: votes.append(int(vote))
    try:
        capture(runner)
    except Exception as error:
        return {"votes": votes, "error": f"{type(error).__name__}: {error}"}
    return {"votes": votes, "error": None}


def real_ranks() -> list[dict[str, Any]]:
    """Two processes that vote over gloo; rank 1 fails in bucket 4."""
    return in_two_processes("store", _as_rank)


def in_two_processes(name: str, as_rank: Callable[[int, Path], Any]) -> list[Any]:
    """What each of two processes finds; they meet in a file of that name."""
    store = Path(os.environ[FOLDER_VARIABLE]) / name
    pipes = []
    for rank in range(2):
        reader, writer = os.pipe()
        if os.fork() == 0:
            found = as_rank(rank, store)
            os.write(writer, json.dumps(found).encode())
            os._exit(0)
        os.close(writer)
        pipes.append(os.fdopen(reader))
    return [json.loads(pipe.read()) for pipe in pipes]


def _as_rank(rank: int, store: Path) -> dict[str, Any]:
    toy = Toy()
    toy.fails_at = {4: 2} if rank == 1 else {}
    runner = make_runner(toy)
    _meet(rank, store)
    with log_records() as records:
        capture(runner)
    steps = [runner.step([1] * n, seed=n) for n in (1, 4, 12)]
    found = stats(runner.model.engine)
    return {"steps": steps, "warnings": warnings_in(records), **found}


def _meet(rank: int, store: Path) -> None:
    import vllm.distributed.parallel_state as parallel_state

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    group = torch.distributed.group.WORLD
    parallel_state._TP = SimpleNamespace(world_size=2, cpu_group=group)


RECORDERS = ("cuda cuda", "cuda tape", "tape tape", "cuda none", "none tape", "none none")
"""What the two ranks could have, each by itself."""


def recorders() -> dict[str, list[dict[str, Any]]]:
    """Cards that differ: the recorder that each rank comes to, or the error."""
    return {
        pair: in_two_processes(f"recorder {pair}", partial(_recorder, pair.split()))
        for pair in RECORDERS
    }


def _recorder(own: list[str], rank: int, store: Path) -> dict[str, Any]:
    from graphcap.errors import BackendError
    from graphcap.hosts.vllm import ranks

    def select(wanted: str, device: torch.device) -> Any:
        if own[rank] == "none":
            raise BackendError("this card cannot capture")
        return SimpleNamespace(name=own[rank], why=None)

    ranks.select_recorder = select
    _meet(rank, store)
    try:
        found = ranks.common_recorder("cuda", torch.device("cpu"))
    except BackendError as error:
        return {"error": str(error)}
    return {"name": found.name, "why": found.why}


SCENARIOS: dict[str, Callable[[], Any]] = {
    "two ranks agree": partial(two_ranks, True),
    "the other rank fails": partial(two_ranks, False),
    "this rank fails": partial(two_ranks, True, fails=True),
    "this rank fails strictly": this_rank_fails_strictly,
    "real ranks": real_ranks,
    "recorders": recorders,
}
