"""DecodeEngine: everything that graphcap holds for one model runner of vLLM 0.6.3.

It stands where vLLM has a `CUDAGraphRunner` for each batch size: one for all of them, called with the
batch as it is. The manager pads it, so that vLLM prepares no padding.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group, graph_capture
from vllm.forward_context import set_forward_context

from graphcap.buckets import BucketLadder
from graphcap.errors import BackendError, InputError, StaleRecordingError, anchor_in
from graphcap.explain import warn
from graphcap.hosts.vllm.choice import Choice
from graphcap.hosts.vllm.engine import DECODE, HIDDEN
from graphcap.hosts.vllm.ranks import agreed, common_recorder, no_vote_on_error
from graphcap.hosts.vllm.reporting import Reporter
from graphcap.hosts.vllm.v0.choice import GRAPH_INPUTS
from graphcap.hosts.vllm.v0.experts import FusedExperts, serve
from graphcap.hosts.vllm.v0.inputs import batch_of, decode_inputs, example
from graphcap.manager import CaptureManager
from graphcap.pool import BufferPool
from graphcap.reachable import Watched, module_tensors, watch
from graphcap.recorders.base import garbage_collection_held
from graphcap.settings import Settings

logger = logging.getLogger(__name__)


class DecodeEngine:
    """See the module.

    Args:
        choice: what was decided for this engine.
        settings: the user's.
        runner: vLLM's model runner, whose model is loaded.
        kv_caches: a tensor for each layer, which the engine keeps.

    Raises:
        BackendError: the recorder cannot work here or on another rank, or the attention backend keeps the
            inputs of its graphs where they are not expected.
    """

    def __init__(
        self, choice: Choice, settings: Settings, runner: Any, kv_caches: list[torch.Tensor]
    ) -> None:
        device = torch.device(runner.device)
        most = choice.decode[-1]
        self.choice = choice
        self.settings = settings
        self.failed: str | None = None
        self.pool = BufferPool(device)
        self.experts = FusedExperts(self.pool, settings, device, most)
        self._model = runner.model
        self._caches = kv_caches
        self._longest = int(runner.max_seq_len_to_capture)
        self._several_ranks = runner.parallel_config.tensor_parallel_size > 1
        self._recorder = common_recorder(settings.recorder, device)
        blocks = runner.get_max_block_per_batch()
        self._inputs = decode_inputs(most, blocks, device)
        self._metadata = self._graph_metadata(runner, most)
        rank = get_tp_group().rank_in_group if self._several_ranks else 0
        self.reporter = Reporter(
            replace(choice, recorder=self._recorder.name),
            settings,
            SimpleNamespace(parallel_config=SimpleNamespace(rank=rank)),
        )
        self.manager = CaptureManager(
            self._step,
            self._inputs,
            pool=self.pool,
            ladder=BucketLadder(choice.decode, most),
            settings=settings,
            example=example(
                runner.vocab_size,
                int(runner.cache_config.num_gpu_blocks or 1),
                int(runner.block_size),
                blocks,
            ),
            recorder=self._recorder,
            watched=self._watched,
        )

    @property
    def most(self) -> int:
        """Sequences of the largest bucket."""
        return self.manager.ladder.max_batch

    # -- capture ---------------------------------------------------------------------------------

    @torch.inference_mode()
    @garbage_collection_held()
    def capture(self) -> None:
        """Warm up every bucket, freeze the pool, record from the largest down, verify, serve.

        Every rank does the same at the same time. Under tensor parallelism a bucket that fails on one
        rank ends recording on all of them: a graph whose all-reduce reads the buffers of the other
        ranks cannot be replayed against their eager step.
        """
        sizes = sorted(self.manager.ladder, reverse=True)
        serve(self.experts)
        try:
            with self._graphs_of_vllm():
                for size in sizes:
                    self.manager.warm_up(size)
                self.manager.freeze()
                for size in sizes:
                    if self.failed is None:
                        self._record(size)
            if self.settings.verify != "off":
                for size in sizes:
                    if self.failed is None:
                        self._verify(size)
            self.reporter.captured(self, {DECODE: self.manager.finish()}, ())
        except BaseException:
            self.manager.close()
            raise

    def _record(self, size: int) -> None:
        with no_vote_on_error():
            made = self.manager.record(size)
        self._recorder.watched = self._recorder.watched and not made  # one watched graph is enough
        self._hear_others(size, made)

    def _verify(self, size: int) -> None:
        if not self._is_recorded(size):
            return
        # Timed after the vote: replays of the ranks wait for each other, and a rank on which the bucket
        # has failed replays it no more.
        for phase in (self.manager.verify, self.manager.time):
            with no_vote_on_error(), set_forward_context(self._metadata[size]):
                phase(size)
            self._hear_others(size, self._is_recorded(size))
            if self.failed is not None or not self._is_recorded(size):
                return

    def _hear_others(self, size: int, mine: bool) -> None:
        if self._several_ranks and not agreed(mine):
            why = self.manager.failure_of(size) or "it failed on another rank"
            self._give_up(f"bucket {size}: {why}")

    def _is_recorded(self, size: int) -> bool:
        return self.manager.failure_of(size) is None

    def _give_up(self, why: str) -> None:
        """Drop every recording on this rank; from here on every step is vLLM's own."""
        self.failed = why
        custom = getattr(get_tp_group(), "ca_comm", None)
        if custom is not None:
            # At the end of its capture context vLLM pairs the ranks' graph buffers by index, and after
            # a failure on one rank their numbers differ.
            custom.register_graph_buffers = lambda: None
        warn(
            logger,
            anchor_in(why, "nothing-recorded"),
            "graphcap records nothing in this engine, steps run eagerly: %s",
            why,
        )
        for size in self.manager.ladder:
            self.manager.drop(size, "rank_failed", why)

    def _graphs_of_vllm(self) -> AbstractContextManager[Any]:
        """vLLM's all-reduce works differently inside a CUDA graph; on a tape it is called live."""
        if self._recorder.name != "cuda":
            return nullcontext()
        capture: AbstractContextManager[Any] = graph_capture()
        return capture

    def _graph_metadata(self, runner: Any, most: int) -> list[Any]:
        """Attention metadata over our slots, by number of rows, as vLLM makes it for its own graphs:
        lengths are read on the device, and the largest one that a kernel may meet is fixed."""
        state = runner.attn_state
        with state.graph_capture(runner.max_batchsize_to_capture):
            missing = [name for name in GRAPH_INPUTS if not hasattr(state, name)]
            if missing:
                raise BackendError(
                    f"the attention state {type(state).__name__} has no {', '.join(missing)}, where "
                    f"vLLM 0.6.3 keeps the inputs of its graphs; unset GRAPHCAP for this engine"
                )
            for name, slot in zip(
                GRAPH_INPUTS, ("slot_mapping", "seq_lens", "block_tables"), strict=True
            ):
                setattr(state, name, self._inputs[slot])
            return [
                None,
                *(state.graph_capture_get_metadata_for_batch(n) for n in range(1, most + 1)),
            ]

    # -- the step --------------------------------------------------------------------------------

    def _step(self, inputs: Any) -> dict[str, torch.Tensor]:
        metadata = self._metadata[inputs["input_ids"].shape[0]]
        with set_forward_context(metadata), self.experts.in_step(inputs["slot_mapping"]):
            hidden = self._model(
                input_ids=inputs["input_ids"],
                positions=inputs["positions"],
                kv_caches=self._caches,
                attn_metadata=metadata,
                intermediate_tensors=None,
            )
        return {HIDDEN: hidden}

    def _watched(self) -> Sequence[Watched]:
        return [
            *module_tensors(self._model),
            *(
                watch(f"the cache of layer {number}", self._caches, number, cache)
                for number, cache in enumerate(self._caches)
            ),
        ]

    # -- serving ---------------------------------------------------------------------------------

    def admits(self, sequences: int, longest: int) -> bool:
        """Whether a decode step is prepared for a recording; where not it is counted here.

        Args:
            sequences: of the step, one new token each.
            longest: tokens of its longest sequence.
        """
        if sequences > self.most:
            cure = "raise max_num_seqs to the largest decode batch"
            self.fall_back(sequences, "above_max_batch", cure)
            return False
        if longest > self._longest:
            self.fall_back(
                sequences,
                "long_sequence",
                f"a sequence has {longest} tokens and the step is recorded for up to {self._longest}: "
                f"raise max_seq_len_to_capture",
            )
            return False
        return True

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        attn_metadata: Any,
        intermediate_tensors: Any = None,
        **others: Any,
    ) -> Any:
        """The model's hidden states (rows, hidden size) of an unpadded decode step.

        As `CUDAGraphRunner.forward`; a replayed result is valid until the next step.
        """
        rows = input_ids.shape[0]
        size = self.manager.ladder.bucket_for(rows)
        assert size is not None  # see admits
        if others or intermediate_tensors is not None:
            cure = f"the model is given more than tokens ({', '.join(sorted(others)) or 'tensors'})"
            self.fall_back(rows, "other_inputs", cure)
        elif kv_caches is not self._caches:
            self.fall_back(rows, "inputs_moved", "the engine made a new cache")
        elif not self.manager.serves(size):
            reason = self.manager.reason_of(size) or "not_recorded"
            why = self.manager.failure_of(size) or "see the report of the capture"
            self.fall_back(rows, reason, why)
        else:
            try:
                # On a tape attention is called live and reads the metadata of now.
                with set_forward_context(self._metadata[size]):
                    outputs = self.manager.run(batch_of(input_ids, positions, attn_metadata))
            except StaleRecordingError as error:
                self.fall_back(rows, "stale_recording", str(error))
            except InputError as error:  # a build of vLLM with other dtypes: nothing was launched
                self.fall_back(rows, "other_inputs", str(error))
            else:
                self.reporter.replayed(DECODE, size, rows)
                return outputs[HIDDEN]
        return self._model(
            input_ids=input_ids,
            positions=positions,
            kv_caches=kv_caches,
            attn_metadata=attn_metadata,
            intermediate_tensors=intermediate_tensors,
            **others,
        )

    def fall_back(self, rows: int, reason: str, remedy: str) -> None:
        """Count a decode step that vLLM is about to run its own way.

        Raises:
            FallbackError: ``GRAPHCAP_STRICT=1``.
        """
        self.manager.fall_back(rows, reason, remedy)
        self.reporter.fell_back(reason, rows)
