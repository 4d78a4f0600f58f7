"""Which vLLM versions the plugin is made for, and whether their hooks are where it expects them.

Looks at signatures, not at version numbers alone: a vendor's build of a version inside the window may
lack a function, and a patch around something that is not there would fail in the middle of a start.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

OLDEST = (0, 26)
NEWEST = (0, 33)
"""The window of the V1 engine: every minor version from `OLDEST` to `NEWEST`. Tested: 0.26.0 on a GPU, the
code of 0.26.0 and 0.33.0, 0.32.0 on a CPU."""

V0 = (0, 6, 3)
"""The window of the V0 engine: this version, its post releases and vendors' builds of them. Tested: the
code of 0.6.3.post1 on a CPU."""


def window() -> str:
    """Both windows, in words."""
    return f"{'.'.join(map(str, V0))} and {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def generation(version: str) -> str | None:
    """The engine, ``V0`` or ``V1``, that the plugin meets in `version` (such as ``0.6.3.post1``,
    ``0.6.3+corex.3.2.3`` or ``0.32.0+cpu``); None: it is not made for that version."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None:
        return None
    major, minor, patch = int(found[1]), int(found[2]), int(found[3] or 0)
    if (major, minor, patch) == V0:
        return "V0"
    return "V1" if OLDEST <= (major, minor) <= NEWEST else None


def in_window(version: str) -> bool:
    """Whether `version` is one the plugin is made for."""
    return generation(version) is not None


@dataclass(frozen=True)
class Hook:
    """A function of vLLM that the plugin wraps or a class that it replaces.

    Attributes:
        module, path: where it is, such as ``CudagraphDispatcher.dispatch``.
        parameters: names that its signature must have (in any order; more are fine).
        needed_for: ``all``, ``v0``, ``v1``, ``v2``, ``experts`` or ``cpu``: what is off without it.
    """

    module: str
    path: str
    parameters: tuple[str, ...]
    needed_for: str

    def fault(self) -> str | None:
        """What is wrong with it here; None: it is as expected."""
        try:
            found: Any = import_module(self.module)
        except Exception as error:  # of any kind: it runs other people's code
            return f"{self.module} cannot be imported: {error}"
        try:
            for part in self.path.split("."):
                found = inspect.getattr_static(found, part)
        except AttributeError:
            return f"{self.module} has no {self.path}"
        function = getattr(found, "__wrapped__", found)
        if not callable(function):
            return f"{self.module}.{self.path} is not a function"
        have = inspect.signature(function).parameters
        missing = [name for name in self.parameters if name not in have]
        if missing:
            return (
                f"{self.module}.{self.path} has no parameter {', '.join(missing)} "
                f"(found {', '.join(have)})"
            )
        return None


_V1 = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu.cudagraph_utils"
_MOE = "vllm.model_executor.layers.fused_moe"

