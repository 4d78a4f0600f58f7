"""Findings: what would break or weaken a capture, and what is good to know."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from graphcap.lint.places import Place, Site, site_here

BREAKS, WEAKENS, INFORMATION = SEVERITIES = ("breaks", "weakens", "information")
CUDA, TAPE = RECORDERS = ("cuda", "tape")


@dataclass
class Finding:
    """One fault at one line.

    Attributes:
        severity: one of `SEVERITIES`.
        recorders: those that refuse the step for it, or whose recordings verification would refuse;
            empty unless it breaks.
        kind: what sort of fault, such as ``host read``.
        what, why, cure: what was found, what is wrong with it and what to write instead.
        place, via: innermost and outermost line of the step's code; None where no line is to blame.
        count: times in one run of the step.
        batches: batch sizes at which it was found.
        look: which of the looks that `LintReport.tried` lists found it.
    """

    severity: str
    recorders: tuple[str, ...]
    kind: str
    what: str
    why: str
    cure: str
    place: Place | None = None
    via: Place | None = None
    count: int = 1
    batches: tuple[int, ...] = ()
    look: str = ""

    @property
    def label(self) -> str:
        return " ".join([self.severity, ", ".join(self.recorders)]).strip()

    @property
    def key(self) -> tuple[Any, ...]:
        return self.severity, self.kind, self.what, self.why, self.place

    def to_json(self) -> dict[str, Any]:
        return {
            "severity": self.severity,
            "recorders": list(self.recorders),
            "kind": self.kind,
            "what": self.what,
            "why": self.why,
            "cure": self.cure,
            "place": _json_of(self.place),
            "via": _json_of(self.via),
            "count": self.count,
            "batches": list(self.batches),
        }


def _json_of(place: Place | None) -> dict[str, Any] | None:
    if place is None:
        return None
    return {
        "file": place.file,
        "line": place.line,
        "function": place.function,
        "source": place.source,
    }


class Notes:
    """The findings of one run of a step, equal ones counted.

    Args:
        recorders: what breaks others only is not a finding of this run.
    """

    def __init__(self, recorders: tuple[str, ...] = RECORDERS) -> None:
        self._recorders = recorders
        self._found: dict[tuple[Any, ...], Finding] = {}

    def note(
        self,
        kind: str,
        what: str,
        why: str,
        cure: str,
        *,
        breaks: tuple[str, ...] = (),
        severity: str = INFORMATION,
        site: Site | None = None,
        count: int = 1,
    ) -> None:
        """Write a finding down; `breaks` are the recorders that refuse, and make it a break."""
        recorders = tuple(name for name in breaks if name in self._recorders)
        if breaks and not recorders:
            return
        where = site_here() if site is None else site
        finding = Finding(
            BREAKS if recorders else severity,
            recorders,
            kind,
            what,
            why,
            cure,
            where.place,
            where.via if where.via != where.place else None,
            count,
        )
        known = self._found.setdefault(finding.key, finding)
        if known is not finding:
            known.count += count

    @property
    def findings(self) -> list[Finding]:
        return list(self._found.values())


@dataclass
class LintReport:
    """What lint found.

    Attributes:
        subject: the name of what was linted.
        device: ``cpu`` or ``meta``.
        batches: batch sizes that were run, largest first.
        operations: of one run of the largest.
        findings: by severity, then by file and line.
        stopped: why lint could not run the step to its end; None: it did.
        notes: what lint did, for the user.
        tried: look (a run under lint's eyes, a comparison, the tape itself) -> batch sizes it was made at.
    """

    subject: str
    device: str
    batches: tuple[int, ...]
    operations: int = 0
    findings: list[Finding] = field(default_factory=list)
    stopped: str | None = None
    notes: list[str] = field(default_factory=list)
    tried: dict[str, set[int]] = field(default_factory=dict)

    def add(self, findings: Iterable[Finding], batch: int, look: str) -> None:
        """Merge the findings, or that there are none, of a `look` at `batch` rows."""
        self.tried.setdefault(look, set()).add(batch)
        known = {finding.key: finding for finding in self.findings}
        for finding in findings:
            same = known.get(finding.key)
            if same is None:
                finding.batches, finding.look = (batch,), look
                known[finding.key] = finding
                self.findings.append(finding)
            else:
                same.recorders = tuple(
                    r for r in RECORDERS if r in same.recorders or r in finding.recorders
                )
                if batch not in same.batches:
                    same.batches = (*same.batches, batch)

    def not_found_at(self, finding: Finding) -> tuple[int, ...]:
        """Batch sizes at which it was looked for and not found, largest first."""
        return tuple(sorted(self.tried.get(finding.look, set()) - set(finding.batches))[::-1])

    def keep(self, recorders: tuple[str, ...]) -> None:
        """For these recorders only: what breaks none of them is an information."""
        for finding in self.findings:
            if finding.severity == BREAKS:
                ours = tuple(name for name in finding.recorders if name in recorders)
                if not ours:
                    finding.severity = INFORMATION
                    finding.what += f" ({', '.join(finding.recorders)} refuses it)"
                finding.recorders = ours

    def sort(self) -> None:
        nowhere = Place("", 0, "")
        self.findings.sort(
            key=lambda f: (SEVERITIES.index(f.severity), f.place or nowhere, f.kind, f.what)
        )

    def count(self, severity: str) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    def exit_code(self, *, strict: bool) -> int:
        """0 nothing would break, 1 something would, 2 the step could not be run to its end."""
        if self.count(BREAKS) or (strict and self.count(WEAKENS)):
            return 1
        return 2 if self.stopped else 0

    @property
    def verdict(self) -> str:
        breaks, weakens = self.count(BREAKS), self.count(WEAKENS)
        if breaks:
            by = {
                name: sum(name in finding.recorders for finding in self.findings)
                for name in RECORDERS
            }
            each = ", ".join(f"{name} {count}" for name, count in by.items() if count)
            text = f"{breaks} would break capture ({each})"
        else:
            text = "nothing found that would break capture"
        text += f", {weakens} {'weakens' if weakens == 1 else 'weaken'} it"
        return f"{text}; not linted to the end" if self.stopped else text

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "device": self.device,
            "batches": list(self.batches),
            "operations": self.operations,
            "findings": [finding.to_json() for finding in self.findings],
            **{severity: self.count(severity) for severity in SEVERITIES},
            "stopped": self.stopped,
            "notes": self.notes,
            "verdict": self.verdict,
        }
