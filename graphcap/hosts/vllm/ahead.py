"""Kernels that a start is sure to need, compiled beside the loading of the weights and the profile run.

With cold caches a start is mostly Triton's compiler, on one core: on an H200 machine 9 to 13 s for vLLM's
kernel of top-k and top-p, and about 8 s for the experts at all sizes that are recorded. Triton
gives up Python's lock in its passes, so threads do it meanwhile. They launch the kernels themselves, on
small tensors of their own, since only a launch says for certain what is compiled.

What fails here is left to the start itself, which comes to the same kernel later. A start that does not
come that far (its load raised, the process ends) has its threads stop after the kernel at hand: they would
launch into the capture of the next engine, and the interpreter must not go away under a compiler.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphcap.cuda.source import not_launched
from graphcap.decode.expert_plans import ExpertPlans
from graphcap.hosts.vllm.choice import Choice
from graphcap.hosts.vllm.experts import MOST_TOKENS, PlansOfLayers, obstacle
from graphcap.moe.experts import RoutedExperts, few_pairs
from graphcap.moe.kernels import choose_backend
from graphcap.pool import BufferPool
from graphcap.settings import Settings

logger = logging.getLogger(__name__)

MADE_UP = 512
"""The most tokens of a batch that is made up here: its three caches take 28 MiB with hidden size 2048,
expert intermediate 512 and top-8 in bfloat16. vLLM's kernels for more are those of its profile run."""

Work = Callable[[], object]


