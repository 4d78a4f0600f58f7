"""What the plugin does to vLLM's configuration: take an engine or leave it, and which graphs it wants.

Decided once, in front of vLLM's own checks, and kept as plain values under ``graphcap`` in
``VllmConfig.additional_config``: there it reaches every process of the engine, and vLLM's
``compute_hash`` includes it, so that a compile cache made without graphcap is not taken for one with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphcap.buckets import BucketLadder
from graphcap.hosts.vllm import norms_cpu
from graphcap.hosts.vllm.choice import KEY, Choice
from graphcap.hosts.vllm.obstacles import ENFORCE_EAGER, obstacles
from graphcap.settings import Settings

MIXED_SIZES = (
    *(16, 32, 64, 96, 128, 192, 256, 384, 512, 768),
    *(1024, 1536, 2048, 3072, 4096, 6144, 8192),
)
"""Token counts for which mixed prefill-decode batches are recorded. At 512 tokens and more every expert
of a large MoE model is active, so a batch costs about the reading of all weights, and padding by up to
a half costs little; below, steps of at most a half."""

CPU_MIXED_SIZES = (8, 16, 24, 32, 48, 64, 96, 128)
"""The same on a CPU, where padding costs what it weighs. Above, a batch is mostly arithmetic and runs
eagerly."""

TURNED_OFF = "enforce_eager=False (which would turn off the padding of batches as well)"

_MIXED_FULL = frozenset({"TRITON_ATTN"})
_MIXED_FULL_ON_HOPPER = frozenset({"FLASH_ATTN", ""})
"""Attention backends whose full graphs serve mixed batches; FlashAttention's does in version 3, which is
Hopper's, where it is also vLLM's default."""


def decide(config: Any, settings: Settings, *, device: str, hopper: bool) -> Choice:
    """Decide for a `VllmConfig` whose own checks have not run yet. Changes nothing.

    Args:
        device: vLLM's platform, ``cuda`` or ``cpu``.
        hopper: the device is of compute capability 9.
    """
    why_not = obstacles(config)
    eager = ENFORCE_EAGER in why_not and settings.recorder == "tape"
    if eager:  # whoever asks for the tape wants no graphs, and replays all the same
        why_not.remove(ENFORCE_EAGER)
    if device not in ("cuda", "cpu"):
        why_not.append(f"the platform {device or 'that vLLM found (none)'}")
    if device == "cpu" and settings.recorder == "cuda":
        why_not.append("GRAPHCAP_RECORDER=cuda was set, and a CPU has no graphs")
    compilation = config.compilation_config
    left = _user_set(compilation)
    mode = _name(compilation.cudagraph_mode)
    compiles = _name(compilation.mode) not in (None, "NONE")
    recorder = "tape" if device == "cpu" or settings.recorder == "tape" else "cuda"
    if recorder == "tape" and compiles:
        why_not.append(f"mode={_name(compilation.mode)} was set: a tape cannot hold compiled code")
    if mode in ("NONE", "PIECEWISE"):
        why_not.append(f"cudagraph_mode={mode} was set: no whole step is to be captured")
    uncompiled = recorder == "tape" or _name(compilation.mode) == "NONE"
    if device == "cuda" and mode == "FULL_AND_PIECEWISE" and uncompiled:
        why_not.append(f"cudagraph_mode={mode} was set, which needs a compiled model")
    if _name(getattr(config, "optimization_level", None)) == "O0" and mode is None:
        why_not.append("optimization level 0 (no graphs were asked for)")
    if not isinstance(getattr(config, "additional_config", {}), dict):
        why_not.append("additional_config is not a dictionary, the plugin cannot travel in it")
    if why_not:
        return Choice(False, tuple(why_not), left_alone=left, kernels=settings.kernels)

    mixed, tokens = _mixed(config, mode, hopper, compiles, recorder)
    if device == "cuda" and mode == "FULL" and mixed != "full":
        why_not.append(
            "cudagraph_mode=FULL was set for mixed batches as well, which graphcap does not record "
            "here; FULL_AND_PIECEWISE or FULL_DECODE_ONLY leaves them out"
        )
    scheduler = config.scheduler_config
    most = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    given = compilation.cudagraph_capture_sizes
    if given:
        decode = tuple(sorted({size for size in given if size <= most}))
        if not decode:
            why_not.append(f"cudagraph_capture_sizes={given} has no size up to {most} sequences")
    else:
        most = min(most, compilation.max_cudagraph_capture_size or most)
        decode = tuple(BucketLadder.parse(settings.buckets, most))
    if why_not:
        return Choice(False, tuple(why_not), left_alone=left, kernels=settings.kernels)

    if device == "cpu":
        chosen: tuple[str, ...] = (TURNED_OFF,) if eager else ()
        if compilation.mode is None:
            chosen += ("no torch.compile (mode=0)",)
        if norms_cpu.undecided(config) and not eager:  # there the tokens are to be eager's
            chosen += (norms_cpu.CHOSEN,)
        left += norms_cpu.user_set(config)
        mixed, tokens = _mixed_on_cpu(config, mode)
        return Choice(
            *(True, (), mixed, decode, tokens, chosen, left, recorder), kernels=settings.kernels
        )

    picked = [TURNED_OFF] if eager else []
    if (mixed == "full" or recorder == "tape") and compilation.mode is None:
        picked.append("no torch.compile (mode=0)")
    if mixed == "full" and mode is None:
        picked.append("cudagraph_mode=FULL")
    if recorder == "tape" and mode is None:
        picked.append("cudagraph_mode=FULL_DECODE_ONLY")
    if not given:
        picked.append("cudagraph_capture_sizes")
    return Choice(
        *(True, (), mixed, decode, tokens, tuple(picked), left, recorder),
        kernels=settings.kernels,
    )


def _mixed(
    config: Any, mode: str | None, hopper: bool, compiles: bool, recorder: str
) -> tuple[str, tuple[int, ...]]:
    """How mixed batches run, and for which token counts they are recorded."""
    if mode == "FULL_DECODE_ONLY" or recorder == "tape":
        return ("piecewise" if compiles else "eager"), ()
    if compiles or mode == "FULL_AND_PIECEWISE" or not _mixed_full(config, hopper):
        return "piecewise", ()
    return "full", _token_counts(config, MIXED_SIZES)


def _mixed_on_cpu(config: Any, mode: str | None) -> tuple[str, tuple[int, ...]]:
    """The same for the tape of a CPU. It calls attention live, so that one recording serves every mixture
    of prefill and decode of as many tokens."""
    if mode == "FULL_DECODE_ONLY" or not _may_be_mixed(config.model_config):
        return "eager", ()
    return "full", _token_counts(config, CPU_MIXED_SIZES)


def _token_counts(config: Any, sizes: tuple[int, ...]) -> tuple[int, ...]:
    compilation, scheduler = config.compilation_config, config.scheduler_config
    given = compilation.cudagraph_capture_sizes
    if given:
        return tuple(sorted({s for s in given if s <= scheduler.max_num_batched_tokens}))
    possible = scheduler.max_num_seqs * config.model_config.max_model_len
    largest = compilation.max_cudagraph_capture_size or sizes[-1]
    limit = min(scheduler.max_num_batched_tokens, possible, largest, sizes[-1])
    return tuple(sorted({*(s for s in sizes if s < limit), limit}))


def apply_before(config: Any, choice: Choice) -> None:
    """Write `choice` into a `VllmConfig`, in front of vLLM's own checks."""
    _keep(config, choice)
    if not choice.taken:
        return
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = config.compilation_config
    if TURNED_OFF in choice.chosen:
        config.model_config.enforce_eager = False
    uncompiled = choice.mixed == "full" or choice.recorder == "tape"
    if uncompiled and compilation.mode is None:
        compilation.mode = CompilationMode.NONE
    if choice.mixed == "full" and compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = CUDAGraphMode.FULL
    if norms_cpu.CHOSEN in choice.chosen:
        norms_cpu.choose(config)
    if "cudagraph_mode=FULL_DECODE_ONLY" in choice.chosen:
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    if "cudagraph_capture_sizes" in choice.chosen:
        sizes = {*choice.decode, *choice.mixed_tokens}
        if choice.mixed == "piecewise":
            # vLLM's own sizes above the decode ladder: its pieces serve mixed batches with them.
            scheduler = config.scheduler_config
            most = min(2 * scheduler.max_num_seqs, 512, scheduler.max_num_batched_tokens)
            limit = compilation.max_cudagraph_capture_size or most
            sizes |= {size for size in BucketLadder.up_to(limit) if size > choice.decode[-1]}
        compilation.cudagraph_capture_sizes = sorted(sizes)
        compilation.max_cudagraph_capture_size = max(sizes)


