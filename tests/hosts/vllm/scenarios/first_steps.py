"""The first model runner: capture, replays, and every way in which a step is not replayed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scenarios.common import (
    FOLDER_VARIABLE,
    compilation,
    from_graphcap,
    log_records,
    warnings_in,
)
from scenarios.fakes import LAYER, Toy
from scenarios.first_runner import MOST, MOST_TOKENS, capture, make_runner, stats

Change = Callable[[Toy], Any]


def every_batch() -> dict[str, Any]:
    report = Path(os.environ[FOLDER_VARIABLE]) / "report-first.json"
    runner = make_runner(variables={"report": str(report)})
    with log_records() as records:
        capture(runner)
    engine, runs = runner.model.engine, runner.dummy_runs
    calls = len(runner.toy.calls)
    decode = [runner.step([1] * n, seed=n) for n in range(1, MOST + 1)]
    mixed = [runner.step([n - 1, 1], seed=n) for n in range(3, MOST_TOKENS + 1)]
    return {
        "type": type(runner.model).__name__,
        "ladders": {kind: list(manager.ladder) for kind, manager in engine.managers.items()},
        "block": [r["text"] for r in from_graphcap(records) if "is recorded" in r["text"]],
        "report": json.loads(report.read_text()),
        "decode steps": decode,
        "mixed steps": mixed,
        # Each step is held against one eager call; a replay makes none.
        "calls by replays": len(runner.toy.calls) - calls - len(decode) - len(mixed),
        "decode": stats(engine),
        "mixed": stats(engine, "mixed"),
        "dummy runs": [
            [run["num_tokens"], run["uniform_decode"], run.get("profile_seq_lens")] for run in runs
        ],
    }


def in_pieces() -> dict[str, Any]:
    """Mixed batches in vLLM's pieces: its own capture of them comes first, and stays."""
    runner = make_runner(**compilation(mode=3))
    capture(runner)
    return {
        "decode steps": [runner.step([1] * n, seed=n) for n in range(1, MOST + 1)],
        "mixed steps": [runner.step([n - 1, 1], seed=n) for n in range(3, 2 * MOST + 1)],
        "kinds": list(runner.model.engine.managers),
        "captured by vLLM": sorted(
            run["num_tokens"]
            for run in runner.dummy_runs
            if run["cudagraph_runtime_mode"].name == "PIECEWISE"
        ),
        **stats(runner.model.engine),
    }


def one_bucket_fails(call: int) -> dict[str, Any]:
    """The model raises in bucket 4 at its first call, the warm-up, or at its second, the recording."""
    toy = Toy()
    toy.fails_at = {4: call}
    runner = make_runner(toy)
    with log_records() as records:
        capture(runner)
    steps = [runner.step([1] * n, seed=n) for n in (2, 3, 4, 5, 3)]
    return {"steps": steps, "warnings": warnings_in(records), **stats(runner.model.engine)}


# -- what a recording points at ------------------------------------------------------------------


def weights(change: Change, reload: bool = False, extra: int = 0) -> dict[str, Any]:
    """A replay, a change of weights, three steps more."""
    toy = Toy(extra)
    runner = make_runner(toy)
    capture(runner)
    before = runner.step([1] * 3)
    if reload:
        runner.reload_weights(change)
    else:
        change(toy)
    with log_records() as records:
        after = [runner.step([1] * 3, seed=seed) for seed in range(3)]
    found = stats(runner.model.engine)
    return {"before": before, "after": after, "warnings": warnings_in(records), **found}


def assign(toy: Toy) -> None:
    toy.project.weight = torch.nn.Parameter(toy.project.weight * -1, requires_grad=False)


def move(toy: Toy) -> None:
    last = toy.extra[len(toy.extra) - 1]
    last.data = last.data * -1


def copy_in_place(toy: Toy) -> None:
    toy.project.weight.mul_(-1)


def assign_and_fail(toy: Toy) -> None:
    move(toy)
    raise ValueError("half way")


