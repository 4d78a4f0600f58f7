"""CaptureManager: records a step for every bucket of a ladder and serves batches from the recordings.

Knows no model: it captures any callable over static inputs. Its life is
*new → warmed → frozen → recorded* (see `CaptureLife`); `close()` ends it at any point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from graphcap.errors import StateError
from graphcap.life import Progress, Step
from graphcap.many_views import Many
from graphcap.one_caller import alone
from graphcap.recorders.base import BoundStep, Recording
from graphcap.report import BucketStats, CaptureReport, ManagerStats
from graphcap.serving import Serving, checked_batch

__all__ = ["CaptureManager", "Progress", "Step"]


class CaptureManager(Serving):
    """Owns the recordings of one step.

    Args:
        step: the step. Anything it reads besides its slots must stay where it is.
        inputs: the step's slots; their `max_batch` is the largest batch that is recorded.
        pool: where the step takes its intermediates; None: a pool of its own.
        ladder: the buckets; None: what `settings.buckets` says. Its maximum is `inputs.max_batch`.
        settings: None: read from the environment.
        example: makes realistic batches for verification; see `Verifier`.
        state: tensors besides slots that the step changes so that running it twice differs from
            running it once (a counter, a running mean), and random generators of its own. They are
            put back after warm-up and verification. A key-value cache need not be listed: writing a
            row twice is the same.
        rows_mix: rows of the step depend on each other on purpose (a scale over the whole batch,
            say), so what padding holds may matter; otherwise verification refuses that.
        recorder: None: what `settings.recorder` says, on the device of `inputs`.
        watched: what must stay in place for the recordings; None: whatever the step can reach by name.
        ring: outputs that `run_many` keeps of each of its steps; None: there is no run_many().
        written: where a step writes in place besides slots and `state`, for tensors too large to be
            compared whole (256 MiB together): a key-value cache. See `graphcap.written`.
        agree: whether all ranks that run the step together say yes; each of them calls it after each
            check. None: the step runs on this rank alone.

    One thread at a time: a call that meets another raises `StateError`. Replays run on the current
    CUDA stream; outputs last until the next call of run().
    """

    # -- run -------------------------------------------------------------------------------------

    @alone
    def run(
        self,
        batch: Mapping[str, torch.Tensor] | None = None,
        *,
        rows: int | None = None,
        agreed_batch: int | None = None,
    ) -> Mapping[str, torch.Tensor]:
        """One step of n rows: exactly one launch, after the copies that bring the batch in (and, where rows
        can end (`Ring.stop`), the comparison that makes all of a new batch live).

        Args:
            batch: slot name -> tensor (n, *row_shape). Slots left out keep their contents, so a step
                that advances its own inputs needs no batch at all.
            rows: n, where `batch` is empty and n has changed, or to make sure.
            agreed_batch: the batch that all ranks agreed on (>= n); it chooses the bucket.

        Returns:
            Output name -> tensor of n rows. Owned by the recording; valid until the next run().

        Raises:
            InputError: the batch does not match the slots. Nothing was launched.
            StateError: not recorded, closed, or in use by another thread.
            StaleRecordingError: something that was recorded has been rebound or moved.
            FallbackError: no recording serves the batch and ``GRAPHCAP_STRICT=1``.
            VerificationError: ``GRAPHCAP_VERIFY=N`` found a difference and ``GRAPHCAP_STRICT=1``.
                Otherwise the outputs are the eager step's, and the bucket is given up with a WARNING.
        """
        steady = self._steady
        if steady is not None and batch is None and rows is None and agreed_batch is None:
            served, count = steady
            if count == self.inputs.rows:
                return self._replay(served, count)
        return self._run(checked_batch(batch), rows, agreed_batch)

    @alone
    def run_many(
        self,
        steps: int,
        batch: Mapping[str, torch.Tensor] | None = None,
        *,
        rows: int | None = None,
    ) -> Many:
        """So many steps of n rows by one call, for a step that writes the slots of its next step itself.

        Where the report's notes say nothing else it is one launch: a graph that repeats the step until
        `steps` are done or every row has ended (`Ring.stop`). Elsewhere the replays are enqueued one by
        one with no host work between; the host cannot know then that all rows have ended, so all `steps`
        run, and `Many.counts` tells which of them belong to a row. Either way rows that have ended go on
        being computed beside the others: their slots must have room for `steps` more.

        A row that has ended stays ended in later calls, until a batch is given to any call.

        Args:
            steps: 1 to the length of the ring.
            batch: of the first step; as for `run`. Left out, the step goes on from where it is.
            rows: as for `run`.

        Returns:
            The kept outputs of each step; see `Many`. `stats()` counts `steps` replays, also where the
            device stopped earlier.

        Raises:
            StateError: the manager was made without `ring`; and as `run`.
            InputError: more steps than the ring holds; and as `run`. Nothing was launched.
            StaleRecordingError, FallbackError: as `run`; looked at once a call.
        """
        steady = self._steady
        if steady is not None and batch is None and rows is None:
            served, count = steady
            if count == self.inputs.rows:
                return self._run_many_on(steps, served, count)
        return self._run_many(steps, checked_batch(batch), rows)

    # -- for hosts -------------------------------------------------------------------------------

    def serves(self, size: int) -> bool:
        """Whether bucket `size` has a recording that serves."""
        return self._state == "recorded" and size in self._captured.recordings

    @alone
    def replay(
        self, size: int, rows: int, eager: BoundStep | None = None
    ) -> Mapping[str, torch.Tensor]:
        """Replay bucket `size`, whose inputs the host has put in place, `rows` of them real.

        Args:
            eager: the step on those inputs, for ``GRAPHCAP_VERIFY=N``; None: it cannot be run twice.

        Returns:
            Output name -> tensor of all `size` rows. Owned by the recording; valid until the next
            replay. Where the check found a difference: the eager step's; the bucket serves no more, and
            the step is counted as a fallback.

        Raises:
            VerificationError: it found one and ``GRAPHCAP_STRICT=1``.
            StateError: no recording serves this bucket, or the manager is in use.
            StaleRecordingError: something that was recorded has been rebound or moved.
        """
        served = self._served.get(size)
        recording = None if served is None else served.recording
        if served is None or recording is None or self._state != "recorded":
            raise StateError(
                f"bucket {size} has no recording that serves; ask serves() before replay()"
            )
        assert self._fingerprint is not None
        due = eager is not None and self._due(served)
        served.check_outputs()
        self._fingerprint.check()
        if self._many is not None:
            self._many.came(rows)
        self.inputs.rows = rows
        if not due or eager is None:
            recording.replay()
            self._count(served, rows, 1)
            return recording.outputs
        instead = self._serve_checked(served, recording, rows, self._bound(size, eager))
        return recording.outputs if instead is None else instead

    def loops(self, size: int) -> bool:
        """Whether `run_many` runs bucket `size` as a loop on the device, by one graph launch."""
        return self._many is not None and size in self._many.loops

    def expect_change(self) -> None:
        """The next replay compares everything that the recordings point at with where it was."""
        if self._fingerprint is not None:
            self._fingerprint.expect_change()

    def fall_back(self, rows: int, reason: str, remedy: str) -> None:
        """Count a step of `rows` rows that the host is about to run eagerly; the first one of a reason
        is a WARNING that gives the `remedy`.

        Raises:
            FallbackError: ``GRAPHCAP_STRICT=1``.
        """
        self._fallback.announce(rows, reason, remedy)
        self._fallback.count(rows, reason)

    # -- the rest --------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        return self._state

    @property
    def report(self) -> CaptureReport:
        if self._report is None:
            raise StateError("there is no report before capture()")
        return self._report

    def recording(self, size: int) -> Recording:
        """The recording of bucket `size`. Raises `StateError` where there is none."""
        recordings = self._captured.recordings
        if size not in recordings:
            raise StateError(f"bucket {size} has no recording; recorded are {sorted(recordings)}")
        return recordings[size]

    def stats(self) -> ManagerStats:
        batches = Counter(self._fallback.batches)
        for served in self._served.values():
            batches.update(served.batches)
        return ManagerStats(
            state=self._state,
            recorder=self.recorder.name,
            steps=self._replays + self._fallback.counts.total(),
            replays=self._replays,
            fallbacks=dict(self._fallback.counts),
            rows=sum(rows * steps for rows, steps in batches.items()),
            padding_rows=sum(served.padding_rows for served in self._served.values()),
            input_launches=self.inputs.launches,
            verified=self._verified,
            pool_bytes=self.pool.nbytes,
            graph_bytes=0 if self._report is None else self._report.graph_bytes,
            capture_seconds=None if self._report is None else self._report.seconds,
            buckets=tuple(
                BucketStats(served.size, served.replays, served.padding_rows)
                for served in self._served.values()
            ),
            failures=self._captured.failures_text(),
            batches=dict(sorted(batches.items())),
        )

    def close(self) -> None:
        """Give back every recording. Idempotent; outputs of earlier runs stay readable. The report that
        capture() wrote (``GRAPHCAP_REPORT``) is written again, with what was served."""
        with self._alone("close()"):
            if self._state == "recorded":
                self._write_report(self.stats())
            # In front: where an interrupt ends this call nothing serves, and the next one goes on.
            self._steady, self._state = None, "closed"
            if not self._given_back:
                self._drop_recordings()
                self.recorder.close()
                self._given_back = True

    def __enter__(self) -> CaptureManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
