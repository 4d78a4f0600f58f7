"""What the plugin does to vLLM's configuration: take an engine or leave it, and which graphs it wants.

Decided once, in front of vLLM's own checks, and kept as plain values under ``graphcap`` in
``VllmConfig.additional_config``: there it reaches every process of the engine, and vLLM's
``compute_hash`` includes it, so that a compile cache made without graphcap is not taken for one with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from graphcap import __version__
from graphcap.buckets import BucketLadder
from graphcap.settings import Settings

logger = logging.getLogger(__name__)

KEY = "graphcap"

MIXED_SIZES = (
    *(16, 32, 64, 96, 128, 192, 256, 384, 512, 768),
    *(1024, 1536, 2048, 3072, 4096, 6144, 8192),
)
"""Token counts for which mixed prefill-decode batches are recorded. At 512 tokens and more every expert
of a large MoE model is active, so a batch costs about the reading of all weights, and padding by up to
a half costs little; below, steps of at most a half."""

_MIXED_FULL = frozenset({"TRITON_ATTN"})
_MIXED_FULL_ON_HOPPER = frozenset({"FLASH_ATTN", ""})
"""Attention backends whose full graphs serve mixed batches; FlashAttention's does in version 3, which is
Hopper's, where it is also vLLM's default."""


@dataclass(frozen=True)
class Choice:
    """What the plugin decided for one engine.

    Attributes:
        taken: decode steps are graphcap's.
        why_not: where it is not taken, what stands in the way.
        mixed: how mixed prefill-decode batches run: ``full`` (graphcap records them as well),
            ``piecewise`` (vLLM's own compiled pieces), ``eager``.
        decode: sizes of the ladder, in sequences.
        mixed_tokens: sizes of the mixed ladder, in tokens; empty unless `mixed` is ``full``.
        chosen: what the plugin set, in vLLM's words.
        left_alone: what the user had set, and the plugin did not touch.
        recorder: ``cuda``, or ``tape``, which needs the model uncompiled.
        version: graphcap's, so that the compile hash follows it.
        kernels: what GRAPHCAP_KERNELS asks for: the traced model may depend on it.
    """

    taken: bool
    why_not: tuple[str, ...] = ()
    mixed: str = "eager"
    decode: tuple[int, ...] = ()
    mixed_tokens: tuple[int, ...] = ()
    chosen: tuple[str, ...] = ()
    left_alone: tuple[str, ...] = ()
    recorder: str = "cuda"
    version: str = __version__
    kernels: str = "auto"

    def to_plain(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def of(cls, vllm_config: Any) -> Choice | None:
        """The choice made for `vllm_config`; None where the plugin has not seen it."""
        extra = getattr(vllm_config, "additional_config", None)
        plain = extra.get(KEY) if isinstance(extra, Mapping) else None
        if plain is None:
            return None
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()
        }
        return cls(**fields)

    def text(self) -> str:
        if not self.taken:
            return "graphcap leaves this engine to vLLM: " + "; ".join(self.why_not)
        parts = [f"decode buckets {_short(self.decode)}", f"mixed batches: {self.mixed}"]
        if self.chosen:
            parts.append("set " + ", ".join(self.chosen))
        if self.left_alone:
            parts.append("left as the user set it: " + ", ".join(self.left_alone))
        return "graphcap takes the decode step: " + "; ".join(parts)


def obstacles(config: Any) -> list[str]:
    """Features of an engine for which graphcap leaves all of it to vLLM, by their names."""
    parallel, model = config.parallel_config, config.model_config
    found = []
    for present, name in (
        (model is None, "an engine without a model"),
        (config.speculative_config is not None, "speculative decoding"),
        (config.lora_config is not None, "LoRA adapters"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism"),
        (parallel.data_parallel_size > 1, "data parallelism"),
        (getattr(parallel, "enable_expert_parallel", False), "expert parallelism"),
        (getattr(parallel, "enable_eplb", False), "expert load balancing (EPLB)"),
        (getattr(parallel, "enable_dbo", False), "dual batch overlap (DBO)"),
        (getattr(parallel, "decode_context_parallel_size", 1) > 1, "context parallelism (DCP)"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "context parallelism (PCP)"),
        (getattr(config, "kv_transfer_config", None) is not None, "a KV transfer connector"),
        (_offloads(config), "weight offloading"),
    ):
        if present:
            found.append(name)
    if model is not None:
        for present, name in (
            (getattr(model, "is_encoder_decoder", False), "an encoder-decoder model"),
            (getattr(model, "runner_type", "generate") != "generate", "a pooling model"),
            (model.enforce_eager, "--enforce-eager (no graphs were asked for)"),
        ):
            if present:
                found.append(name)
    return found


def decide(config: Any, settings: Settings, *, device: str, hopper: bool) -> Choice:
    """Decide for a `VllmConfig` whose own checks have not run yet. Changes nothing.

    Args:
        device: vLLM's platform, ``cuda`` or ``cpu``.
        hopper: the device is of compute capability 9.
    """
    why_not = obstacles(config)
    if device not in ("cuda", "cpu"):
        why_not.append(f"the platform {device}")
    compilation = config.compilation_config
    left = _user_set(compilation)
    mode = _name(compilation.cudagraph_mode)
    compiles = _name(compilation.mode) not in (None, "NONE")
    recorder = "tape" if device == "cpu" or settings.recorder == "tape" else "cuda"
    if recorder == "tape" and compiles:
        why_not.append(f"mode={_name(compilation.mode)} was set: a tape cannot hold compiled code")
    if mode in ("NONE", "PIECEWISE"):
        why_not.append(f"cudagraph_mode={mode} was set: no whole step is to be captured")
    if _name(getattr(config, "optimization_level", None)) == "O0" and mode is None:
        why_not.append("optimization level 0 (no graphs were asked for)")
    if not isinstance(getattr(config, "additional_config", {}), dict):
        why_not.append("additional_config is not a dictionary, the plugin cannot travel in it")
    if why_not:
        return Choice(False, tuple(why_not), left_alone=left, kernels=settings.kernels)

    scheduler = config.scheduler_config
    most = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    given = compilation.cudagraph_capture_sizes
    if given:
        decode = tuple(sorted({size for size in given if size <= most}))
    else:
        most = min(most, compilation.max_cudagraph_capture_size or most)
        decode = tuple(BucketLadder.parse(settings.buckets, most))
    if device == "cpu":
        chosen = ("no torch.compile (mode=0)",) if compilation.mode is None else ()
        return Choice(
            *(True, (), "eager", decode, (), chosen, left, recorder), kernels=settings.kernels
        )

    mixed, tokens = _mixed(config, mode, hopper, compiles or recorder == "tape")
    picked = []
    if (mixed == "full" or recorder == "tape") and compilation.mode is None:
        picked.append("no torch.compile (mode=0)")
    if mixed == "full" and mode is None:
        picked.append("cudagraph_mode=FULL")
    if not given:
        picked.append("cudagraph_capture_sizes")
    return Choice(
        *(True, (), mixed, decode, tokens, tuple(picked), left, recorder),
        kernels=settings.kernels,
    )


def _mixed(
    config: Any, mode: str | None, hopper: bool, compiles: bool
) -> tuple[str, tuple[int, ...]]:
    """How mixed batches run, and for which token counts they are recorded."""
    if mode == "FULL_DECODE_ONLY":
        return ("piecewise" if compiles else "eager"), ()
    if compiles or not _mixed_full(config, hopper):
        return "piecewise", ()
    given = config.compilation_config.cudagraph_capture_sizes
    if given:
        return "full", tuple(sorted(given))
    scheduler = config.scheduler_config
    possible = scheduler.max_num_seqs * config.model_config.max_model_len
    limit = min(scheduler.max_num_batched_tokens, possible, MIXED_SIZES[-1])
    return "full", tuple(sorted({*(s for s in MIXED_SIZES if s < limit), limit}))


def apply_before(config: Any, choice: Choice) -> None:
    """Write `choice` into a `VllmConfig`, in front of vLLM's own checks."""
    config.additional_config = {**config.additional_config, KEY: choice.to_plain()}
    if not choice.taken:
        return
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = config.compilation_config
    uncompiled = choice.mixed == "full" or choice.recorder == "tape"
    if uncompiled and compilation.mode is None:
        compilation.mode = CompilationMode.NONE
    if choice.mixed == "full" and compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = CUDAGraphMode.FULL
    if compilation.cudagraph_capture_sizes is None and choice.recorder == "cuda":
        sizes = {*choice.decode, *choice.mixed_tokens}
        if choice.mixed == "piecewise":
            # vLLM's own sizes above the decode ladder: its pieces serve mixed batches with them.
            scheduler = config.scheduler_config
            most = min(2 * scheduler.max_num_seqs, 512, scheduler.max_num_batched_tokens)
            limit = compilation.max_cudagraph_capture_size or most
            sizes |= {size for size in BucketLadder.up_to(limit) if size > choice.decode[-1]}
        compilation.cudagraph_capture_sizes = sorted(sizes)
        compilation.max_cudagraph_capture_size = max(sizes)


def apply_after_on_cpu(config: Any, choice: Choice) -> None:
    """On the CPU platform vLLM's checks turn graphs off; the padding and the dispatching that go with
    full decode graphs are what the tape needs, so they are turned on again."""
    from vllm.config import CUDAGraphMode

    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    compilation.cudagraph_capture_sizes = list(choice.decode)
    compilation.max_cudagraph_capture_size = choice.decode[-1]


def _mixed_full(config: Any, hopper: bool) -> bool:
    model = config.model_config
    if getattr(model, "is_hybrid", False) or getattr(model, "use_mla", False):
        return False  # linear attention and MLA record decode batches only
    if getattr(model, "is_multimodal_model", False):
        return False  # embeddings of images are made outside the step
    name = _name(getattr(config.attention_config, "backend", None)) or ""
    return name in _MIXED_FULL or (hopper and name in _MIXED_FULL_ON_HOPPER)


def _user_set(compilation: Any) -> tuple[str, ...]:
    found = []
    for field in (
        "mode",
        "cudagraph_mode",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
    ):
        value = getattr(compilation, field, None)
        if value is not None:
            found.append(f"{field}={_name(value) or value}")
    return tuple(found)


def _name(value: Any) -> str | None:
    return getattr(value, "name", None)


def _offloads(config: Any) -> bool:
    offload = getattr(config, "offload_config", None)
    if offload is not None:
        uva = getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0) or 0
        group = getattr(getattr(offload, "prefetch", None), "offload_group_size", 0) or 0
        return bool(uva or group)
    return bool(getattr(config.cache_config, "cpu_offload_gb", 0))


def _short(sizes: tuple[int, ...]) -> str:
    if len(sizes) <= 6:
        return ", ".join(map(str, sizes))
    return f"{', '.join(map(str, sizes[:4]))} … {sizes[-1]} ({len(sizes)})"
