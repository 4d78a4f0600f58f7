"""Traffic: a distribution of batch sizes, and what buckets were measured to cost, from where they are.

Four sources: CSV (``batch,count``), JSON, the text of a Prometheus endpoint, and our own reports.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphcap.errors import InputError
from graphcap.ladder_plan import check_counts
from graphcap.prometheus_text import looks_like_metrics, traffic_series
from graphcap.scrape import fetch, metrics_url, parse

_SECONDS = 10
_MOST_DIGITS = 18


@dataclass(frozen=True)
class Traffic:
    """What a ladder is planned for.

    Attributes:
        counts: batch size -> decode steps of that size, replayed and eager.
        source: where it is from.
        max_batch: the largest bucket that was asked for there; None: it is not told.
        ms: bucket -> measured ms of a replay.
        mib: bucket -> measured MiB of its recording.
    """

    counts: Mapping[int, int]
    source: str
    max_batch: int | None = None
    ms: Mapping[int, float] = field(default_factory=dict)
    mib: Mapping[int, float] = field(default_factory=dict)


def read_histogram(path: Path) -> Traffic:
    """Read a file of batch sizes: CSV, JSON or saved Prometheus text, told apart by its contents.

    CSV: lines ``batch,count``, a header and lines that begin with ``#`` allowed; repeats are summed.
    JSON: ``{"1": 90, "4": 10}``, ``[[1, 90], [4, 10]]``, or either under the key ``batches``.

    Raises:
        InputError: the file cannot be read or holds something else; names the line.
    """
    text = _text_of(path)
    if text.lstrip()[:1] in ("{", "["):
        return Traffic(_counts(_json(text, path), str(path)), str(path))
    if looks_like_metrics(text):
        return _of_metrics(text, str(path))
    return Traffic(_of_csv(text.splitlines(), path), str(path))


def read_metrics(url: str) -> Traffic:
    """Read the ``/metrics`` endpoint of a running server; the path may be left out of `url`.

    Raises:
        SettingsError, ScrapeError, BackendError: see `graphcap.scrape.scrape`.
        InputError: the server has counted no decode step of graphcap's.
    """
    full = metrics_url(url)
    return _of_metrics(fetch(full, timeout=_SECONDS), full)


def read_report(path: Path, *, needs_batches: bool = True) -> Traffic:
    """Read a report: what ``GRAPHCAP_REPORT`` names, or what ``graphcap decode --json`` printed.

    Args:
        needs_batches: False: only what buckets cost is wanted; counts may be empty.

    Raises:
        InputError: not a report, or one without the batches that were served.
    """
    plain = _json(_text_of(path), path)
    managers = plain.get("managers") if isinstance(plain, dict) else None
    report = managers.get("decode") if isinstance(managers, dict) else plain
    buckets = report.get("buckets") if isinstance(report, dict) else None
    if (
        not isinstance(report, dict)
        or not isinstance(buckets, list)
        or not all(isinstance(bucket, dict) and _is_size(bucket.get("size")) for bucket in buckets)
    ):
        raise InputError(
            f"{path} is not a report: expected the file that GRAPHCAP_REPORT named, or the output of "
            f"graphcap decode --json; for batch sizes alone use --histogram"
        )
    served = plain.get("served") or {}
    batches = served.get("batches") if isinstance(served, dict) else None
    if not batches and needs_batches:
        raise InputError(
            f"{path} tells of no decode step: a report has them from when the process ended in good "
            f"order; while a server runs use --from-metrics URL, and with --costs {path} "
            f"what this report measured"
        )
    ladder = [*(bucket["size"] for bucket in buckets), *_sizes_without_recording(plain, report)]
    return Traffic(
        _counts(batches or {}, str(path)),
        str(path),
        max(ladder, default=None),
        {b["size"]: b["replay_ms"] for b in buckets if _is_number(b.get("replay_ms"))},
        {b["size"]: mib for b in buckets if (mib := _mib(b)) is not None},
    )


def _sizes_without_recording(plain: Mapping[str, Any], report: Mapping[str, Any]) -> list[int]:
    failures, choice = report.get("failures"), plain.get("choice")
    failed = failures if isinstance(failures, dict) else {}
    chosen = choice.get("decode", []) if isinstance(choice, dict) else []
    return [*map(int, filter(str.isdigit, failed)), *filter(_is_size, chosen)]


def _mib(bucket: Mapping[str, Any]) -> float | None:
    if _is_number(bucket.get("mib")):
        return float(bucket["mib"])
    return bucket["nbytes"] / 2**20 if _is_number(bucket.get("nbytes")) else None


def _of_metrics(text: str, source: str) -> Traffic:
    series = traffic_series(parse(text, source))
    if not series.batches:
        has_vllm = "vllm:" in text
        raise InputError(
            f"{source} has no graphcap_batches_total, the decode steps by their number of rows; "
            + (
                "vLLM's own metrics do not tell them (vllm:iteration_tokens_total counts the tokens of "
                "prompts too, in steps of powers of two): run the server with GRAPHCAP=1 and serve "
                "some traffic"
                if has_vllm
                else "give the /metrics of a vLLM server that runs with GRAPHCAP=1 and has served"
            )
        )
    return Traffic(
        _counts(series.batches, source),
        source,
        max({*series.bucket_bytes, *series.bucket_seconds}, default=None),
        {size: seconds * 1e3 for size, seconds in series.bucket_seconds.items()},
        {size: nbytes / 2**20 for size, nbytes in series.bucket_bytes.items()},
    )


def _of_csv(lines: Iterable[str], path: Path) -> dict[int, int]:
    counts: Counter[int] = Counter()
    first = True
    for number, row in enumerate(csv.reader(lines), 1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or cells[0].startswith("#"):
            continue
        is_header = first and [cell.lower() for cell in cells[:2]] == ["batch", "count"]
        first = False
        if is_header:
            continue
        if len(cells) != 2 or not all(map(_is_count, cells)):
            raise InputError(
                f"{path}, line {number}: expected batch,count such as 8,1200, found "
                f"{','.join(row)[:80]!r}; correct or remove that line"
            )
        counts[int(cells[0])] += int(cells[1])
    check_counts(counts)
    return _not_empty(counts, str(path))


def _counts(plain: Any, source: str) -> dict[int, int]:
    """The counts in what a JSON file holds, keys as text or pairs."""
    if isinstance(plain, dict) and "batches" in plain:
        plain = plain["batches"]
    pairs = list(plain.items()) if isinstance(plain, Mapping) else plain
    counts: Counter[int] = Counter()
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        good = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not good or not all(_is_count(str(part)) for part in pair):
            raise InputError(
                f'{source}: expected batch sizes and counts such as {{"1": 90, "4": 10}}, '
                f"found {str(pair)[:80]}"
            )
        counts[int(pair[0])] += int(pair[1])
    check_counts(counts)
    return dict(counts)


def _not_empty(counts: Mapping[int, int], source: str) -> dict[int, int]:
    if not counts:
        raise InputError(f"{source} is empty: expected lines batch,count such as 8,1200")
    return dict(counts)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte-order mark
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text: {error}") from error


def _json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from error


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
