"""Runs a step under lint's eyes: warm-up, every batch size, the largest twice, and the tape itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from graphcap.buckets import is_count
from graphcap.capturing import check_outputs
from graphcap.errors import CaptureError, InputError
from graphcap.inputs import NUM_ROWS, StaticInputs
from graphcap.lint.compare import note_branches, note_state
from graphcap.lint.finding import BREAKS, RECORDERS, TAPE, WEAKENS, Finding, LintReport, Notes
from graphcap.lint.places import Site, Step, call_step, place_in
from graphcap.lint.python_calls import CudaNames
from graphcap.lint.rebinding import Rebinding, lines_that_change, note_rebinding
from graphcap.lint.stand_ins import CudaStandIns
from graphcap.lint.subject import Subject, static_inputs
from graphcap.lint.trace import LintTrace
from graphcap.pool import BufferPool
from graphcap.recorders.base import autocast_casts_not_kept
from graphcap.recorders.dispatched import storage_key
from graphcap.recorders.source import raising_line
from graphcap.recorders.tape import TapeRecorder

_NOWHERE = Site(None, None)
_LACKS_A_GPU = re.compile(
    r"not compiled with CUDA|no NVIDIA driver|No CUDA GPUs|0 active drivers|Could not run '|"
    r"no fake impl|not implemented for|[Nn]o backend type"
)
"""Errors that say that this machine cannot run the step, which tells nothing of a capture."""
_NO_VALUES = re.compile(r"meta tensor|Meta tensor|no fake impl|on meta|data-dependent")


class Stopped(Exception):
    """The step raised, and lint cannot run it any further; `findings` are those up to there."""

    def __init__(self, error: BaseException, size: int, findings: list[Finding]) -> None:
        super().__init__(f"{type(error).__name__} at {raising_line(error.__traceback__)}: {error}")
        self.error, self.size, self.findings = error, size, findings


@contextmanager
def lint_surroundings(device: torch.device) -> Iterator[CudaStandIns]:
    """Where a step is made and linted: CUDA's devices, streams and events are stood in for."""
    cuda = CudaStandIns()
    with cuda.installed(), CudaNames(device):
        yield cuda


def lint(
    subject: Subject,
    cuda: CudaStandIns,
    batches: Sequence[int] | None = None,
    recorders: tuple[str, ...] = RECORDERS,
) -> LintReport:
    """Lint `subject`, inside of `lint_surroundings`.

    Args:
        batches: the batch sizes to run; None: the largest and three smaller ones.
        recorders: those that matter; what breaks none of them is an information.

    Raises:
        InputError: a batch size is not one of the slots'.
    """
    largest = subject.inputs.max_batch
    asked = batch_sizes(largest) if batches is None else tuple(batches)
    if not asked or not all(is_count(size) and size <= largest for size in asked):
        raise InputError(
            f"batches: expected sizes from 1 to {largest}, the rows of the inputs, found "
            f"{', '.join(map(repr, asked)) or 'none'}"
        )
    sizes = tuple(sorted(set(asked))[::-1])
    cuda.see_triton()
    report = _Linter(subject, cuda, sizes, recorders).run()
    report.keep(recorders)
    report.sort()
    return report


def lint_step(
    step: Step,
    inputs: StaticInputs | Mapping[str, torch.Tensor],
    *,
    state: Sequence[torch.Tensor | torch.Generator] = (),
    pool: BufferPool | None = None,
    batches: Sequence[int] | None = None,
) -> LintReport:
    """Lint a step that exists already, on CPU or meta tensors: for tests of one's own.

    Args:
        step: takes a mapping of names to tensors and returns one. Streams and events that it uses have
            to be made in it.
        inputs: its slots, or example tensors (n, *row shape) for slots.
        state: what it changes besides slots, as for `CaptureManager`.
        pool: where it takes its buffers; None: it has none, or lint need not know. It is frozen.
        batches: as for `lint`.
    """
    slots = inputs if isinstance(inputs, StaticInputs) else static_inputs(inputs)
    generators = tuple(item for item in state if isinstance(item, torch.Generator))
    name = getattr(step, "__qualname__", type(step).__qualname__)
    with lint_surroundings(slots.device) as cuda:
        return lint(Subject(name, step, slots, pool, generators), cuda, batches)


