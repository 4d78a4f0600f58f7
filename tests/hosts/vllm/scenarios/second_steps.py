"""The second model runner: `ModelCudaGraphManager` with a toy model.

vLLM's own code: the manager's `__init__`, `capture`, `dispatch` and `run_fullgraph`. Stood in for:
what a dummy batch is made of (`prepare_inputs_to_capture`), and the runner around the manager.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from scenarios import fakes
from scenarios.common import compilation, engine_config, log_records, turn_on, warnings_in
from scenarios.fakes import LAYER, Toy
from scenarios.first_runner import stats
from scenarios.first_steps import assign, copy_in_place, move

MOST = 12
MOST_TOKENS = 64


class Engine:
    """A manager, the buffers of its engine, and steps."""

    def __init__(self, model: Toy | None = None, **args: Any) -> None:
        from vllm.v1.worker.gpu import cudagraph_utils

        self.toy = model or Toy()
        given = {"max_num_seqs": MOST, "max_num_batched_tokens": MOST_TOKENS, "max_model_len": 64}
        self.config = engine_config(**{**given, **args})
        layer = fakes.attention_layer(torch.zeros(8, 4))
        self.config.compilation_config.static_forward_context[LAYER] = layer
        self.slots = fakes.make_slots(MOST_TOKENS)
        self.buffers = SimpleNamespace(
            input_ids=torch.zeros(MOST_TOKENS, dtype=torch.int32),
            positions=torch.zeros(MOST_TOKENS, dtype=torch.int64),
            is_padding=torch.ones(MOST_TOKENS, dtype=torch.bool),
        )
        self.manager = cudagraph_utils.ModelCudaGraphManager(
            self.config,
            torch.device("cpu"),
            self.config.compilation_config.cudagraph_mode,
            decode_query_len=1,
        )
        cudagraph_utils.prepare_inputs_to_capture = self._dummy_batch

    def _dummy_batch(self, sequences: int, tokens: int, *_: Any, **__: Any) -> Any:
        self.slots[LAYER].fill_(-1)
        return fakes.attention_metadata(), {n: s[:tokens] for n, s in self.slots.items()}

    def capture(self) -> None:
        state = SimpleNamespace(prepare_dummy_inputs=lambda sequences, tokens: {})
        self.manager.capture(self.toy, state, self.buffers, None, None, [], None)

    @property
    def graphcap(self) -> Any:
        return self.manager.graphcap_model.engine

    def step(self, lengths: list[int], seed: int = 0) -> dict[str, Any]:
        """One step of sequences with so many new tokens each, held against the model run eagerly."""
        generator = torch.Generator().manual_seed(seed)
        tokens = sum(lengths)
        each = lengths[0] if len(set(lengths)) == 1 else None
        ids, positions = self.buffers.input_ids, self.buffers.positions
        ids[:tokens] = torch.randint(
            0, fakes.VOCABULARY, (tokens,), generator=generator, dtype=torch.int32
        )
        positions[:tokens] = torch.arange(tokens)
        descriptor = self.manager.dispatch(len(lengths), tokens, each, num_active_loras=0)
        self.slots[LAYER][:tokens] = torch.arange(tokens)
        self.slots[LAYER][tokens : descriptor.num_tokens] = -1
        with torch.inference_mode():
            eager = self.toy(ids[:tokens], positions[:tokens])
            if descriptor.cg_mode.name == "FULL":
                hidden = self.manager.run_fullgraph(descriptor)[:tokens]
            else:
                hidden = eager
            equal = torch.equal(hidden, eager)
        return {"mode": descriptor.cg_mode.name, "bucket": descriptor.num_tokens, "equal": equal}


def make_engine(
    model: Toy | None = None, variables: dict[str, str] | None = None, **args: Any
) -> Engine:
    turn_on(**(variables or {}))
    fakes.without_cuda()
    return Engine(model, **args)


def every_batch() -> dict[str, Any]:
    engine = make_engine()
    engine.capture()
    calls = len(engine.toy.calls)
    decode = [engine.step([1] * n, seed=n) for n in range(1, MOST + 1)]
    mixed = [engine.step([n - 1, 1], seed=n) for n in range(3, MOST_TOKENS + 1)]
    return {
        "ladders": {kind: list(m.ladder) for kind, m in engine.graphcap.managers.items()},
        "decode steps": decode,
        "mixed steps": mixed,
        "calls by replays": len(engine.toy.calls) - calls - len(decode) - len(mixed),
        "decode": stats(engine.graphcap),
        "mixed": stats(engine.graphcap, "mixed"),
        "own forward": "forward" not in vars(engine.toy),
        "graphs of vLLM": len(engine.manager.graphs),
    }


def one_bucket_fails(call: int) -> dict[str, Any]:
    """The model raises in bucket 4 at its first call, the warm-up, or at its second, the recording."""
    toy = Toy()
    toy.fails_at = {4: call}
    engine = make_engine(toy)
    with log_records() as records:
        engine.capture()
    steps = [engine.step([1] * n, seed=n) for n in (2, 3, 4, 5)]
    return {"steps": steps, "warnings": warnings_in(records), **stats(engine.graphcap)}


def weights(change: Callable[[Toy], Any], reload: bool = False, extra: int = 0) -> dict[str, Any]:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def reload_weights(self: Any, change: Callable[[Toy], Any]) -> None:
        change(self.model)

    GPUModelRunner.reload_weights = reload_weights
    engine = make_engine(Toy(extra))
    engine.capture()
    before = engine.step([1] * 3)
    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.cudagraph_manager, runner.model = engine.manager, engine.toy
    if reload:
        runner.reload_weights(change)
    else:
        change(engine.toy)
    with log_records() as records:
        after = [engine.step([1] * 3, seed=seed) for seed in range(3)]
    found = stats(engine.graphcap)
    return {"before": before, "after": after, "warnings": warnings_in(records), **found}


def eager_steps() -> dict[str, Any]:
    engine = make_engine(**compilation(cudagraph_capture_sizes=[2, 4, 8], mode=0))
    engine.capture()
    steps = []
    for lengths in ([1] * 3, [1] * 9, [1] * 9, [7, 2]):
        step = engine.step(lengths)
        steps.append({**step, **stats(engine.graphcap)["fallbacks"]})
    return {"steps": steps, **stats(engine.graphcap)}


def shut_down() -> dict[str, Any]:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    ended = []
    GPUModelRunner.shutdown = lambda self: ended.append(self)
    engine = make_engine()
    engine.capture()
    managers = list(engine.graphcap.managers.values())
    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.cudagraph_manager = engine.manager
    runner.shutdown()
    again = GPUModelRunner.__new__(GPUModelRunner)
    again.cudagraph_manager = None  # it never came to a capture
    again.shutdown()
    return {
        "states": [manager.state for manager in managers],
        "engine": engine.graphcap is not None,
        "vLLM's own shutdowns": len(ended),
    }


def estimate(captures: bool) -> dict[str, Any]:
    """vLLM records a few throw-away graphs to estimate memory, on a card that captures them or not; then
    the real capture follows."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    seen = []

    def capture(self: Any, create_forward_fn: Any, *_: Any, **__: Any) -> None:
        seen.append({mode.name: len(descs) for mode, descs in self._capture_descs.items()})
        self._graphs_captured = True

    CudaGraphManager.capture = capture
    engine = make_engine()
    from graphcap.hosts.vllm import engine as held

    held.probe_capture = lambda device: SimpleNamespace(works=captures)
    engine.manager._max_full_descs_to_capture = 2
    engine.capture()
    after_estimate = engine.graphcap is not None
    engine.manager._max_full_descs_to_capture = None
    engine.capture()
    return {
        "vLLM captured": seen,
        "after the estimate": after_estimate,
        "after the capture": sorted(engine.graphcap.managers),
        "step": engine.step([1] * 3),
    }


