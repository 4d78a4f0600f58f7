"""MoE layers of the engine on graphcap's pool and kernels, through vLLM's out-of-tree registration.

Only inside a step that graphcap records or replays: everywhere else (prefill, eager steps) a layer is
vLLM's own. `PooledExperts.serving` marks that; a layer asks `serving_now`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphcap.decode.expert_plans import ExpertPlans
from graphcap.decode.kernels import FusedLayerKernels, decode_kernels
from graphcap.decode.plan_choice import PlanChoice
from graphcap.decode.plan_key import ExpertSizes
from graphcap.errors import BackendError
from graphcap.explain import warn
from graphcap.moe.experts import RoutedExperts
from graphcap.moe.kernels import Backend, ExpertKernels, choose_backend, expert_kernels
from graphcap.moe.ranges import nvtx_ranges
from graphcap.operations import KernelChoice
from graphcap.pool import BufferPool
from graphcap.settings import Settings

logger = logging.getLogger(__name__)

MOST_TOKENS = 64
"""Above this many tokens a layer stays on vLLM's kernels also inside a recording: graphcap's are made
for decode batches."""


class _ThreadState(threading.local):
    serving: PooledExperts | None = None


_state = _ThreadState()
_told: set[str] = set()


class PooledExperts:
    """The pool and the kernels that the MoE layers of one model runner share.

    Args:
        why_not: why they stay on vLLM's kernels, whatever the settings say.

    Attributes:
        kernels: graphcap's; None: layers stay on vLLM's kernels, `why` says why.
        layers: what each layer that a step reached runs on, with the reason, counted.
        plans: by which plan the layers of a batch of so many tokens run, and why; filled as batches come.
            Where a model has experts of several sizes it is that of the layer which came last;
            `plans_by_title` has those of each.
    """

    def __init__(
        self,
        pool: BufferPool,
        settings: Settings,
        device: torch.device,
        why_not: str | None = None,
    ) -> None:
        self.pool = pool
        self.kernels: ExpertKernels | None = None
        self.layers: Counter[str] = Counter()
        self.plans: dict[int, PlanChoice] = {}
        self.plans_by_title: dict[str, dict[int, PlanChoice]] = {}
        self._plans: PlansOfLayers | None = None
        self._seen: set[int] = set()
        self._ranges = nvtx_ranges(settings)
        wanted = settings.kernels
        if why_not is not None:
            self.why = why_not
        elif wanted == "vllm":
            self.why = "GRAPHCAP_KERNELS=vllm"
        elif wanted == "auto" and device.type != "cuda":
            self.why = f"vLLM's kernels are the faster ones on {device.type}"
        else:
            try:
                backend = choose_backend(wanted, device)
                self._plans = PlansOfLayers(backend, device, settings)
                self.kernels, self.why = self._plans.kernels, backend.why
            except BackendError as error:
                self.why = str(error)
                warn(logger, "moe-layers", "MoE layers stay on vLLM's kernels: %s", error)

    def choices(self) -> tuple[KernelChoice, ...]:
        """Which kernel each operation of a layer runs on, where that is graphcap's choice."""
        return () if self.kernels is None else self.kernels.choices()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """A step of graphcap's runs inside."""
        before = _state.serving
        _state.serving = self
        try:
            yield
        finally:
            _state.serving = before

    def note(self, layer: Any, what: str) -> None:
        """Count a layer under what it runs on, once."""
        if id(layer) not in self._seen:
            self._seen.add(id(layer))
            self.layers[what] += 1

    def run(self, runner: Any, hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The routed experts of `runner`'s layer: (M, H) -> (M, H), in memory of the caller's own.

        `slots` (M,) int64 is the cache slot of each row; -1 marks padding, which reaches no expert.

        The result is not the pool's: what a model we do not know keeps of it must stay intact.
        """
        routed = runner.routed_experts
        assert self._plans is not None
        rows, out = hidden.shape[0], torch.empty_like(hidden)

        def launch(kernels: ExpertKernels) -> None:
            experts = RoutedExperts(
                kernels,
                self.pool,
                runner.gate.weight,
                routed.w13_weight,
                routed.w2_weight,
                top_k=routed.top_k,
                renormalize=bool(routed.renormalize),
                ranges=self._ranges,
            )
            experts(hidden, slots[:rows], out)

        if not hidden.is_contiguous():
            launch(self._plans.kernels)
            return out
        plans = self._plans.of(routed)
        plans.run(rows, self.pool, launch)
        choice = self.plans[rows] = plans.choice(rows)
        self.plans_by_title.setdefault(plans.title, {})[rows] = choice
        return out


class PlansOfLayers:
    """The kernels of a backend, and its plans for the experts of each layer.

    Attributes:
        kernels: without a plan.

    Raises:
        BackendError: see `expert_kernels`.
    """

    def __init__(self, backend: Backend, device: torch.device, settings: Settings) -> None:
        self.kernels = expert_kernels(backend)
        self._backend = backend
        self._wanted = backend.name == "triton" and settings.schedule != "plain"
        self._device = device
        self._folder = settings.tune_cache
        self._made: dict[tuple[ExpertSizes, torch.dtype], ExpertPlans] = {}

    def of(self, routed: Any) -> ExpertPlans:
        """For the experts of `routed`, vLLM's module of their weights; on a rank of tensor parallelism,
        whose part of them is another size."""
        w2 = routed.w2_weight
        experts, width, inner = w2.shape
        sizes = ExpertSizes(width, experts, int(routed.top_k), inner)
        key = sizes, w2.dtype
        if key not in self._made:
            self._made[key] = ExpertPlans(
                self.kernels, self._fused(), *key, self._device, self._folder
            )
        return self._made[key]

    def _fused(self) -> FusedLayerKernels | None:
        """What plans need besides; None where nobody wants them, or it cannot be had, which is told once."""
        if not self._wanted:
            return None
        try:
            return decode_kernels(self._backend).fused
        except (
            Exception
        ) as error:  # kernels of whole layers use more of Triton than those of experts
            self._wanted = False
            why = f"{type(error).__name__}: {error}"
            if why not in _told:
                _told.add(why)
                warn(logger, "plan-failed", "experts run without plans: %s", why)
            return None


def not_shown(hybrid: bool, recorder: str, settings: Settings, device: torch.device) -> str | None:
    """Why the experts of an engine stay on vLLM's kernels though graphcap's can run them; None: they do not.

    On an H200 the tokens of Qwen3-Next on the tape were eager vLLM's with vLLM's kernels, all of them.
    With graphcap's they were not, when rows of such models were still taken for padding; since then
    that has not run there again (tests/gpu/test_vllm_engine.py). Whoever names the kernels gets them.
    """
    if hybrid and recorder == "tape" and device.type == "cuda" and settings.kernels == "auto":
        return "a model with a recurrent state is on the tape"
    return None


def serving_now() -> PooledExperts | None:
    """Whose step is running in this thread; None: vLLM's own."""
    return _state.serving


def obstacle(runner: Any) -> str | None:
    """Why the MoE layer of `runner` stays on vLLM's kernels; None: graphcap's can run it."""
    routed, gate = runner.routed_experts, runner.gate
    method = routed.quant_method
    config = runner.moe_config
    weight: Any = getattr(gate, "weight", None)
    w13: Any = getattr(routed, "w13_weight", None)
    w2: Any = getattr(routed, "w2_weight", None)
    checks = (
        (type(method).__name__ != "PooledMoEMethod", f"quantised ({type(method).__name__})"),
        (gate is None, "its router runs outside the layer"),
        (type(runner.router).__name__ != "FusedTopKRouter", f"{type(runner.router).__name__}"),
        (getattr(runner.router, "capture_fn", None) is not None, "its routing is returned"),
        (getattr(routed, "scoring_func", "softmax") != "softmax", "its scores are no softmax"),
        (_name(getattr(routed, "activation", None)) != "SILU", "its activation is not SiLU"),
        (bool(getattr(routed, "apply_router_weight_on_input", False)), "it weights its input"),
        (getattr(routed, "expert_map", None) is not None, "its experts are spread over ranks"),
        (bool(getattr(config, "has_bias", False)), "its experts have biases"),
        (getattr(routed, "swiglu_limit", None) is not None, "its SwiGLU is clamped"),
        (getattr(runner, "_fse_fuse_gate", False), "its shared expert is fused into the router"),
        (getattr(runner, "routed_input_transform", None) is not None, "it transforms its input"),
        (getattr(gate, "bias", None) is not None, "its router has a bias"),
        (_name(getattr(method, "unquantized_backend", None)) != "TRITON", "its weight layout"),
    )
    for stands, why in checks:
        if stands:
            return why
    if not (_is_plain(weight) and _is_plain(w13) and _is_plain(w2)):
        return "its weights are not contiguous"
    if weight.dtype != w13.dtype or w13.dtype not in (torch.bfloat16, torch.float16):
        return f"its dtypes ({weight.dtype}, {w13.dtype})"
    experts, inner2, width = w13.shape
    if weight.shape != (experts, width) or tuple(w2.shape) != (experts, width, inner2 // 2):
        return "its weight shapes"
    return None


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_contiguous()


def _name(value: Any) -> str | None:
    return getattr(value, "name", None)


def register() -> str:
    """Register the pooled MoE layer with vLLM. Returns what was done, for ``graphcap doctor``.

    Idempotent. A layer that somebody else has replaced already stays theirs.
    """
    from vllm.model_executor.custom_op import op_registry_oot

    names = ("MoERunner", "UnquantizedFusedMoEMethod")
    theirs = [
        name
        for name in names
        if name in op_registry_oot and not op_registry_oot[name].__module__.startswith("graphcap")
    ]
    if theirs:
        return f"{', '.join(theirs)} replaced by another plugin: MoE layers stay on its kernels"
    if names[0] not in op_registry_oot:
        from graphcap.hosts.vllm import experts_oot  # noqa: F401  # its import registers
    return "MoE layers registered"
