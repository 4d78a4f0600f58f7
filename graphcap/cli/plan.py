"""``graphcap plan``: from the batches that a server saw to the ladder that pads them least."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphcap.cli.options import positive, print_json
from graphcap.errors import SettingsError

if TYPE_CHECKING:
    from graphcap.cost_model import CostModel
    from graphcap.ladder_plan import PlannedLadder
    from graphcap.traffic import Traffic


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="plan the ladder that pads the batches of a server least",
        description="Reads how often each batch size occurred and prints the ladder of at most N "
        "buckets, the maximum batch among them, with the least expected cost of a step: ms of a "
        "replay where buckets were measured, else rows computed. GRAPHCAP_BUCKETS=plan:FILE takes "
        "what --json prints.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--histogram",
        type=Path,
        metavar="FILE",
        help="CSV (batch,count), JSON ({batch: count}) or saved text of /metrics",
    )
    source.add_argument("--from-metrics", metavar="URL", help="/metrics of a running vLLM server")
    source.add_argument(
        "--from-report", type=Path, metavar="FILE", help="GRAPHCAP_REPORT, or of decode --json"
    )
    parser.add_argument(
        "--max-graphs", type=positive, required=True, metavar="N", help="most buckets to record"
    )
    parser.add_argument(
        "--max-batch",
        type=positive,
        metavar="N",
        help="the maximum batch of the engine (default: what the source tells, else the largest "
        "batch in it)",
    )
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="take ms and MiB of buckets from this report instead",
    )
    parser.add_argument(
        "--memory-mib",
        type=_mib,
        metavar="M",
        help="most MiB for all recordings (pool not counted)",
    )
    parser.add_argument(
        "--mib-per-graph",
        type=_mib,
        metavar="M",
        help="assume so many MiB for each recording, where none was measured",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the plan (PNG, SVG, PDF)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from graphcap.cost_model import CostModel
    from graphcap.ladder_plan import plan_ladder

    traffic = _traffic(options)
    costs = _costs(options, traffic)
    max_batch = options.max_batch or traffic.max_batch
    if max_batch is None:
        max_batch = max(costs.max_batch or 1, *(size for size, n in traffic.counts.items() if n), 1)
    memory = _memory(options, costs)
    cost = CostModel.of_times(costs.ms)
    planned = plan_ladder(
        traffic.counts,
        max_batch=max_batch,
        max_graphs=min(options.max_graphs, _fits(options.memory_mib, memory)),
        cost=cost,
    )
    result = _result(options, traffic, planned, cost, max_batch)
    result["memory_mib"] = None if memory is None else memory.of(len(planned.buckets))
    result["notes"] = _notes(options, traffic, costs, planned, memory)
    if options.plot is not None:
        from graphcap.cli.plan_figure import draw

        drawn = draw(options.plot, result, traffic.counts)
        # Not on standard output: JSON is read from there, and the last line of tables is the setting.
        size = drawn.stat().st_size / 1024
        print(f"{drawn}: {size:,.0f} KiB, the plan as a figure", file=sys.stderr)
    if options.json:
        print_json(result)
    else:
        from graphcap.cli.plan_tables import print_plan

        print_plan(result, traffic.counts)
    return 0


def _traffic(options: argparse.Namespace) -> Traffic:
    from graphcap.traffic import read_histogram, read_metrics, read_report

    if options.histogram is not None:
        return read_histogram(options.histogram)
    if options.from_metrics is not None:
        return read_metrics(options.from_metrics)
    return read_report(options.from_report)


def _costs(options: argparse.Namespace, traffic: Traffic) -> Traffic:
    """Where ms and MiB of buckets are from."""
    from graphcap.traffic import read_report

    return traffic if options.costs is None else read_report(options.costs, needs_batches=False)


@dataclass(frozen=True)
class _Memory:
    """MiB of recordings: of the largest bucket, of each other one, and where the figures are from.

    The largest is recorded first and takes what the others then share; a graph's own memory goes with
    its nodes, of which every bucket has about as many. So each bucket but the largest is taken for as
    large as the largest of them that was measured, which errs on the safe side.
    """

    largest: float
    other: float
    source: str

    def of(self, graphs: int) -> float:
        return self.largest + (graphs - 1) * self.other


def _memory(options: argparse.Namespace, costs: Traffic) -> _Memory | None:
    if options.mib_per_graph is not None:
        each = options.mib_per_graph
        return _Memory(
            each, each, f"{each:g} MiB for each recording were assumed (--mib-per-graph)"
        )
    if costs.mib:
        top = max(costs.mib)
        other = max((mib for size, mib in costs.mib.items() if size != top), default=costs.mib[top])
        text = f"measured: {costs.mib[top]:.2f} MiB for the largest bucket, at most {other:.2f} for others"
        return _Memory(costs.mib[top], other, text)
    if options.memory_mib is not None:
        raise SettingsError(
            f"--memory-mib {options.memory_mib:g}: expected a source that tells the MiB of buckets, "
            f"found none in {costs.source}; add --costs REPORT, or assume a size with --mib-per-graph"
        )
    return None


def _fits(limit: float | None, memory: _Memory | None) -> int:
    """How many recordings fit into `limit` MiB."""
    from graphcap.cli.options import LARGEST

    if limit is None or memory is None:
        return LARGEST
    if memory.largest > limit:
        raise SettingsError(
            f"--memory-mib {limit:g}: the largest bucket alone needs {memory.largest:.2f} MiB "
            f"({memory.source}); allow more, or lower the maximum batch"
        )
    if memory.other <= 0:
        return LARGEST
    # The quotient of two floats may end just below the whole number that it is.
    return 1 + min(int((limit - memory.largest) / memory.other + 1e-9), LARGEST)


def _result(
    options: argparse.Namespace,
    traffic: Traffic,
    planned: PlannedLadder,
    cost: CostModel,
    max_batch: int,
) -> dict[str, Any]:
    from graphcap.cost_model import CostModel
    from graphcap.default_ladders import DEFAULTS, SGLANG_SOURCE, VLLM_SOURCE
    from graphcap.ladder_plan import expected_cost, lower_bound

    served = {s: n for s, n in traffic.counts.items() if n and s <= max_batch}
    ladders = {name: ladder(max_batch) for name, ladder in DEFAULTS.items()}
    rows, least_rows = CostModel(), lower_bound(served, CostModel())
    return {
        "buckets": list(planned.buckets),
        "setting": "GRAPHCAP_BUCKETS=" + ",".join(map(str, planned.buckets)),
        "unit": cost.unit,
        "expected_cost": planned.expected_cost,
        "default_costs": {
            name: expected_cost(ladder, served, cost) for name, ladder in ladders.items()
        },
        "lower_bound": planned.lower_bound,
        "padding_rows_per_step": planned.padding_rows,
        "rows_per_step": least_rows,
        "default_padding_rows_per_step": {
            name: expected_cost(ladder, served, rows) - least_rows
            for name, ladder in ladders.items()
        },
        "default_buckets": {name: list(ladder) for name, ladder in ladders.items()},
        "default_sources": {"vllm": VLLM_SOURCE, "sglang": SGLANG_SOURCE},
        "max_batch": max_batch,
        "max_graphs": options.max_graphs,
        "memory_limit_mib": options.memory_mib,
        "source": traffic.source,
        "steps": planned.steps,
        "steps_above_max_batch": planned.above_max,
        "batch_sizes": len(served),
        "cost_model": {
            "text": cost.text,
            "points": [
                {"bucket": size, "measured_ms": measured, "fitted_ms": fitted}
                for size, measured, fitted in zip(
                    cost.sizes, cost.measured, cost.fitted, strict=True
                )
            ],
        },
    }


def _notes(
    options: argparse.Namespace,
    traffic: Traffic,
    costs: Traffic,
    planned: PlannedLadder,
    memory: _Memory | None,
) -> list[str]:
    notes = []
    if len(costs.ms) < 2:
        notes.append(
            f"{costs.source} has the times of fewer than two buckets, so a bucket costs its rows; "
            f"a report of a capture with verification has times (--costs REPORT)"
        )
    if planned.above_max:
        notes.append(
            f"{planned.above_max} steps were larger than {planned.buckets[-1]} and run eagerly in "
            f"every ladder: they are not counted; --max-batch plans for them"
        )
    if options.max_batch is None and traffic.max_batch is None and costs.max_batch is None:
        notes.append(
            f"the engine's maximum batch is not told, {planned.buckets[-1]} is the largest that "
            f"occurred: give --max-batch where the engine admits more"
        )
    if memory is not None:
        notes.append(f"memory: {memory.source}")
    return notes


def _mib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of MiB, found {text!r}")
    return value


def shares(buckets: list[int], counts: Mapping[int, int]) -> list[dict[str, Any]]:
    """For each bucket: the sizes that it serves, its steps, its rows of padding; for the plots."""
    found = []
    below = 0
    for bucket in buckets:
        inside = {size: n for size, n in counts.items() if below < size <= bucket and n}
        found.append(
            {
                "bucket": bucket,
                "from": below + 1,
                "steps": sum(inside.values()),
                "padding_rows": sum((bucket - size) * n for size, n in inside.items()),
            }
        )
        below = bucket
    return found
