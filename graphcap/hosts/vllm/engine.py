"""EngineCapture: everything that graphcap holds for one model runner of vLLM.

Two managers share one pool and one recorder: *decode* (one new token for each sequence; a bucket is a
number of sequences) and, where mixed batches are recorded too, *mixed* (a bucket is a number of
tokens). The model runner decides when a phase of the capture happens; see `capture_v1`, `runner_v2`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from graphcap.buckets import BucketLadder
from graphcap.errors import StaleRecordingError, anchor_in
from graphcap.explain import warn
from graphcap.hosts.vllm.cache_places import cache_places, caches_of, watched_of
from graphcap.hosts.vllm.choice import Choice
from graphcap.hosts.vllm.common_plans import with_common_plans
from graphcap.hosts.vllm.experts import PooledExperts, not_shown
from graphcap.hosts.vllm.inputs import EngineInputs
from graphcap.hosts.vllm.ranks import (
    agreed,
    alone,
    common_recorder,
    leave_graph_buffers_alone,
    no_vote_on_error,
)
from graphcap.hosts.vllm.reporting import Reporter
from graphcap.manager import CaptureManager
from graphcap.pool import BufferPool
from graphcap.reachable import Watched
from graphcap.recorders.select import probe_capture
from graphcap.settings import Settings
from graphcap.written import Place

logger = logging.getLogger(__name__)

HIDDEN = "hidden_states"
"""Name of the step's only output: (rows, hidden size), the input of the language-model head."""

Forward = Callable[[], torch.Tensor]
"""The model's forward pass over the engine's buffers of one bucket."""

DECODE, MIXED = "decode", "mixed"