HOOKS: tuple[Hook, ...] = (
    Hook("vllm.config", "VllmConfig.__post_init__", ("self",), "all"),
    Hook("vllm.forward_context", "get_forward_context", (), "all"),
    Hook("vllm.v1.worker.worker_base", "WorkerWrapperBase.__getattr__", ("attr",), "all"),
    Hook(
        _V1,
        "GPUModelRunner._dummy_run",
        ("num_tokens", "cudagraph_runtime_mode", "force_attention", "uniform_decode"),
        "v1",
    ),
    Hook(_V1, "GPUModelRunner._warmup_and_capture", ("desc", "profile_seq_lens"), "v1"),
    Hook(_V1, "GPUModelRunner.load_model", ("self",), "v1"),
    Hook(_V1, "GPUModelRunner._dummy_sampler_run", ("hidden_states",), "v1"),
    Hook(_V1, "GPUModelRunner.capture_model", ("self",), "v1"),
    Hook(
        _V1,
        "GPUModelRunner._capture_cudagraphs",
        ("batch_descriptors", "cudagraph_runtime_mode"),
        "v1",
    ),
    Hook(_V1, "GPUModelRunner.reload_weights", ("self",), "v1"),
    Hook(_V1, "GPUModelRunner.shutdown", ("self",), "v1"),
    Hook(
        "vllm.v1.cudagraph_dispatcher",
        "CudagraphDispatcher.initialize_cudagraph_keys",
        ("cudagraph_mode",),
        "v1",
    ),
    Hook(
        "vllm.v1.cudagraph_dispatcher",
        "CudagraphDispatcher._create_padded_batch_descriptor",
        ("num_tokens", "uniform_decode", "has_lora", "num_active_loras"),
        "v1",
    ),
    Hook(
        "vllm.compilation.cuda_graph",
        "CUDAGraphWrapper.__init__",
        ("runnable", "vllm_config", "runtime_mode"),
        "v1",
    ),
    Hook(_V2, "CudaGraphManager._init_candidates", ("self",), "v2"),
    Hook(_V2, "CudaGraphManager.capture", ("create_forward_fn",), "v2"),
    Hook(_V2, "CudaGraphManager.run_fullgraph", ("desc",), "v2"),
    Hook(_V2, "CudaGraphManager.dispatch", ("num_reqs", "num_tokens"), "v2"),
    Hook(_V2, "ModelCudaGraphManager.__init__", ("vllm_config", "device"), "v2"),
    Hook(_V2, "ModelCudaGraphManager.capture", ("model", "model_state", "input_buffers"), "v2"),
    Hook("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.load_model", ("self",), "v2"),
    Hook("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.capture_model", ("self",), "v2"),
    Hook("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.reload_weights", ("self",), "v2"),
    Hook("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.shutdown", ("self",), "v2"),
    Hook(f"{_MOE}.runner.moe_runner", "MoERunner._forward_impl", ("hidden_states",), "experts"),
    Hook(f"{_MOE}.runner.moe_runner", "MoERunner.__init__", ("router", "gate"), "experts"),
    Hook(
        f"{_MOE}.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod.apply_monolithic",
        ("layer", "x", "router_logits"),
        "experts",
    ),
    Hook("vllm.model_executor.custom_op", "CustomOp.register_oot", (), "experts"),
)

CPU_HOOKS: tuple[Hook, ...] = (
    Hook("vllm.v1.worker.cpu_worker", "CPUWorker.compile_or_warm_up_model", ("self",), "cpu"),
    Hook("vllm.v1.worker.cpu_model_runner", "CPUModelRunner.load_model", ("self",), "cpu"),
    Hook(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionMetadataBuilder.build",
        ("common_attn_metadata",),
        "cpu",
    ),
)

_V0 = "vllm.worker.model_runner"
_FUSED = f"{_MOE}.fused_moe"

V0_HOOKS: tuple[Hook, ...] = (
    Hook("vllm.forward_context", "set_forward_context", ("context",), "all"),
    Hook(_V0, "GPUModelRunnerBase.capture_model", ("kv_caches",), "v0"),
    Hook(_V0, "GPUModelRunnerBase.get_max_block_per_batch", ("self",), "v0"),
    Hook(_V0, "ModelRunner.execute_model", ("model_input", "kv_caches"), "v0"),
    Hook(_V0, "CUDAGraphRunner.forward", ("input_ids", "positions", "attn_metadata"), "v0"),
    Hook(_V0, "ModelInputForGPUBuilder._get_cuda_graph_pad_size", ("self", "num_seqs"), "v0"),
    Hook("vllm.worker.worker", "Worker._warm_up_model", ("self",), "v0"),
    Hook(
        "vllm.attention.backends.utils",
        "CommonAttentionState.graph_capture_get_metadata_for_batch",
        ("batch_size",),
        "v0",
    ),
    Hook(
        "vllm.attention.backends.utils",
        "CommonAttentionState.graph_capture",
        ("max_batch_size",),
        "v0",
    ),
    Hook(
        _FUSED,
        "fused_experts",
        ("hidden_states", "w1", "w2", "topk_weights", "topk_ids", "inplace"),
        "experts",
    ),
    Hook(_FUSED, "invoke_fused_moe_kernel", ("A", "B", "C"), "experts"),
    Hook(
        "vllm._custom_ops",
        "topk_softmax",
        ("topk_weights", "topk_ids", "token_expert_indicies", "gating_output"),
        "experts",
    ),
)


def faults(hooks: Sequence[Hook] = HOOKS) -> dict[str, list[str]]:
    """What needs it -> what is wrong, for every hook that is not as expected."""
    found: dict[str, list[str]] = {}
    for hook in hooks:
        fault = hook.fault()
        if fault is not None and fault not in found.setdefault(hook.needed_for, []):
            found[hook.needed_for].append(fault)
    return {part: texts for part, texts in found.items() if texts}