def batch_sizes(largest: int) -> tuple[int, ...]:
    """The sizes that are run, largest first: at most four."""
    return tuple(sorted({1, 2, (largest + 1) // 2, largest} & set(range(1, largest + 1)))[::-1])


class _Linter:
    def __init__(
        self,
        subject: Subject,
        cuda: CudaStandIns,
        sizes: tuple[int, ...],
        recorders: tuple[str, ...],
    ) -> None:
        self._subject, self._cuda = subject, cuda
        self._inputs, self._device = subject.inputs, subject.inputs.device
        self._saved = subject.inputs.snapshot()
        self._sizes, self._recorders = sizes, recorders
        self.report = LintReport(subject.name, self._device.type, self._sizes)
        cuda.generators = subject.generators

    def run(self) -> LintReport:
        try:
            self._warm_up()
            if self._subject.pool is not None and self._device.type != "meta":
                self._subject.pool.freeze()
            asked = self._cuda.were_asked
            each = [(name,) for name in RECORDERS if name in self._recorders]
            for recorders in each if asked else [RECORDERS]:
                self._all_sizes(recorders)
            if self._device.type == "cpu" and TAPE in self._recorders:
                self._ask_the_tape(self._sizes[0])
        except Stopped as stopped:
            self._stop(stopped)
        finally:
            self._inputs.restore(self._saved)
        return self.report

    def _all_sizes(self, recorders: tuple[str, ...]) -> None:
        """Every size as these recorders run it."""
        largest = self._largest(recorders)
        for size in self._sizes[1:]:
            trace = self._watched(size, recorders)
            notes = Notes(recorders)
            note_branches(largest, trace, self._sizes[0], notes)
            self.report.add(notes.findings, size, "branches")

    # -- runs ------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """As a recorder does. A smaller batch that fails costs that batch only."""
        for size in self._sizes:
            try:
                self._run(size, LintTrace(self._device, self._cuda, warming_up=True))
                self.report.add([], size, "warm-up")
            except Stopped as stopped:
                if self._device.type == "meta" and self._cuda.were_asked:
                    continue  # where it is told that it is captured it may read no value
                if size == self._sizes[0]:
                    raise
                self.report.add(self._error(stopped), size, "warm-up")
                self._sizes = tuple(s for s in self._sizes if s != size)

    def _largest(self, recorders: tuple[str, ...]) -> LintTrace:
        """The largest batch, twice."""
        size, notes = self._sizes[0], Notes(recorders)
        rebinding = Rebinding(self._subject.step)
        first = self._watched(size, recorders)
        rebound = rebinding.changed()
        self.report.operations = first.operations
        with lines_that_change(rebound) as lines:
            second = LintTrace(self._device, self._cuda, recorders)
            self._run(size, second)
        note_rebinding(rebound, lines, notes)
        note_state(first, second, notes)
        self.report.add(notes.findings, size, "twice")
        return first

    def _watched(self, size: int, recorders: tuple[str, ...]) -> LintTrace:
        trace = LintTrace(self._device, self._cuda, recorders)
        outputs = self._run(size, trace)
        notes = trace.notes
        told = any(finding.kind == "outputs" for finding in self.report.findings)
        if not told:
            try:
                check_outputs(outputs, size)
            except CaptureError as error:
                self._note_refused(notes, "outputs", str(error.args[0]), RECORDERS)
            else:
                self._note_aliases(outputs, notes)
        # One size tells all allocations, and outputs are told once.
        looked = {"allocation": size == self._sizes[0], "outputs": not told}
        by = ", ".join(recorders)
        self.report.add([f for f in notes.findings if f.kind not in looked], size, f"run, {by}")
        for kind, here in looked.items():
            if here:
                self.report.add([f for f in notes.findings if f.kind == kind], size, kind)
        return trace

    def _run(self, size: int, trace: LintTrace) -> Mapping[str, torch.Tensor]:
        inputs = self._bind(size)
        rows = self._inputs.rows
        try:
            with torch.no_grad(), autocast_casts_not_kept(), trace.watching():
                self._inputs.restore_pads()
                outputs = call_step(self._subject.step, inputs)
        except (Exception, SystemExit) as error:  # an exit code of the step's is none of lint's
            raise Stopped(error, size, trace.notes.findings) from error
        if self._device.type != "meta":
            left = int(self._inputs.views(1)[NUM_ROWS])
            if left != rows:
                trace.notes.note(
                    "outputs",
                    f"inputs['{NUM_ROWS}'] was changed (from {rows} to {left})",
                    "it tells padding from real rows",
                    "write the result into a tensor of its own",
                    breaks=RECORDERS,
                    site=_NOWHERE,
                )
        return outputs

    def _bind(self, size: int) -> Mapping[str, torch.Tensor]:
        """The slots of `size` rows with the batch that the subject came with."""
        self._inputs.restore(self._saved)
        if self._inputs.rows > size:
            self._inputs.load({}, size)
        return self._inputs.views(size)

    def _ask_the_tape(self, size: int) -> None:
        """The tape has the last word, where nothing was found that it refuses."""
        if any(TAPE in finding.recorders for finding in self.report.findings):
            return
        inputs = self._bind(size)

        def step() -> Mapping[str, torch.Tensor]:
            self._inputs.restore_pads()
            return call_step(self._subject.step, inputs)

        try:
            TapeRecorder(self._device).record(step, size).close()
        except CaptureError as error:
            notes = Notes()
            self._note_refused(notes, "refused", str(error.args[0]), (TAPE,))
            self.report.add(notes.findings, size, "tape")

    # -- findings of a whole run -----------------------------------------------------------------

    def _note_refused(self, notes: Notes, kind: str, text: str, breaks: tuple[str, ...]) -> None:
        what, _, cure = text.rpartition("; ")
        notes.note(
            kind,
            re.sub(r"^bucket \d+: ", "", what or text),
            "the recorder refuses it",
            cure if what else "see graphcap explain capture",
            breaks=breaks,
            site=Site(place_in(text), None),
        )

    def _note_aliases(self, outputs: Mapping[str, torch.Tensor], notes: Notes) -> None:
        slots = {storage_key(tensor) for tensor in self._inputs.pinned.values()}
        for name, tensor in outputs.items():
            if storage_key(tensor) in slots:
                notes.note(
                    "alias",
                    f"output {name!r} lies in a slot",
                    "the next batch overwrites it before a replay, and what a caller writes into it "
                    "changes the slot",
                    "return a tensor of its own: write the result into a buffer of the pool",
                    severity=WEAKENS,
                    site=_NOWHERE,
                )

    def _stop(self, stopped: Stopped) -> None:
        report, text = self.report, str(stopped)
        report.add(stopped.findings, stopped.size, "stopped")
        refused = any(finding.severity == BREAKS for finding in report.findings)
        if self._device.type != "meta":
            report.add(self._error(stopped), stopped.size, "stopped")
        elif refused or _NO_VALUES.search(text):
            text += "; meta tensors hold no values: give --device cpu"
        else:
            text += "; --device cpu tells whether meta tensors or the step are at fault"
        report.stopped = text

    def _error(self, stopped: Stopped) -> list[Finding]:
        """The finding that the step raised, unless for want of a GPU, which tells nothing."""
        notes, text = Notes(), str(stopped)
        if not _LACKS_A_GPU.search(text):
            notes.note(
                "error",
                f"{type(stopped.error).__name__}: {_first_line(stopped.error)}",
                "the step raises it, without graphcap as well",
                "make the step run at every batch up to its largest",
                breaks=RECORDERS,
                site=Site(place_in(text), None),
            )
        return notes.findings


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