def withdraw(config: Any, choice: Choice, why_not: str) -> Choice:
    """Leave an engine to vLLM after all: its own checks came to something that graphcap cannot take."""
    left = replace(choice, taken=False, why_not=(why_not,), chosen=())
    _keep(config, left)
    return left


def _keep(config: Any, choice: Choice) -> None:
    if isinstance(config.additional_config, dict):
        config.additional_config = {**config.additional_config, KEY: choice.to_plain()}


def apply_after_on_cpu(config: Any, choice: Choice) -> None:
    """On the CPU platform vLLM's checks turn graphs off; the padding and the dispatching that go with
    full decode graphs are what the tape needs, so they are turned on again."""
    from vllm.config import CUDAGraphMode

    compilation = config.compilation_config
    full = choice.mixed == "full"
    sizes = sorted({*choice.decode, *choice.mixed_tokens})
    compilation.cudagraph_mode = CUDAGraphMode.FULL if full else CUDAGraphMode.FULL_DECODE_ONLY
    compilation.cudagraph_capture_sizes = sizes
    compilation.max_cudagraph_capture_size = sizes[-1]


def _mixed_full(config: Any, hopper: bool) -> bool:
    if not _may_be_mixed(config.model_config):
        return False
    name = _name(getattr(config.attention_config, "backend", None)) or ""
    return name in _MIXED_FULL or (hopper and name in _MIXED_FULL_ON_HOPPER)


def _may_be_mixed(model: Any) -> bool:
    if getattr(model, "is_hybrid", False) or getattr(model, "use_mla", False):
        return False  # linear attention and MLA record decode batches only
    return not getattr(model, "is_multimodal_model", False)  # images are embedded outside the step


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
