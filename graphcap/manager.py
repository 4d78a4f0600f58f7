"""CaptureManager: records a step for every bucket of a ladder and serves batches from the recordings.

Knows no model: it captures any callable over static inputs. Its life is
*new → warmed → frozen → recorded*; `close()` ends it at any point.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import torch

from graphcap.buckets import BucketLadder
from graphcap.capturing import BucketCapture
from graphcap.checks import Fingerprint
from graphcap.errors import (
    InputError,
    LadderError,
    StateError,
)
from graphcap.fallback import Fallback
from graphcap.inputs import StaticInputs
from graphcap.operations import current_observer
from graphcap.pool import BufferPool
from graphcap.reachable import reachable
from graphcap.recorders.base import BoundStep, Recorder, Recording, garbage_collection_held
from graphcap.recorders.select import select_recorder
from graphcap.report import BucketStats, CaptureReport, ManagerStats
from graphcap.settings import Settings
from graphcap.verify import Example, Verifier

logger = logging.getLogger(__name__)

Step = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""All that a model owes. Gets the slots (bucket rows each) and ``num_rows``; may write into slots in
place; returns tensors whose first dimension is the batch."""

Progress = Callable[[int, int, str], None]
"""Called with (done, of how many, what comes next) while capture() works."""


class _Served:
    """A bucket: its recording, what it has served so far, the views it returns by row count."""

    __slots__ = ("recording", "replays", "rows", "size", "views")

    def __init__(self, size: int) -> None:
        self.size = size
        self.recording: Recording | None = None
        self.replays = self.rows = 0
        self.views: dict[int, Mapping[str, torch.Tensor]] = {}

    @property
    def padding_rows(self) -> int:
        return self.replays * self.size - self.rows


