"""What the plugin tells: one INFO block after the capture, the JSON report, the counters."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from graphcap.decode.plan_choice import PlanChoice
from graphcap.decode.plan_json import plan_to_json
from graphcap.explain import warn
from graphcap.hosts.vllm.choice import Choice
from graphcap.hosts.vllm.counters import SharedCounters
from graphcap.hosts.vllm.experts import PooledExperts
from graphcap.hosts.vllm.served import path_of_rank
from graphcap.pool import BufferPool
from graphcap.report import CaptureReport, write_json
from graphcap.settings import Settings

logger = logging.getLogger(__name__)

_BREAKS = "vllm."
"""Operations in vLLM's own namespace read the forward context on the host (attention, cache update,
linear attention): on a tape they are its breaks, called live with the metadata of the step."""


class Captured(Protocol):
    """What is told of an engine: `EngineCapture`, or `DecodeEngine` of vLLM 0.6.3."""

    pool: BufferPool
    failed: str | None

    @property
    def experts(self) -> PooledExperts: ...


class Reporter:
    """Of one model runner: knows its rank, and what has happened so far."""

    def __init__(self, choice: Choice, settings: Settings, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        self.rank = int(getattr(parallel, "rank", 0) or 0)
        self.fallbacks: Counter[str] = Counter()
        self._choice = choice
        self._path = settings.report
        engine = int(getattr(parallel, "data_parallel_rank", 0) or 0)
        self._counters = SharedCounters(engine=engine, rank=self.rank)

    def replayed(self, kind: str, size: int, rows: int) -> None:
        if kind == "decode":
            self._counters.replay(size, rows)
        else:
            self._counters.mixed(size, rows)

    def fell_back(self, reason: str, rows: int | None = None) -> None:
        """A step ran eagerly; `rows` of a decode step."""
        self.fallbacks[reason] += 1
        self._counters.fallback(reason, rows)

    def captured(
        self, engine: Captured, reports: Mapping[str, CaptureReport], notes: Sequence[str]
    ) -> None:
        """The capture is over: say it once, write it down, count it."""
        seconds = sum(report.seconds for report in reports.values())
        graph_bytes = sum(report.graph_bytes for report in reports.values())
        decode = reports["decode"].buckets if "decode" in reports else ()
        self._counters.captured(
            seconds=seconds,
            graph_bytes=graph_bytes,
            pool_bytes=engine.pool.nbytes,
            bucket_bytes={bucket.size: bucket.nbytes for bucket in decode},
            bucket_ms={b.size: b.replay_ms for b in decode if b.replay_ms is not None},
        )
        logger.info("%s", "\n  ".join(self._lines(engine, reports, notes)))
        if self._path is not None:
            self._write(path_of_rank(self._path, self.rank), self._plain(engine, reports, notes))

    def _lines(
        self, engine: Captured, reports: Mapping[str, CaptureReport], notes: Sequence[str]
    ) -> list[str]:
        first = next(iter(reports.values()))
        seconds = sum(report.seconds for report in reports.values())
        recorded = any(report.buckets for report in reports.values())
        lines = [
            f"graphcap: {'the decode step' if recorded else 'nothing'} is recorded "
            f"({first.recorder} recorder on {first.device}, {seconds:.1f} s)"
        ]
        if engine.failed is not None:
            return [*lines, f"steps run eagerly: {engine.failed}"]
        for kind, report in reports.items():
            sizes = [bucket.size for bucket in report.buckets]
            what = "sequences" if kind == "decode" else "tokens"
            if not sizes:
                lines.append(f"{kind}: no bucket recorded")
                continue
            nodes = max(bucket.nodes for bucket in report.buckets)
            each = sum(bucket.capture_ms for bucket in report.buckets) / len(sizes)
            lines.append(
                f"{kind}: {len(sizes)} buckets of {sizes[0]} to {sizes[-1]} {what}, up to {nodes} "
                f"nodes, {report.graph_bytes / 2**20:.1f} MiB, {each:.0f} ms each"
            )
            live = breaks(report) if kind == "decode" else {}
            if live:
                named = ", ".join(f"{name} {count}" for name, count in live.items())
                lines.append(
                    f"breaks: {sum(live.values())} operations of a step run live ({named})"
                )
            for size, why in report.failures.items():
                lines.append(f"{kind} bucket {size} is not recorded: {why}")
        lines.append(f"pool: {engine.pool.nbytes / 2**20:.2f} MiB for all layers and buckets")
        for what, count in sorted(engine.experts.layers.items()):
            lines.append(f"{count} MoE layers: {what}")
        lines += lines_of_plans(engine.experts)
        lines += [
            f"{choice.operation} runs on {choice.kernel}: {choice.note}"
            for choice in engine.experts.choices()
            if choice.note
        ]
        lines += [*notes, f"mixed prefill-decode batches: {self._choice.mixed}"]
        counted = ", ".join(f"{reason} {n}" for reason, n in sorted(self.fallbacks.items()))
        lines.append(f"fallbacks so far: {counted or 'none'}")
        return lines

    def _plain(
        self, engine: Captured, reports: Mapping[str, CaptureReport], notes: Sequence[str]
    ) -> dict[str, Any]:
        import vllm

        return {
            "host": "vllm",
            "vllm": vllm.__version__,
            "rank": self.rank,
            "choice": self._choice.to_plain(),
            "managers": {kind: report.to_json() for kind, report in reports.items()},
            "breaks": sum(breaks(reports["decode"]).values()),
            "moe_layers": dict(engine.experts.layers),
            "kernels": [asdict(choice) for choice in engine.experts.choices()],
            "expert_plans": _plain_plans(engine.experts.plans),
            "expert_plans_by_size": {
                title: _plain_plans(plans) for title, plans in engine.experts.plans_by_title.items()
            },
            "pool_bytes": engine.pool.nbytes,
            "fallbacks": dict(self.fallbacks),
            "notes": list(notes),
        }

    def _write(self, path: Path, plain: dict[str, Any]) -> None:
        try:
            write_json(path, plain)
        except OSError as error:  # a full disk must not cost the recordings
            warn(
                logger,
                "report-not-written",
                "the capture report was not written to %s: %s",
                path,
                error,
            )


_BY = {"default": "by rule", "failed": "without a plan, theirs failed (see the WARNING),"}


def lines_of_plans(experts: PooledExperts) -> list[str]:
    """Where the plans of the experts come from, and what of them cannot be had here."""
    by_title = experts.plans_by_title
    if len(by_title) < 2:
        return _lines("experts", experts.plans)
    return [line for title, plans in by_title.items() for line in _lines(title, plans)]


def _lines(whose: str, plans: Mapping[int, PlanChoice]) -> list[str]:
    by_source: dict[str, list[str]] = {}
    lacking: list[str] = []
    for rows, choice in sorted(plans.items()):
        if choice.source == "not supported":
            continue
        what = _BY.get(choice.source, f"by {choice.source} {choice.file}")
        by_source.setdefault(what, []).append(str(rows))
        if choice.lacks:
            lacking.append(f"{whose} at batch {rows}: {choice.lacks}")
    found = [f"{whose} {what} at batch {', '.join(sizes)}" for what, sizes in by_source.items()]
    return [*found, *lacking]


def _plain_plans(plans: Mapping[int, PlanChoice]) -> dict[str, Any]:
    return {
        str(rows): {
            "source": choice.source,
            "why": choice.why,
            "plan": plan_to_json(choice.plan),
        }
        for rows, choice in sorted(plans.items())
    }


def breaks(report: CaptureReport) -> dict[str, int]:
    """Operations of one step that a tape calls live, counted by name; a CUDA graph has none."""
    if report.recorder != "tape" or report.census is None:
        return {}
    rows = report.census.rows
    return {row.operation: row.count for row in rows if row.operation.startswith(_BREAKS)}