class EngineCapture:
    """See the module.

    Args:
        choice: what was decided for this engine.
        settings: the user's.
        vllm_config: the engine's.
        model: whose parameters and buffers the recordings point at.
        device: where the model runs.
        buckets: (kind, size) of what the engine will dispatch to, where that is not what was chosen:
            vLLM may settle on other sizes, or on none for mixed batches.

    Raises:
        BackendError: the recorder that was asked for cannot work here, or on another rank.
    """

    def __init__(
        self,
        choice: Choice,
        settings: Settings,
        vllm_config: Any,
        model: torch.nn.Module,
        device: torch.device,
        buckets: Iterable[tuple[str, int]],
    ) -> None:
        choice = _as_dispatched(choice, buckets)
        self.choice = choice
        self.settings = settings
        self.pool = BufferPool(device)
        self._recorder = common_recorder(settings.recorder, device)
        self._hybrid = bool(getattr(vllm_config.model_config, "is_hybrid", False))
        why_not = not_shown(self._hybrid, self._recorder.name, settings, device)
        plans = with_common_plans(settings, device)
        self.experts = PooledExperts(self.pool, plans, device, why_not)
        self.reporter = Reporter(choice, settings, vllm_config)
        self.failed: str | None = None
        self._watched_kinds: set[str] = set()
        self._pointers_checked = False
        self._model = model
        self._layers = vllm_config.compilation_config.static_forward_context
        self._cache_config = getattr(vllm_config, "cache_config", None)
        text = vllm_config.model_config.hf_text_config
        limits = (int(text.vocab_size), int(vllm_config.model_config.max_model_len))
        self.managers: dict[str, CaptureManager] = {}
        for kind, sizes in ((MIXED, choice.mixed_tokens), (DECODE, choice.decode)):
            if sizes:
                inputs = EngineInputs(sizes[-1], device, *limits)
                self.managers[kind] = CaptureManager(
                    model.forward,
                    inputs,
                    pool=self.pool,
                    ladder=BucketLadder(sizes, sizes[-1]),
                    settings=settings,
                    example=inputs.draw,
                    recorder=self._recorder,
                    watched=self._watched,
                    written=self._written,
                    agree=None if alone() else agreed,
                )

    # -- capture ---------------------------------------------------------------------------------

    def show(self, kind: str, slots: torch.Tensor | None, **buffers: Any) -> None:
        """Show the engine's buffers of a bucket; the largest bucket of a kind comes first."""
        inputs = self.managers[kind].inputs
        assert isinstance(inputs, EngineInputs)
        inputs.adopt(slot_mapping=slots, **buffers)

    def warm_up(self, kind: str, size: int, forward: Forward) -> None:
        self.managers[kind].warm_up(size, self._bound(forward))

    def freeze(self) -> None:
        for manager in self.managers.values():
            manager.freeze()

    def record(self, kind: str, size: int, forward: Forward) -> bool:
        """Record a bucket. Every rank must come here for the same bucket.

        Under tensor parallelism a bucket that fails on one rank ends recording on all of them: a graph
        whose all-reduce reads the buffers of the other ranks cannot be replayed against their eager
        step.
        """
        if self.failed is not None:
            return False
        manager = self.managers[kind]
        self._recorder.watched = kind not in self._watched_kinds
        with no_vote_on_error():
            made = manager.record(size, self._bound(forward))
        if made:
            self._watched_kinds.add(kind)
        if not agreed(made) and not alone():
            why = manager.failure_of(size) or "the recording failed on another rank"
            self.give_up(f"bucket {size} ({kind}): {why}")
            return False
        return made

    def give_up(self, why: str) -> None:
        """Drop every recording on this rank; from here on every step is vLLM's own."""
        self.failed = why
        leave_graph_buffers_alone()
        warn(
            logger,
            anchor_in(why, "nothing-recorded"),
            "graphcap records nothing in this engine, steps run eagerly: %s",
            why,
        )
        for manager in self.managers.values():
            for size in manager.ladder:
                manager.drop(size, "rank_failed", why)

    @property
    def verifies(self) -> bool:
        """Whether recordings are held against the eager step after they are made. A recurrent state
        (linear attention) would advance twice, so hybrid models are not."""
        return self.settings.verify != "off" and not self._hybrid and self.failed is None

    def verify(self, kind: str, size: int, forward: Forward) -> None:
        """Hold a bucket against its eager step. Every rank must come here for the same bucket: one that
        differs on one rank is given up on all."""
        self._check_pointers()
        manager = self.managers[kind]
        if manager.failure_of(size) is not None:
            return
        # Timed after the vote: replays of the ranks wait for each other, and a rank on which the bucket
        # has failed replays it no more.
        for phase in (
            partial(manager.verify, size, self._bound(forward)),
            partial(manager.time, size),
        ):
            with no_vote_on_error():
                phase()
            mine = manager.failure_of(size)
            if not agreed(mine is None):
                if mine is None:
                    manager.drop(size, "rank_failed", f"bucket {size}: it differed on another rank")
                return

    def _check_pointers(self) -> None:
        """Once, when all is recorded: a recording that points at freed memory on one rank ends recording
        on all of them. Every rank must come here."""
        if self._pointers_checked or self.failed is not None:
            return
        self._pointers_checked = True
        with no_vote_on_error():
            why = [
                f"bucket {size} ({kind}): {manager.failure_of(size)}"
                for kind, manager in self.managers.items()
                for size in manager.check_pointers()
            ]
        if not agreed(not why) and not alone():
            self.give_up(why[0] if why else "the check of pointers failed on another rank")

    def finish(self) -> None:
        self._check_pointers()
        reports = {kind: manager.finish() for kind, manager in self.managers.items()}
        notes = []
        if self._hybrid and self.settings.verify != "off":
            notes.append("not verified: a recurrent state would advance twice")
            if self.settings.verify_every:
                warn(
                    logger,
                    "verification",
                    "GRAPHCAP_VERIFY=%d checks no replay of this engine: %s",
                    self.settings.verify_every,
                    "its model has a recurrent state, which running a step twice would advance twice",
                )
        self.reporter.captured(self, reports, notes)

    # -- serving ---------------------------------------------------------------------------------

    def replay(self, kind: str, size: int, rows: int, forward: Forward) -> torch.Tensor | None:
        """The hidden states of a bucket, or None where the step has to run eagerly (counted).

        With ``GRAPHCAP_VERIFY=N`` every N-th replay is held against `forward`, but for hybrid models, whose
        recurrent state would advance twice. Where they differ, on any rank, the hidden states are those of
        `forward`, and the bucket serves no more.

        Raises:
            FallbackError, VerificationError: ``GRAPHCAP_STRICT=1``.
        """
        manager = self.managers.get(kind)
        if manager is None or not manager.serves(size):
            why = None if manager is None else manager.failure_of(size)
            reason = None if manager is None else manager.reason_of(size)
            cure = why or "see the report of the capture"
            self.fall_back(rows, reason or "not_recorded", cure, kind)
            return None
        eager = None if self._hybrid else self._bound(forward)
        try:
            outputs = manager.replay(size, rows, eager)
        except StaleRecordingError as error:
            self.fall_back(rows, "stale_recording", str(error), kind)
            return None
        if manager.serves(size):
            self.reporter.replayed(kind, size, rows)
        else:  # given up by this very step, which ran eagerly; the manager has counted it
            reason = manager.reason_of(size) or "verification"
            self.reporter.fell_back(reason, rows if kind == DECODE else None)
        return outputs[HIDDEN]

    def fall_back(self, rows: int, reason: str, remedy: str, kind: str = DECODE) -> None:
        """Count a step that vLLM is about to run its own way.

        Raises:
            FallbackError: ``GRAPHCAP_STRICT=1``.
        """
        self.managers[DECODE].fall_back(rows, reason, remedy)
        self.reporter.fell_back(reason, rows if kind == DECODE else None)

    def expect_change(self) -> None:
        """Weights have been or may have been touched: the next replay looks at all of them."""
        for manager in self.managers.values():
            manager.expect_change()

    def close(self) -> None:
        for manager in self.managers.values():
            manager.close()

    # -- inside ----------------------------------------------------------------------------------

    def _bound(self, forward: Forward) -> Callable[[], dict[str, torch.Tensor]]:
        def step() -> dict[str, torch.Tensor]:
            with self.experts.serving():
                return {HIDDEN: forward()}

        return step

    def _watched(self) -> Sequence[Watched]:
        return watched_of(self._model, self._layers)

    def _written(self, slots: Mapping[str, torch.Tensor]) -> list[Place]:
        return cache_places(
            [(name, cache) for name, _, _, cache in caches_of(self._layers)],
            slots,
            getattr(self._cache_config, "num_gpu_blocks", None),
            getattr(self._cache_config, "block_size", None),
        )