def reload_fails() -> dict[str, Any]:
    """A reload that raises has moved something all the same."""
    toy = Toy(extra=60)
    runner = make_runner(toy)
    capture(runner)
    try:
        runner.reload_weights(assign_and_fail)
        raised = None
    except ValueError as error:
        raised = str(error)
    return {"raised": raised, "after": runner.step([1] * 3), **stats(runner.model.engine)}


def cache_moves(caches: Callable[[], Any]) -> dict[str, Any]:
    """The engine binds a layer to another cache."""
    runner = make_runner()
    layer = runner.compilation_config.static_forward_context[LAYER]
    layer.kv_cache = caches()
    capture(runner)
    before = runner.step([1])
    layer.kv_cache = caches()
    with log_records() as records:
        after = runner.step([1])
    found = stats(runner.model.engine)
    return {"before": before, "after": after, "warnings": warnings_in(records), **found}


def buffers_move() -> dict[str, Any]:
    runner = make_runner()
    capture(runner)
    runner.input_ids = runner.input_ids.clone()
    with log_records() as records:
        step = runner.step([1] * 2)
    return {"step": step, "warnings": warnings_in(records), **stats(runner.model.engine)}


# -- steps that are vLLM's own -------------------------------------------------------------------


def eager_steps(variables: dict[str, str] | None = None) -> dict[str, Any]:
    """Which are counted, and under what."""
    runner = make_runner(
        variables=variables, **compilation(cudagraph_capture_sizes=[1, 2, 4], mode=0)
    )
    capture(runner)
    counted = []
    with log_records() as records:
        for lengths, metadata in (
            ([1] * 6, {}),
            ([1] * 6, {}),
            ([1] * 7, {"use_cascade": True}),
            ([9, 1], {}),
        ):
            step = runner.step(lengths, **metadata)
            counted.append({**step, **stats(runner.model.engine)["fallbacks"]})
        with torch.inference_mode():  # a dummy batch has no attention metadata
            mode, descriptor = runner.cudagraph_dispatcher.dispatch(6, uniform_decode=True)
            runner.forward(mode, descriptor, 6, None)
    return {
        "steps": counted,
        "warnings": warnings_in(records),
        "choice": runner.vllm_config.additional_config["graphcap"],
        **stats(runner.model.engine),
    }


def strict() -> dict[str, Any]:
    runner = make_runner(
        variables={"strict": "1"}, **compilation(cudagraph_capture_sizes=[1, 2, 4])
    )
    capture(runner)
    replayed = runner.step([1] * 2)
    try:
        runner.step([1] * 6)
        raised = None
    except Exception as error:
        raised = [type(error).__name__, str(error)]
    return {"replayed": replayed, "raised": raised}


def verify_every_second() -> dict[str, Any]:
    runner = make_runner(variables={"verify": "2"})
    capture(runner)
    return {"steps": [runner.step([1] * 3) for _ in range(6)], **stats(runner.model.engine)}


def closed(how: str) -> dict[str, Any]:
    """After the graphs are given back."""
    runner = make_runner()
    capture(runner)
    wrapper, engine = runner.model, runner.model.engine
    runner.step([1])
    if how == "clear_graphs":
        wrapper.clear_graphs()
    elif how == "clear_all_graphs":
        type(wrapper).clear_all_graphs()
    else:
        runner.shutdown()
    return {
        "states": [manager.state for manager in engine.managers.values()],
        "serves": wrapper.engine is not None,
        "model": runner.model is not None,
    }


def no_context() -> dict[str, Any]:
    """Outside of a forward context the model runs as it is."""
    runner = make_runner()
    capture(runner)
    ids, positions = torch.arange(5).int(), torch.arange(5)
    bare = runner.model(input_ids=ids, positions=positions)
    return {
        "equal": torch.equal(bare, runner.get_model()(ids, positions)),
        "attributes": runner.model.project is runner.toy.project,
        **stats(runner.model.engine),
    }


