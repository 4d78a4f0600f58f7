"""To which graph a batch goes: the dispatcher of the first model runner, the manager of the second."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from scenarios.common import (
    compilation,
    engine_config,
    log_records,
    set_variables,
    turn_on,
    warnings_in,
)
from scenarios.fakes import without_cuda

MOST = 30
MOST_TOKENS = 300
NOT_TAKEN = compilation(cudagraph_mode="FULL", mode=3)


def _config(on: bool, **args: Any) -> Any:
    if on:
        turn_on()
    else:
        set_variables({"VLLM_PLUGINS": "graphcap_test_platform"})
    without_cuda()
    return engine_config(**{"max_num_seqs": MOST, "max_num_batched_tokens": MOST_TOKENS, **args})


# -- first model runner --------------------------------------------------------------------------


def first(on: bool = True, resolved: str | None = None, **args: Any) -> dict[str, Any]:
    """What the dispatcher answers, as [mode, tokens, sequences, uniform], and what it wants captured.

    Args:
        on: with graphcap.
        resolved: the mode to which the attention backend agrees; None: the one that was configured.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    config = _config(on, **args)
    mode = CUDAGraphMode[resolved] if resolved else config.compilation_config.cudagraph_mode
    dispatcher = CudagraphDispatcher(config)
    with log_records() as records:
        dispatcher.initialize_cudagraph_keys(mode, 1)

    def described(mode: Any, descriptor: Any) -> list[Any]:
        return [mode.name, descriptor.num_tokens, descriptor.num_reqs, descriptor.uniform]

    def ask(tokens: int, uniform: bool) -> list[Any]:
        return described(*dispatcher.dispatch(tokens, uniform_decode=uniform))

    return {
        # In turn, since graphcap's dispatcher has two tables and uses one at a time.
        "answers": [
            [ask(tokens, True), ask(tokens, False)] for tokens in range(1, MOST_TOKENS + 2)
        ],
        "captures": [
            described(mode, descriptor)
            for mode, descriptors in dispatcher.get_capture_descs()
            for descriptor in descriptors
        ],
        "choice": config.additional_config.get("graphcap"),
        "sizes": config.compilation_config.cudagraph_capture_sizes,
        "warnings": warnings_in(records),
    }


# -- second model runner -------------------------------------------------------------------------


def _manager(config: Any, mode: Any, manager_class: Any = None) -> Any:
    import torch
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    chosen = manager_class or ModelCudaGraphManager
    manager = chosen(config, torch.device("cpu"), mode, decode_query_len=1)
    manager._graphs_captured = True
    return manager


def _described(descriptor: Any) -> list[Any]:
    return [
        descriptor.cg_mode.name,
        descriptor.num_tokens,
        descriptor.num_reqs,
        descriptor.uniform_token_count,
    ]


def second(on: bool = True, resolved: str | None = None, **args: Any) -> dict[str, Any]:
    """What the manager answers, as [mode, tokens, sequences, tokens of each], and what it captures."""
    from vllm.config import CUDAGraphMode

    config = _config(on, **args)
    mode = CUDAGraphMode[resolved] if resolved else config.compilation_config.cudagraph_mode
    manager = _manager(config, mode)

    def ask(sequences: int, tokens: int, each: int | None) -> list[Any]:
        return _described(manager.dispatch(sequences, tokens, each, num_active_loras=0))

    return {
        "uniform": [ask(n, n, 1) for n in range(1, MOST_TOKENS + 2)],
        "one prefill": [ask(1, n, None) for n in range(1, MOST_TOKENS + 2)],
        # As many sequences as there can be in a batch that has a prefill of two tokens.
        "many sequences": [ask(min(n - 1, MOST), n, None) for n in range(2, MOST_TOKENS + 2)],
        "captures": [_described(d) for descs in manager._capture_descs.values() for d in descs],
        "choice": config.additional_config.get("graphcap"),
        "sizes": config.compilation_config.cudagraph_capture_sizes,
    }


def other_managers(on: bool) -> dict[str, Any]:
    """Managers of draft models, and of classes derived from the model's."""
    from importlib import import_module

    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

    class Derived(ModelCudaGraphManager):
        pass

    config = _config(
        on, **compilation(cudagraph_mode="FULL", mode=0, cudagraph_capture_sizes=[8, 16])
    )
    folder = "vllm.v1.worker.gpu.spec_decode"
    classes = {"base": CudaGraphManager, "derived": Derived}
    for name in ("autoregressive", "target_dependent_ar"):
        try:
            module = import_module(f"{folder}.{name}.cudagraph_utils")
        except ImportError:
            continue  # another version's
        classes["draft"] = module.SpeculatorCudaGraphManager
    found = {}
    for name, manager_class in classes.items():
        if name == "draft":
            manager = manager_class.__new__(manager_class)
            ModelCudaGraphManager.__mro__[1].__init__(
                manager, config, _cpu(), CUDAGraphMode.FULL, decode_query_len=1
            )
        else:
            manager = _manager(config, CUDAGraphMode.FULL, manager_class)
        found[name] = {
            str(key): [_described(d) for d in candidates]
            for key, candidates in manager._candidates.items()
        }
    model = _manager(config, CUDAGraphMode.FULL)
    found["model"] = {
        str(key): [_described(d) for d in candidates]
        for key, candidates in model._candidates.items()
    }
    return found


def _cpu() -> Any:
    import torch

    return torch.device("cpu")


SCENARIOS: dict[str, Callable[[], Any]] = {
    "first": first,
    "first, custom buckets": partial(
        first, max_num_seqs=MOST, **compilation(cudagraph_capture_sizes=[3, 7, 40, 100], mode=0)
    ),
    "first, pieces": partial(first, **compilation(mode=3)),
    "first, decode only": partial(first, resolved="FULL_DECODE_ONLY"),
    "first, not taken": partial(first, **NOT_TAKEN),
    "first, without": partial(first, False, **NOT_TAKEN),
    "second": second,
    "second, custom buckets": partial(
        second, **compilation(cudagraph_capture_sizes=[3, 7, 40, 100], mode=0)
    ),
    "second, pieces": partial(second, **compilation(mode=3)),
    "second, decode only": partial(second, resolved="FULL_DECODE_ONLY"),
    "second, not taken": partial(second, **NOT_TAKEN),
    "second, without": partial(second, False, **NOT_TAKEN),
    "other managers": partial(other_managers, True),
    "other managers, without": partial(other_managers, False),
}