def not_taken() -> dict[str, Any]:
    """With an engine that is not taken, vLLM's manager captures by itself."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    seen = []
    CudaGraphManager.capture = lambda self, *_, **__: seen.append(
        {mode.name: len(descs) for mode, descs in self._capture_descs.items()}
    )
    turn_on()
    fakes.without_cuda()
    engine = Engine(**compilation(cudagraph_mode="FULL", mode=0, cudagraph_capture_sizes=[16, 32]))
    engine.capture()
    return {"vLLM captured": seen, "held": hasattr(engine.manager, "graphcap_model")}


def wrong_replay() -> dict[str, Any]:
    """The second replay is wrong and is found."""
    engine = make_engine(variables={"verify": "2"})
    engine.capture()
    recording = engine.graphcap.managers["decode"].recording(4)
    recording._entries, recording._stream = recording._entries[:-1], None
    with log_records() as records:
        steps = [engine.step([1] * rows, seed=seed) for seed, rows in enumerate((3, 3, 4, 2))]
    told = dict(engine.graphcap.reporter.fallbacks)
    return {
        "steps": steps,
        "warnings": warnings_in(records),
        "told": told,
        **stats(engine.graphcap),
    }


SCENARIOS: dict[str, Callable[[], Any]] = {
    "every batch": every_batch,
    "a warm-up fails": partial(one_bucket_fails, 1),
    "a recording fails": partial(one_bucket_fails, 2),
    "a weight is assigned": partial(weights, assign),
    "a weight is moved and reloaded": partial(weights, move, reload=True, extra=60),
    "a weight is copied into": partial(weights, copy_in_place, reload=True),
    "eager steps": eager_steps,
    "shutdown": shut_down,
    "estimate": partial(estimate, True),
    "estimate without graphs": partial(estimate, False),
    "not taken": not_taken,
    "a wrong replay": wrong_replay,
}