# -- what is loaded ------------------------------------------------------------------------------


def not_taken() -> dict[str, Any]:
    runner = make_runner(**compilation(cudagraph_mode="FULL", mode=3))
    return {"type": type(runner.model).__name__}


def wrapped_by_others(inside: bool) -> dict[str, Any]:
    """A model that vLLM has wrapped in something else: alone, or inside of the wrapper for full graphs."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.config import CUDAGraphMode

    class Inner(BreakableCUDAGraphWrapper):
        def __init__(self, runnable: Any) -> None:
            self.runnable, self.is_debugging_mode = runnable, False

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.runnable(*args, **kwargs)

        def unwrap(self) -> Any:
            return self.runnable

    def wrapped(toy: Toy, config: Any) -> Any:
        inner = Inner(toy)
        if not inside:
            return inner
        return CUDAGraphWrapper(inner, config, runtime_mode=CUDAGraphMode.FULL)

    with log_records() as records:
        runner = make_runner(wrapped=wrapped)
    runnable = getattr(runner.model, "runnable", None)
    return {
        "types": [type(runner.model).__name__, type(runnable).__name__],
        "warnings": warnings_in(records),
    }


def decode_only_after_all() -> dict[str, Any]:
    """The attention backend turns out to record decode batches only, and the buckets that the user chose
    are not those of mixed batches."""
    from vllm.config import CUDAGraphMode

    runner = make_runner(variables={"buckets": "1,3"}, max_num_seqs=40, max_num_batched_tokens=256)
    with log_records() as records:
        capture(runner, CUDAGraphMode.FULL_DECODE_ONLY)
    steps = [runner.step([1] * n, seed=n) for n in range(1, 41)]
    prefill = runner.step([30, 1])
    return {
        "steps": steps,
        "prefill": prefill,
        "kinds": list(runner.model.engine.managers),
        "warnings": warnings_in(records),
        **stats(runner.model.engine),
    }


def estimate(recorder: str) -> dict[str, Any]:
    """vLLM estimates memory with throw-away graphs of the largest buckets, here where nothing captures."""
    from vllm.config import CUDAGraphMode

    runner = make_runner(variables={"recorder": recorder})
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL, 1)
    with torch.inference_mode():
        for mode, descriptors in runner.cudagraph_dispatcher.get_capture_descs():
            runner._warmup_and_capture(descriptors[0], cudagraph_runtime_mode=mode)
    graphs = len(runner.model.concrete_cudagraph_entries)
    capture(runner)
    return {"graphs": graphs, "steps": [runner.step([1] * 3)], **stats(runner.model.engine)}


SCENARIOS: dict[str, Callable[[], Any]] = {
    **{f"estimate, {recorder}": partial(estimate, recorder) for recorder in ("auto", "tape")},
    "every batch": every_batch,
    "in pieces": in_pieces,
    "a warm-up fails": partial(one_bucket_fails, 1),
    "a recording fails": partial(one_bucket_fails, 2),
    "a weight is assigned": partial(weights, assign),
    "a weight is moved and reloaded": partial(weights, move, reload=True, extra=60),
    "a weight is copied into": partial(weights, copy_in_place),
    "a reload fails": reload_fails,
    "a cache moves": partial(cache_moves, lambda: torch.zeros(8, 4)),
    "a pair of caches moves": partial(cache_moves, lambda: (torch.zeros(8, 4), torch.zeros(8))),
    "buffers move": buffers_move,
    "eager steps": eager_steps,
    "eager steps, tape asked for": partial(eager_steps, {"recorder": "tape"}),
    "strict": strict,
    "verify every second": verify_every_second,
    **{how: partial(closed, how) for how in ("clear_graphs", "clear_all_graphs", "shutdown")},
    "no context": no_context,
    "not taken": not_taken,
    "wrapped by others": partial(wrapped_by_others, inside=False),
    "wrapped by others inside": partial(wrapped_by_others, inside=True),
    "decode only after all": decode_only_after_all,
}