class Ahead:
    """Threads that work ahead for the model runner of this process, each on a stream of its own."""

    def __init__(self, vllm_config: Any, choice: Choice, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.choice = choice
        self.device = device
        self._threads: dict[str, threading.Thread] = {}
        self._ended = threading.Event()

    def begin(self, name: str, work: Work) -> None:
        """Start `work`, unless it was started under this name before."""
        if name not in self._threads:
            thread = threading.Thread(
                target=self._run, args=(name, work), name=f"graphcap-{name}", daemon=True
            )
            self._threads[name] = thread
            thread.start()

    def has_begun(self, name: str) -> bool:
        return name in self._threads

    def each(self, sizes: Iterable[int]) -> Iterator[int]:
        """`sizes`, as long as somebody waits for them."""
        for size in sizes:
            if self._ended.is_set():
                return
            yield size

    def wait(self, name: str | None = None) -> None:
        """Until `name`, or everything, is done. Before a capture: launches of a thread would break it."""
        for thread in [t for n, t in self._threads.items() if name in (None, n)]:
            thread.join()

    def end(self) -> None:
        """Have the threads stop after the kernel at hand, and wait until they have."""
        self._ended.set()
        self.wait()

    def _run(self, name: str, work: Work) -> None:
        began = time.perf_counter()
        try:
            with torch.inference_mode(), _own_stream(self.device):
                work()
        except Exception as error:  # the start compiles it itself, and reports what is wrong
            logger.debug("graphcap: %s not compiled ahead: %r", name, error)
        else:
            took = time.perf_counter() - began
            logger.debug("graphcap: %s compiled ahead in %.1f s", name, took)


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
        torch.cuda.current_stream().synchronize()


_now: Ahead | None = None
"""That of the load that is going on in this process, or has ended and nothing is captured yet."""


def start(vllm_config: Any, device: torch.device) -> None:
    """A model runner is about to load its weights."""
    global _now
    end()  # of an engine whose load raised
    choice = Choice.of(vllm_config)
    if choice is None or not choice.taken or choice.recorder != "cuda":
        return
    _now = Ahead(vllm_config, choice, device)
    _now.begin("sampler", lambda: sample(vllm_config, device))


def wait(name: str | None = None) -> None:
    """Wait for `name`, or for all that was started, after which there is nothing more."""
    global _now
    if _now is not None:
        _now.wait(name)
        if name is None:
            _now = None


@atexit.register
def end() -> None:
    """Nobody needs any of it any more."""
    global _now
    if _now is not None:
        _now.end()
        _now = None


def experts_made(layer: Any) -> None:
    """An MoE layer that graphcap may run has been made; its weights are not loaded yet.

    Never raises: what is wrong with a layer or a backend is said where the layer is captured.

    Args:
        layer: vLLM's runner of the layer.
    """
    if _now is None or _now.has_begun("vllm"):
        return
    try:
        if obstacle(layer) is None:
            _compile_experts(_now, layer.routed_experts)
    except Exception as error:
        logger.debug("graphcap: experts not compiled ahead: %r", error)


def _compile_experts(ahead: Ahead, routed: Any) -> None:
    shapes = (tuple(routed.w13_weight.shape), tuple(routed.w2_weight.shape))
    made = (ahead.device, shapes, routed.w13_weight.dtype, int(routed.top_k))
    sizes = {*ahead.choice.decode, *ahead.choice.mixed_tokens}
    wanted = ahead.choice.kernels
    theirs = sorted(
        size
        for size in sizes
        if size <= MADE_UP
        and (wanted == "vllm" or size > MOST_TOKENS or size == ahead.choice.decode[-1])
    )
    ahead.begin("vllm", lambda: vllm_experts(ahead.each(theirs), *made))
    # Others have nothing to compile, and ixformer's would read weights that lie in the memory of one
    # expert as if they were all there.
    backend = None if wanted == "vllm" else choose_backend(wanted, ahead.device)
    if backend is None or backend.name != "triton":
        return
    plans = PlansOfLayers(backend, ahead.device, Settings.from_env()).of(routed)
    few: list[int] = []
    many: list[int] = []
    for size in sorted(size for size in sizes if size <= MOST_TOKENS):
        (few if few_pairs(size, int(routed.top_k), shapes[0][0]) else many).append(size)
    renormalize = bool(routed.renormalize)
    ahead.begin("few", lambda: our_experts(plans, ahead.each(few), renormalize, *made))
    ahead.begin("many", lambda: our_experts(plans, ahead.each(many), renormalize, *made))


def sample(vllm_config: Any, device: torch.device) -> None:
    """vLLM's dummy sampling of a profile run, on as few rows as come to the same kernel."""
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton

    most = int(vllm_config.scheduler_config.max_num_seqs)
    if most < 8:  # vLLM sorts so few
        return
    rows = 16 if most % 16 == 0 else 9  # Triton tells multiples of 16 from other sizes
    vocabulary = int(vllm_config.model_config.get_vocab_size())
    logits = torch.zeros(rows, vocabulary, device=device)
    logits[:, 0] = 1.0
    k = torch.full((rows,), vocabulary - 1, device=device)
    p = torch.full((rows,), 0.9, device=device)
    apply_top_k_top_p_triton(logits, k, p)


def _weights(
    device: torch.device, shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of so many experts in the memory of one."""
    first, second = (
        torch.zeros(shape[1:], dtype=dtype, device=device).expand(shape) for shape in shapes
    )
    return first, second


def our_experts(
    plans: ExpertPlans,
    sizes: Iterable[int],
    renormalize: bool,
    device: torch.device,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    top_k: int,
) -> None:
    """graphcap's kernels of an MoE layer, at each of `sizes`. All rows are padding, so that no expert is
    reached but one that has memory; those in CUDA C++ read weights of padding too, and are not launched."""
    gate_up, down = _weights(device, shapes, dtype)
    router = torch.zeros(down.shape[0], down.shape[1], dtype=dtype, device=device)
    for size in sizes:
        hidden = torch.zeros(size, down.shape[1], dtype=dtype, device=device)
        rows = torch.full((size,), -1, dtype=torch.int64, device=device)
        pool = BufferPool(device)
        experts = RoutedExperts(
            plans.kernels(size),
            pool,
            router,
            gate_up,
            down,
            top_k=top_k,
            renormalize=renormalize,
        )
        try:
            with pool.step(), not_launched():
                experts(hidden, rows, torch.empty_like(hidden))
        except (
            Exception
        ) as error:  # a plan that cannot run costs its own size; see `ExpertPlans.run`
            logger.debug("graphcap: experts of %d rows not compiled ahead: %r", size, error)


def vllm_experts(
    sizes: Iterable[int],
    device: torch.device,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    top_k: int,
) -> None:
    """vLLM's kernels of an unquantised MoE layer, at each of `sizes`."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    gate_up, down = _weights(device, shapes, dtype)
    for size in sizes:
        hidden = torch.zeros(size, down.shape[1], dtype=dtype, device=device)
        weights = torch.full((size, top_k), 1.0 / top_k, device=device)
        ids = torch.arange(size * top_k, dtype=torch.int32, device=device) % down.shape[0]
        fused_experts(hidden, gate_up, down, weights, ids.view(size, top_k))
