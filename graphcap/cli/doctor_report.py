"""What ``graphcap doctor`` tells of the last capture: the report that ``GRAPHCAP_REPORT`` names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def lines_of(report: Path | None) -> list[str]:
    """A line for each thing that the last capture could not record; empty where there is no report.

    A server that failed to record at start-up and has run eagerly since says so here as well, to whoever
    did not see its log.
    """
    if report is None:
        return []
    beside = sorted(report.parent.glob(f"{report.stem}.rank*{report.suffix}"))
    return [line for path in (report, *beside) for line in _lines(path)]


def _lines(path: Path) -> Iterator[str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:  # nothing was captured yet
        return
    except (OSError, ValueError) as error:
        yield f"{path} cannot be read as a capture report: {error}"
        return
    if not isinstance(content, dict):
        yield f"{path} cannot be read as a capture report: it holds no JSON object"
        return
    for kind, one in _managers(content):
        failures = one.get("failures") or {}
        total = len(failures) + len(one.get("buckets") or ())
        for text, sizes in _by_text(failures).items():
            yield (
                f"the last capture ({path}) did not record {len(sizes)} of {total} {kind}buckets "
                f"({', '.join(sizes)}): {text}"
            )
    for reason, steps in ((content.get("served") or {}).get("fallbacks") or {}).items():
        yield f"since the last capture ({path}) {steps} steps ran eagerly: {reason}"


def _managers(content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A host's report holds one for each kind of batch."""
    if isinstance(content.get("managers"), dict):
        for kind, one in content["managers"].items():
            yield f"{kind} ", one
    else:
        yield "", content


def _by_text(failures: Mapping[str, str]) -> dict[str, list[str]]:
    sizes: dict[str, list[str]] = {}
    for size, text in sorted(failures.items(), key=lambda item: int(item[0])):
        sizes.setdefault(text.removeprefix(f"bucket {size}: "), []).append(size)
    return sizes
