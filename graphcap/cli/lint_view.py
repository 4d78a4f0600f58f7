"""How findings of lint look on a terminal, and in a pipe."""

from __future__ import annotations

import os

from rich.console import Console
from rich.markup import escape

from graphcap.cli.tables import console_of_terminal
from graphcap.lint.finding import BREAKS, WEAKENS, Finding, LintReport
from graphcap.lint.places import Place

_STYLES = {BREAKS: "bold red", WEAKENS: "yellow"}


def print_lint(report: LintReport) -> None:
    console = console_of_terminal()
    sizes = ", ".join(map(str, report.batches))
    counted = f": {report.operations:,} operations at batch {report.batches[0]}"
    title = f"{report.subject} on {report.device}, batches {sizes}"
    _line(console, title + (counted if report.operations else ""))
    for note in report.notes:
        _line(console, note)
    told: tuple[str, str] | None = None
    for finding in report.findings:
        reason = (finding.why, finding.cure)
        if reason != told:  # what is told of a row of findings stands below the first
            console.print()
        _print_finding(console, finding, report, with_reason=reason != told)
        told = reason
    console.print()
    if report.stopped:
        console.print(f"[yellow]stopped:[/] {escape(report.stopped)}", soft_wrap=True)
    style = _STYLES[BREAKS] if report.count(BREAKS) else "bold"
    console.print(f"[{style}]{escape(report.verdict)}[/]", soft_wrap=True, highlight=False)


def _print_finding(
    console: Console, finding: Finding, report: LintReport, with_reason: bool
) -> None:
    style = _STYLES.get(finding.severity, "cyan")
    where = _where(finding.place) if finding.place else "the step"
    # One line that no width wraps: terminals and editors make file:line a link.
    console.print(
        f"{escape(where)}: [{style}]{finding.label}[/]: {escape(finding.kind)}: {escape(finding.what)}",
        soft_wrap=True,
        highlight=False,
    )
    if finding.place and finding.place.source:
        _line(console, f"    {finding.place.source}")
    if with_reason:
        _line(console, f"  why:  {finding.why}")
        _line(console, f"  cure: {finding.cure}")
    more = []
    if finding.via:
        more.append(f"called from {_where(finding.via)}")
    if finding.count > 1:
        more.append(f"{finding.count} times a step")
    if others := report.not_found_at(finding):
        some = ", ".join(map(str, finding.batches))
        everywhere = len(finding.batches) + len(others) == len(report.batches)
        more.append(f"at batch {some} " + ("only" if everywhere else f"and not {_or(others)}"))
    if more:
        _line(console, f"  ({'; '.join(more)})")


def _or(sizes: tuple[int, ...]) -> str:
    *first, last = map(str, sizes)
    return f"{', '.join(first)} or {last}" if first else last


def _line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _where(place: Place) -> str:
    """Relative to the current folder where it lies below it."""
    near = os.path.relpath(place.file)
    return f"{place.file if near.startswith('..') else near}:{place.line}"