class CaptureManager:
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

    One thread at a time: a call that meets another raises `StateError`. Replays run on the current
    CUDA stream; outputs last until the next call of run().
    """

    def __init__(
        self,
        step: Step,
        inputs: StaticInputs,
        *,
        pool: BufferPool | None = None,
        ladder: BucketLadder | None = None,
        settings: Settings | None = None,
        example: Example | None = None,
        state: Sequence[torch.Tensor | torch.Generator] = (),
        rows_mix: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self.step = step
        self.inputs = inputs
        self.settings = Settings.from_env() if settings is None else settings
        self.pool = BufferPool(inputs.device) if pool is None else pool
        self.ladder = ladder or BucketLadder.parse(self.settings.buckets, inputs.max_batch)
        if self.ladder.max_batch != inputs.max_batch:
            raise LadderError(
                f"the ladder ends at {self.ladder.max_batch} and the slots have "
                f"{inputs.max_batch} rows; both must be the maximum batch: "
                f"BucketLadder(sizes, max_batch={inputs.max_batch})"
            )
        self.recorder = recorder or select_recorder(self.settings.recorder, inputs.device)
        self._verifier = Verifier(inputs, self.pool, example, state, rows_mix)
        self.recorder.generators = self._verifier.generators
        self._lock = threading.Lock()
        self._state = "new"
        self._captured = BucketCapture(self.recorder, inputs, self._verifier, strict=False)
        self._served: dict[int, _Served] = {size: _Served(size) for size in self.ladder}
        self._steady: tuple[_Served, int] | None = None  # the last run was a replay of so many rows
        self._fingerprint: Fingerprint | None = None
        self._report: CaptureReport | None = None
        self._fallback = Fallback(step, inputs, self.pool, self.ladder, strict=self.settings.strict)
        self._unwatched_note: str | None = None
        self._verified = 0

    # -- capture ---------------------------------------------------------------------------------

    def capture(self, progress: Progress | None = None) -> CaptureReport:
        """Warm up every bucket, freeze the pool, record from the largest bucket down, verify.

        Slots, `state` and random generators are afterwards as they were before. A bucket that cannot
        be recorded or verified costs that bucket only: it is in the report, a WARNING is logged, and
        its batches run eagerly.

        Raises:
            StateError: recorded already, closed, or called inside a recording.
            PoolLimitError: the plan is larger than ``GRAPHCAP_POOL_MIB``.
            CaptureError, VerificationError: a bucket failed and ``GRAPHCAP_STRICT=1``.
        """
        with self._alone("capture()"):
            if self._state in ("recorded", "closed"):
                raise StateError(
                    f"capture() was called on a manager that is {self._state}; a manager captures "
                    f"once: close() it and make a new one"
                )
            started = time.perf_counter()
            notify = progress or (lambda done, total, what: None)
            launches = self.inputs.launches
            try:
                with garbage_collection_held(), self._verifier.put_back():
                    self._capture_all(notify)
                self._captured.warn()
                for size, recording in self._captured.recordings.items():
                    self._served[size].recording = recording
                self._report = self._reported(time.perf_counter() - started)
            except BaseException:
                self._drop_recordings()
                self._state = "new"
                raise
            finally:
                self.inputs.launches = launches  # what verification copied serves no batch
            self._state = "recorded"
            if self.settings.report is not None:
                self._write_report(self.settings.report)
            return self._report

    def _capture_all(self, notify: Progress) -> None:
        capture = BucketCapture(
            self.recorder, self.inputs, self._verifier, strict=self.settings.strict
        )
        self._captured = capture
        sizes = sorted(self.ladder, reverse=True)
        logger.info(
            "recording %d buckets (%s) with the %s recorder on %s",
            len(sizes),
            ", ".join(map(str, sizes)),
            self.recorder.name,
            self.inputs.device,
        )
        verifying = self.settings.verify != "off"
        work = [("warming up", size) for size in sizes] + [("recording", size) for size in sizes]
        work += [("verifying", size) for size in sizes] if verifying else []
        steps = iter(enumerate(work))

        def advance() -> int:
            done, (what, size) = next(steps)
            notify(done, len(work), f"{what} bucket {size}")
            return size

        for _ in sizes:
            size = advance()
            capture.warm_up(size, self._bound(size))
        self._state = "warmed"
        if not self.pool.frozen:
            self.pool.freeze(self.settings.pool_mib)
        self._state = "frozen"
        before = reachable(self.step)
        for _ in sizes:
            size = advance()
            capture.record(size, self._bound(size))
        pinned = {f"slot arena of {len(self.inputs.slots)} slots": self.inputs.arena}
        pinned["pool arena"] = self.pool.arena
        self._fingerprint = Fingerprint(self.step, pinned, before)
        self._note_unwatched(self._fingerprint.tensors())
        if verifying:
            fewest = {size: below + 1 for below, size in pairwise([0, *self.ladder])}
            for _ in sizes:
                size = advance()
                rows = sorted({fewest[size], size})
                kept = self._fingerprint.tensors()
                capture.verify(size, self._bound(size), rows, kept, self._bound)
        notify(len(work), len(work), "done")

    def _note_unwatched(self, watched: Sequence[torch.Tensor]) -> None:
        """Say what the recordings read and no name leads to: rebinding it will not be noticed."""
        known = {
            t.untyped_storage().data_ptr()
            for t in (*watched, *self.inputs.owned, *self._verifier.state)
        }
        unseen = {
            storage.data_ptr(): storage.nbytes()
            for recording in self._captured.recordings.values()
            for storage in recording.pinned
            if storage.data_ptr() not in known
        }
        if unseen:
            self._unwatched_note = (
                f"the step reads {len(unseen)} tensors ({sum(unseen.values()) / 2**20:.2f} MiB) that "
                f"no name leads to from it (a class attribute, another module's global, a cache): "
                f"they are kept alive, but rebinding them is not noticed"
            )

    def _bound(self, size: int) -> BoundStep:
        def bound() -> Mapping[str, torch.Tensor]:
            self.inputs.restore_pads()
            with self.pool.step():
                return self.step(self.inputs.views(size))

        return bound

    def _reported(self, seconds: float) -> CaptureReport:
        captured = self._captured
        largest = max(captured.recordings, default=None)
        return CaptureReport(
            recorder=self.recorder.name,
            device=_device_name(self.inputs.device),
            buckets=tuple(captured.reports[size] for size in sorted(captured.reports)),
            failures=captured.failures_text(),
            pool_bytes=self.pool.nbytes,
            pool_lower_bound_bytes=self.pool.plan.lower_bound,
            slots_bytes=self.inputs.arena.numel(),
            seconds=seconds,
            census=None if largest is None else captured.recordings[largest].census(),
            notes=(*self._verifier.notes, *filter(None, [self._unwatched_note])),
        )

    def _write_report(self, path: Path) -> None:
        try:
            self.report.write(path)
        except OSError as error:  # a full disk must not cost the recordings
            logger.warning("the capture report was not written to %s: %s", path, error)

    # -- run -------------------------------------------------------------------------------------

    def run(
        self,
        batch: Mapping[str, torch.Tensor] | None = None,
        *,
        rows: int | None = None,
        agreed_batch: int | None = None,
    ) -> Mapping[str, torch.Tensor]:
        """One step of n rows: exactly one launch, after the copies that bring the batch in.

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
        """
        if current_observer() is not None or not self._lock.acquire(blocking=False):
            raise self._busy("run()")
        try:
            steady = self._steady
            if steady is not None and batch is None and rows is None and agreed_batch is None:
                served, count = steady
                if count == self.inputs.rows:
                    return self._replay(served, count)
            return self._run(batch or {}, rows, agreed_batch)
        finally:
            self._lock.release()

    def _run(
        self, batch: Mapping[str, torch.Tensor], rows: int | None, agreed_batch: int | None
    ) -> Mapping[str, torch.Tensor]:
        if self._state != "recorded":
            raise StateError(
                f"run() was called on a manager that is {self._state}; "
                + ("make a new one" if self._state == "closed" else "call capture() first")
            )
        if not batch and self._fallback.continues(rows):
            return self._fallback.run_on()
        count = self.inputs.check(batch, rows)
        if agreed_batch is not None and agreed_batch < count:
            raise InputError(
                f"agreed_batch is {agreed_batch} but this rank has {count} rows; "
                f"agree on the maximum over all ranks"
            )
        size = self.ladder.bucket_for(agreed_batch or count)
        if size is None or size not in self._captured.recordings:
            reason = "above_max_batch" if size is None else self._captured.failures[size].reason
            self._steady = None
            return self._fallback.run(batch, count, reason)
        return self._replay(self._served[size], count, batch, settles=agreed_batch is None)

    def _replay(
        self,
        served: _Served,
        count: int,
        batch: Mapping[str, torch.Tensor] | None = None,
        settles: bool = True,
    ) -> Mapping[str, torch.Tensor]:
        assert self._fingerprint is not None
        self._fingerprint.check()
        if batch or count != self.inputs.rows:
            self.inputs.load(batch or {}, count)
        self._fallback.forget()
        every = self.settings.verify_every
        recording = served.recording
        assert recording is not None
        # A replay whose check failed is not counted, so the next run is checked again.
        if every and (self._replays + 1) % every == 0:
            self._verifier.check_live(recording, self._bound(served.size), served.size)
            self._verified += 1
        else:
            recording.replay()
        self._steady = (served, count) if settles else None
        served.replays += 1
        served.rows += count
        views = served.views.get(count)
        if views is None:
            # Read-only: these are handed out again at every run of as many rows.
            views = MappingProxyType({n: tensor[:count] for n, tensor in recording.outputs.items()})
            served.views[count] = views
        return views

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

    @property
    def _replays(self) -> int:
        return sum(served.replays for served in self._served.values())

    def stats(self) -> ManagerStats:
        return ManagerStats(
            state=self._state,
            recorder=self.recorder.name,
            steps=self._replays + self._fallback.counts.total(),
            replays=self._replays,
            fallbacks=dict(self._fallback.counts),
            rows=sum(served.rows for served in self._served.values()) + self._fallback.rows,
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
        )

    def close(self) -> None:
        """Give back every recording. Idempotent; outputs of earlier runs stay readable."""
        with self._alone("close()"):
            if self._state != "closed":
                self._drop_recordings()
                self.recorder.close()
                self._state = "closed"

    def __enter__(self) -> CaptureManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop_recordings(self) -> None:
        self._captured.close()
        for served in self._served.values():
            served.views.clear()
            served.recording = None
        self._fallback.forget()
        self._steady = None
        if self._fingerprint is not None:
            self._fingerprint.close()
            self._fingerprint = None

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if current_observer() is not None or not self._lock.acquire(blocking=False):
            raise self._busy(what)
        try:
            yield
        finally:
            self._lock.release()

    def _busy(self, what: str) -> StateError:
        if current_observer() is not None:
            return StateError(
                f"{what} was called inside a step that is being recorded; "
                f"recordings do not nest: call it outside the step"
            )
        return StateError(
            f"{what} was called while this manager is in use, by another thread or by its own step; "
            f"a manager serves one call at a time: use one per thread, or a lock"
        )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
