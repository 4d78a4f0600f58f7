"""CaptureLife: `capture()`, which goes through all phases by itself, and the report that it writes."""

from __future__ import annotations

import logging
from collections.abc import Callable

from graphcap.errors import StateError
from graphcap.explain import warn
from graphcap.many import Step
from graphcap.phases import CapturePhases
from graphcap.recorders.base import garbage_collection_held
from graphcap.report import CaptureReport, ManagerStats

__all__ = ["CaptureLife", "Progress", "Step"]

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Called with (done, of how many, what comes next) while capture() works."""


class CaptureLife(CapturePhases):
    """The phases in a row."""

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
        me = object()
        try:
            with self._alone("capture()"):
                if self._state in ("recorded", "closed"):
                    raise StateError(
                        f"capture() was called on a manager that is {self._state}; a manager captures "
                        f"once: close() it and make a new one"
                    )
                if self._capturer is not None:  # between two of its phases
                    raise self._busy("capture()")
                self._capturer = me
                self._restart()
            with garbage_collection_held(), self._state_of_step.put_back():
                self._capture_all(progress or (lambda done, total, what: None))
            report = self.finish()
        except BaseException:
            if self._capturer is me:
                with self._alone("capture()"):
                    self._give_up()
            raise
        finally:
            if self._capturer is me:
                self._capturer = None
        self._writes_report = self.settings.report is not None
        self._write_report(None)
        return report

    def _capture_all(self, notify: Progress) -> None:
        sizes = sorted(self.ladder, reverse=True)
        logger.info(
            "recording %d buckets (%s) with the %s recorder on %s",
            len(sizes),
            ", ".join(map(str, sizes)),
            self.recorder.name,
            self.inputs.device,
        )
        phases: list[tuple[str, Callable[[int], object]]] = [
            ("warming up", self.warm_up),
            ("recording", self.record),
        ]
        if self.settings.verify != "off":
            phases.append(("verifying", self._verify_and_time))
        done, total = 0, len(phases) * len(sizes)
        for what, phase in phases:
            if phase == self.record:
                self.freeze()
            for size in sizes:
                notify(done, total, f"{what} bucket {size}")
                phase(size)
                done += 1
            if phase == self.record:
                self._record_again(notify, done, total)
        notify(total, total, "done")

    def _record_again(self, notify: Progress, done: int, total: int) -> None:
        """Give back what failed recordings took, which takes recording the others once more."""
        while sizes := self._captured.taken_back():  # each round but the first: a bucket less
            for size in sizes:
                notify(done, total, f"recording bucket {size} again")
                self.record(size)

    def _verify_and_time(self, size: int) -> None:
        self.verify(size)
        self.time(size)

    def _restart(self) -> None:
        self._drop_recordings()  # of phases that a host began
        self._captured = self._new_capture()
        self._state, self._seconds, self._unwatched_note = "new", 0.0, None

    def _write_report(self, served: ManagerStats | None) -> None:
        path = self.settings.report
        if not self._writes_report or path is None:
            return
        try:
            assert self._report is not None
            self._report.write(path, served)
        except OSError as error:  # a full disk must not cost the recordings
            warn(
                logger,
                "report-not-written",
                "the capture report was not written to %s: %s",
                path,
                error,
            )