def _as_dispatched(choice: Choice, buckets: Iterable[tuple[str, int]]) -> Choice:
    sizes: dict[str, set[int]] = {DECODE: set(), MIXED: set()}
    for kind, size in buckets:
        sizes[kind].add(size)
    mixed = "eager" if choice.mixed == "full" and not sizes[MIXED] else choice.mixed
    return replace(
        choice,
        mixed=mixed,
        decode=tuple(sorted(sizes[DECODE])),
        mixed_tokens=tuple(sorted(sizes[MIXED])),
    )


def warn_of_eager_mixed_batches() -> None:
    """The attention backend cannot record what was to be recorded whole, which only vLLM finds out."""
    warn(
        logger,
        "mixed-eager",
        "mixed prefill-decode batches run eagerly: the attention backend turned out to record "
        "decode batches only; set compilation_config mode=3 to have vLLM compile them",
    )


def makes_graphs(choice: Choice | None, device: torch.device) -> bool:
    """Whether steps become graphs here, so that vLLM can estimate their memory with throw-away ones.

    Asked before a capture, never inside one.
    """
    asked_for_tape = choice is not None and choice.recorder == "tape"
    return not asked_for_tape and probe_capture(device).works


def row_slots(context: Any) -> torch.Tensor | None:
    """(rows,) int64: the cache slot of each row of a step, -1 for padding, from its forward context.

    That of any layer that attends: padding is the same for all. Others (a recurrent state, a ring) keep
    their own mapping, into which vLLM writes the -1 of padding and nothing else: there real rows of a
    hybrid model look like padding. None where no layer attends.
    """
    mapping, layers = context.slot_mapping, context.no_compile_layers
    if not isinstance(mapping, dict):
        return None
    return next(
        (
            slots
            for name, slots in mapping.items()
            if slots.dtype == torch.int64 and _attends(layers.get(name))
        ),
        None,
    )


def _attends(layer: Any) -> bool:
    """Whether vLLM computes cache slots for `layer`: it has an ``AttentionImpl``, as its base class says."""
    return getattr(layer, "impl", None) is not None
